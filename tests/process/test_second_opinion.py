"""py-spy beside the keeper: it holds up nobody but the worker that hangs."""

import os
import signal
import time

import pytest
from torch.utils.data import Dataset

from holdfast import DataLoader, Policy
from holdfast.system import snapshot


class Troubled(Dataset):
    """One sample does not come back, or late; another one ends its worker, once."""

    def __init__(self, slow_s, mark=None):
        self.slow_s, self.mark = slow_s, mark

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 5:
            time.sleep(self.slow_s)
        if index == 40 and self.mark is not None and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index


@pytest.fixture
def slow_spy(tmp_path, monkeypatch):
    """A py-spy that never answers."""
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(snapshot, "find", lambda: str(program))
    monkeypatch.setattr(snapshot, "LOOK_S", 2.0)


def test_other_workers_are_watched_while_it_looks(slow_spy, tmp_path):
    policy = Policy(sample_timeout=0.5, bad_sample="skip", strikes=1)
    loader = DataLoader(
        Troubled(60, tmp_path / "mark"), batch_size=4, num_workers=2, prefetch_factor=8, in_order=False, policy=policy
    )
    given = sorted(index for batch in loader for index in batch.tolist())
    assert given == [index for index in range(64) if index != 5]
    death, *hangs = loader.incidents
    assert death.finding == "worker-killed", "told of while py-spy still looked at the other"
    assert [hang.finding for hang in hangs][-1] == "sample-hung"
    assert hangs[-1].at - death.at > 0.5
    assert "time.sleep" in str(hangs[-1])


def test_a_sample_that_comes_back_meanwhile_was_only_slow(slow_spy):
    """It lives. It is told with its length: the look itself may have ended its wait."""
    loader = DataLoader(Troubled(1.5), batch_size=4, num_workers=1, policy=Policy(sample_timeout=0.5))
    given = []
    for batch in loader:
        given += batch.tolist()
        if 5 in given and not loader.incidents:
            time.sleep(0.05)  # the keeper looks every 0.1 s; 14 batches follow
    assert sorted(given) == list(range(64))
    (silence,) = loader.incidents
    assert silence.finding == "worker-silent" and "while loading" in silence.headline
    (went_on,) = [fact for fact in silence.seen if fact.startswith("it went on after")]
    assert 0.5 < float(went_on.split()[4]) < 5
