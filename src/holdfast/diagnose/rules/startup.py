"""The worker never came up."""

from holdfast.diagnose.finding import Case, Finding


def boot_raised(case: Case) -> Finding | None:
    """Unpickling the dataset, or worker_init_fn."""
    if case.what != "boot" or case.raised is None:
        return None
    return Finding(
        "worker-init-raised",
        f"worker {case.worker} could not start: {case.raised.type_name}: {case.raised.text}",
        ("the exception came before the worker was ready", *case.raised.facts),
        "look at the initializer; see the traceback"
        if case.of_pool
        else "look at worker_init_fn and at what unpickling the dataset does; see the traceback",
    )


RULES = (boot_raised,)
