"""Secrets do not get into evidence: command lines go into reports and logs."""

import subprocess
import time

import pytest

from holdfast.local import procfs
from holdfast.local.discreet import mask


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("train --password hunter2 --epochs 3", "train --password *** --epochs 3"),
        ("train --password=hunter2 x", "train --password=*** x"),
        ("train --db-password 'a b' x", "train --db-password *** x"),
        ("env API_KEY=abc123 python train.py", "env API_KEY=*** python train.py"),
        ("java -Dspark.authenticate.secret=s3cr3t Main", "java -Dspark.authenticate.secret=*** Main"),
        ("serve --token abc --port 80", "serve --token *** --port 80"),
        ("run key=abc mode=fast", "run key=*** mode=fast"),
        ("git clone https://me:hunter2@host/x.git", "git clone https://***@host/x.git"),
        ("fetch s3://ABC@bucket/x", "fetch s3://***@bucket/x"),
        ("curl -H Authorization: Bearer abcdefghijkl https://host", "curl -H Authorization: Bearer *** https://host"),
        ("get https://host/x?token=abc&page=2", "get https://host/x?token=***&page=2"),
        ('run --env {"AWS_SECRET": "x", "HOME": "/root"}', 'run --env {"AWS_SECRET": ***, "HOME": "/root"}'),
        ("get https://host/x?sig=abc&page=2", "get https://host/x?sig=***&page=2"),
    ],
)
def test_secrets_are_masked(command, shown):
    assert mask(command) == shown


@pytest.mark.parametrize(
    "command",
    [
        "/usr/sbin/slurmstepd: [1234.0]",
        "python train.py --monkey x --keys-only --author me --tokens 512 --tokenizer gpt2",
        "bash -c kill 4711; sleep 0.3",
        "java -cp a:b org.apache.spark.executor.CoarseGrainedExecutorBackend --driver-url spark://Driver@host:1",
    ],
)
def test_what_is_no_secret_stays(command):
    assert mask(command) == command.replace("spark://Driver@", "spark://***@")


def test_of_a_real_process():
    with (
        subprocess.Popen(["sleep", "30"], env={}) as plain,
        subprocess.Popen(["bash", "-c", "read x", "--password", "hunter2"], stdin=subprocess.PIPE) as other,
    ):
        deadline = time.monotonic() + 20
        while procfs.command(plain.pid) == "" or procfs.command(other.pid) == "":
            assert time.monotonic() < deadline, "they did not start"
            time.sleep(0.01)
        assert procfs.command(plain.pid) == "sleep 30"
        assert procfs.command(other.pid) == "bash -c read x --password ***"
        plain.kill()
        other.kill()
