"""Wrong values are refused when the policy is made, with the accepted ones in the text."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch.utils.data

from holdfast import DataLoader, Policy, PolicyError, policy
from holdfast.policy import parse_bytes

DOCS = Path(__file__).parents[1] / "docs"


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


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("BADSAMPLE", "BAD_SAMPLE"),
        ("TIMEOUT", "SAMPLE_TIMEOUT"),
        ("SAMPLE_TIMOUT", "SAMPLE_TIMEOUT"),
        ("RUNDIR", "RUN_DIR"),
        ("RETRY", "RETRIES"),
        ("WORKER_MEM", "WORKER_MEMORY"),
    ],
)
def test_a_misspelt_variable_is_told_once_with_the_nearest_name(wrong, meant, caplog):
    """It would change nothing, silently."""
    policy._warn_once.cache_clear()
    for _ in range(2):
        assert Policy.from_environment({f"HOLDFAST_{wrong}": "1"}) == Policy()
    assert caplog.messages == [f"HOLDFAST_{wrong} does nothing: did you mean HOLDFAST_{meant}?"]


def test_what_is_not_ours_is_left_in_peace(caplog):
    """Known names, and those of other programs that begin alike."""
    known = [name.upper() for name in policy.PARSERS] + ["RUN_DIR", "ATTEMPT"]
    others = ["SLOW", "MARK", "TEST_MARK", "HOME", "DEBUG", "VERSION", "TOKEN"]
    policy.warn_of_misspelt({f"HOLDFAST_{name}": "1" for name in (*known, *others)} | {"BAD_SAMPLES": "1"})
    assert not caplog.messages


# What people read -----------------------------------------------------------------------------------------------------


def defaults_in(text, pattern):
    """name -> default, as written; parameters without one are left out."""
    found = re.findall(pattern, text, re.MULTILINE)
    return {name: eval(default, {"OSError": OSError}) for name, default in found if default}


def in_docstring(documented):
    return defaults_in(inspect.getdoc(documented), r"^(\w+)(?:=(.+?))?: \S")


def test_help_and_docs_know_every_field_with_its_default():
    fields = {field.name: field.default for field in dataclasses.fields(Policy)}
    assert in_docstring(Policy) == fields
    page, *_ = (DOCS / "policy.md").read_text().partition("\n## ")
    assert defaults_in(page, r"^\| `(\w+)` \| `(.+?)` \| \S") == fields


def test_help_knows_every_parameter_of_the_loader_with_its_default():
    parameters = list(inspect.signature(DataLoader).parameters.values())
    assert parameters[0].name == "dataset" and "\ndataset: " in inspect.getdoc(DataLoader)
    assert in_docstring(DataLoader) == {p.name: p.default for p in parameters[1:]}


def test_torchs_parameters_come_first_and_are_torchs():
    """In its order, with its defaults: what is ours is added."""
    ours = inspect.signature(DataLoader).parameters
    torchs = inspect.signature(torch.utils.data.DataLoader.__init__).parameters
    for name, parameter in list(torchs.items())[1:]:
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind), name
    assert set(ours) - set(torchs) == {"policy", "device"}
