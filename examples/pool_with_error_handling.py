"""A pool with error handling: every item has its result, or the reason why there is none."""

from work import ITEMS, process_data

from holdfast import Pool


def main() -> None:
    with Pool() as pool:
        futures = {item: pool.submit_with(process_data, item, timeout=2, memory="512MiB") for item in ITEMS}
        for item, future in futures.items():
            error = future.exception()
            print(f"{item}: {future.result()}" if error is None else f"{item}: LOST, {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
