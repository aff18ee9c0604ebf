"""The dataset raised."""

from holdfast.core.messages import Stage
from holdfast.diagnose.finding import Case, Finding


def retried(case: Case) -> Finding | None:
    """It raised, and then it did not."""
    if case.what != "retried" or case.raised is None:
        return None
    return Finding(
        "sample-retried",
        f"it raised {case.raised.type_name}: {case.raised.text}; attempt {case.attempt} succeeded",
        (f"{case.attempt - 1} failed attempts",),
        "a service that fails now and then; the time it costs is in the report",
    )


def raised(case: Case) -> Finding | None:
    """An exception in a sample or in collate."""
    if case.raised is None:
        return None
    stage = "collate_fn" if case.stage is Stage.COLLATE else "the dataset"
    return Finding(
        "collate-raised" if case.stage is Stage.COLLATE else "sample-raised",
        f"{stage} raised {case.raised.type_name}: {case.raised.text}",
        (f"after {case.attempt} attempt(s)",),
        'fix or remove the sample; Policy(bad_sample="skip") goes on without it, Policy(retries=3) tries again',
    )


RULES = (retried, raised)
