"""A process for each item, a deadline for each, and results as they come."""

from concurrent.futures import as_completed

from work import ITEMS, process_data

from holdfast import Policy, Pool


def main() -> None:
    with Pool(max_tasks_per_child=1, policy=Policy(sample_timeout=2, worker_memory="512MiB")) as pool:
        items = {pool.submit(process_data, item): item for item in ITEMS}
        for future in as_completed(items):
            item, error = items[future], future.exception()
            print(f"{item}: {future.result()}" if error is None else f"{item}: LOST, {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
