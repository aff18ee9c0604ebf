"""What `holdfast repro` reads may come from anybody: nothing in it runs unless the user says so."""

import base64
import json
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from holdfast import DataLoader, Policy
from holdfast.__main__ import main
from holdfast.diagnose.run_folder import from_text, to_text


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


class Wild:
    """A pickle that runs code when it is opened."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return exec, (f"open({self.marker!r}, 'w').close()",)


HERE = "tests.process.test_repro_trust:Numbers"


def incident(**again):
    about = {"seed": 1, "batch": 0, "indices": [3], "position": 0}
    return {
        "record": "incident",
        "number": 0,
        "headline": "h",
        "finding": "sample-raised",
        "says": "s",
        "again": about | again,
    }


def written(folder, *incidents):
    file = folder / "trainer-1-0.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in ({"record": "part"}, *incidents)))
    return str(file)


@pytest.mark.parametrize("more", [[], ["--dataset", HERE]])
def test_indices_that_are_a_pickle_do_not_run(tmp_path, capsys, more):
    """A line of somebody else's file runs nothing, with --dataset too, and --trust is named."""
    marker = tmp_path / "marker"
    bomb = base64.b64encode(pickle.dumps(Wild(marker))).decode()
    file = written(tmp_path, incident(pickled=bomb))
    assert main(["repro", file, *more]) == 2
    assert not marker.exists()
    assert "--trust" in capsys.readouterr().err


def test_with_trust_it_runs(tmp_path, capsys):
    """--trust opens the pickle: it is what keeps the others out."""
    marker = tmp_path / "marker"
    bomb = base64.b64encode(pickle.dumps((Wild(marker), 3))).decode()
    assert main(["repro", written(tmp_path, incident(pickled=bomb)), "--dataset", HERE, "--trust"]) == 0
    assert marker.exists()


def test_a_dataset_beside_the_file_does_not_run(tmp_path, capsys):
    """The dataset that was kept is a pickle, too: opened with --trust alone."""
    marker = tmp_path / "marker"
    file = written(tmp_path, incident(literal="(3,)"))
    (tmp_path / "trainer-1-0.dataset").write_bytes(pickle.dumps(Wild(marker)))
    assert main(["repro", file]) == 2
    said = capsys.readouterr().err
    assert not marker.exists()
    assert "--trust" in said and "--dataset" in said
    main(["repro", file, "--trust"])
    assert marker.exists()


@pytest.mark.parametrize(
    ("indices", "kept"),
    [
        ((4, 5, 6), (4, 5, 6)),
        ((np.int64(4), torch.tensor(5), np.str_("a")), (4, 5, "a")),
        (("a/b.jpg", b"\x00\xff", 1.5, -3, None, True), ("a/b.jpg", b"\x00\xff", 1.5, -3, None, True)),
        (((1, "x"), [2, (3,)], {"k": 4}, {5}), ((1, "x"), [2, (3,)], {"k": 4}, {5})),
        (("\udc80\n'\"",), ("\udc80\n'\"",)),
    ],
)
def test_indices_are_kept_as_literals(indices, kept):
    """What Python can write down comes back as it was; numbers of numpy and torch as plain ones."""
    again = from_text(to_text(indices))
    assert again == kept
    assert [type(a) for a in again] == [type(k) for k in kept]


class Place(tuple):
    """An index that no literal can stand for."""


@pytest.mark.parametrize("odd", [Place((1, 2)), object(), float("nan"), range(3), np.arange(3)], ids=repr)
def test_other_indices_are_no_literals(odd):
    """Nothing is made into something else on the way."""
    assert to_text((1, odd)) is None


class Pairs(Dataset):
    def __getitem__(self, index):
        raise ValueError(f"{type(index).__name__} {index}")


def test_an_index_of_the_users_own_class_needs_trust(tmp_path, monkeypatch, capsys):
    """It is kept as a pickle, and the message says what to type."""
    monkeypatch.setenv("HOLDFAST_RUN_DIR", str(tmp_path / "run"))
    loader = DataLoader(
        Pairs(), batch_sampler=[[Place((1, 2))]], num_workers=1, policy=Policy(bad_sample="skip", max_bad=1.0)
    )
    assert list(loader) == []
    (file,) = (tmp_path / "run").glob("trainer-*.jsonl")
    made = ["--dataset", "tests.process.test_repro_trust:Pairs"]
    assert main(["repro", str(file), *made]) == 2
    assert "--trust" in capsys.readouterr().err
    assert main(["repro", str(file), *made, "--trust"]) == 1
    assert "ValueError: Place (1, 2)" in capsys.readouterr().err


class Mute(Place):
    """An index that cannot be shown."""

    def __repr__(self):
        raise ValueError("mute")


@pytest.mark.parametrize("index", [Mute((1, 2)), 1 << 50_000], ids=["object", "number"])
def test_an_index_that_cannot_be_shown_is_loaded_all_the_same(tmp_path, capsys, index):
    """With --trust: it is no literal."""
    kept = base64.b64encode(pickle.dumps((index, index))).decode()
    file = written(tmp_path, incident(pickled=kept, position=1))
    assert main(["repro", file, "--dataset", "tests.process.test_repro_trust:Pairs", "--trust"]) == 1
    said = capsys.readouterr()
    assert f"loading index <a {type(index).__name__}, whose __repr__ raised ValueError> of batch 0" in said.out
    assert "before it, raised" in said.err


@pytest.mark.parametrize("indices", [(), [3], 3, "abc", None])
def test_a_pickle_that_holds_no_indices_is_bad_input(tmp_path, capsys, indices):
    """As a literal is."""
    file = written(tmp_path, incident(pickled=base64.b64encode(pickle.dumps(indices)).decode()))
    assert main(["repro", file, "--dataset", HERE, "--trust"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "cannot be opened here" in said


@pytest.mark.parametrize(
    "line",
    [
        "[1, 2]",
        "7",
        '{"again": 3}',
        '{"again": {"literal": 3}}',
        '{"again": {"literal": "(3,)"}}',
        json.dumps(incident(literal="__import__('os').abort()")),
        json.dumps(incident(literal="()")),
        json.dumps(incident(literal="3")),
        json.dumps(incident(literal="(" * 100_000)),
        json.dumps(incident(literal="-" * 100_000 + "1")),
        json.dumps(incident(literal="(" + "9" * 10_000 + ",)")),
        json.dumps(incident(literal="(0x" + "f" * 10_000 + ",)")),
        json.dumps(incident(literal="(3, [-0x" + "f" * 10_000 + "])")),
        json.dumps(incident(literal="(" + "[" * 5000 + "]" * 5000 + ",)")),
        json.dumps(incident(literal="(" + "{1:" * 1000 + "1" + "}" * 1000 + ",)")),
        json.dumps(incident(literal="(" + " + ".join(["1"] * 5000) + ",)")),
        json.dumps(incident(literal="(3,)", seed="x")),
        json.dumps(incident(literal="(3,)", batch=None)),
        '{"again": {"literal": "(' + "\udc80" + '",)"}}',
        "\x00\xff",
    ],
    ids=range(20),
)
def test_a_file_that_makes_no_sense_is_bad_input(tmp_path, capsys, line):
    """One line says so, and no traceback."""
    file = tmp_path / "trainer-1-0.jsonl"
    file.write_bytes(b'{"record": "part"}\n' + line.encode(errors="surrogateescape") + b"\n")
    assert main(["repro", str(file), "--dataset", HERE]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("holdfast repro: ")
