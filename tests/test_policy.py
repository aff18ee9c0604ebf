"""Wrong values are refused when the policy is made, with the accepted ones in the text."""

import dataclasses

import pytest

from holdfast import Policy, PolicyError
from holdfast.policy import parse_bytes


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("bad_sample", "ignore", "'raise', 'skip' or 'replace'"),
        ("retries", -1, "0 or more"),
        ("retries", 1.5, "whole number"),
        ("retries", True, "whole number"),
        ("retry_on", "OSError", "exception class"),
        ("retry_on", (1,), "exception class"),
        ("retry_delay", -0.1, "0 or more"),
        ("strikes", 0, "1 or more"),
        ("sample_timeout", 0, "above 0"),
        ("sample_timeout", float("nan"), "above 0"),
        ("worker_memory", "lots", "4GiB"),
        ("worker_memory", 0, "above 0"),
        ("max_bad", 1.5, "0 to 1"),
        ("restarts", -1, "0 or more"),
        ("shared_files", "raise", "'warn', 'error' or 'ignore'"),
    ],
)
def test_wrong_values_are_refused(field, value, says):
    with pytest.raises(PolicyError, match=says):
        Policy(**{field: value})


def test_it_is_frozen_and_compares():
    policy = Policy(retries=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.retries = 3
    assert policy == Policy(retries=2) and hash(policy) == hash(Policy(retries=2))


def test_one_exception_class_is_enough():
    assert Policy(retry_on=ValueError).retry_on == (ValueError,)


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 << 30), ("512 MB", 512_000_000), ("1e9", 10**9), ("1.5k", 1500), ("7", 7)]
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


def test_from_the_environment():
    policy = Policy.from_environment(
        {
            "HOLDFAST_BAD_SAMPLE": "skip",
            "HOLDFAST_RETRIES": "3",
            "HOLDFAST_SAMPLE_TIMEOUT": "2.5",
            "HOLDFAST_MAX_BAD": "1",
            "HOLDFAST_SHARED_FILES": "error",
        }
    )
    assert policy.shared_files == "error"
    assert (policy.bad_sample, policy.retries, policy.sample_timeout, policy.max_bad) == ("skip", 3, 2.5, 1.0)
    with pytest.raises(PolicyError, match="HOLDFAST_RETRIES='x'"):
        Policy.from_environment({"HOLDFAST_RETRIES": "x"})
