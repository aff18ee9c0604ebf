"""Logs of the world: real error lines are named, healthy ones are left in peace, causes come before consequences.

logs/ holds error lines from public threads and articles: the first line says where from, the second what must be found,
in order; paths and long ids are shortened. healthy/ holds ordinary output in which nothing may be found.
"""

import argparse
import inspect
import io
import json
import os
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from holdfast import errors
from holdfast.cli import explain as command
from holdfast.core.messages import Cause, Stage, What
from holdfast.diagnose.finding import Again, Case
from holdfast.diagnose.foreign_logs import (
    CONSEQUENCES,
    FAMILIES,
    KINDS,
    OWN,
    QUOTE_CHARACTERS,
    QUOTED,
    SYSTEM,
    explain,
    last_exception,
)
from holdfast.diagnose.incident import incident_of
from holdfast.diagnose.logs import Clue, words
from holdfast.diagnose.run_folder import RunFolder
from holdfast.system.evidence import Evidence

HERE = Path(__file__).parent
LOGS = sorted((HERE / "logs").glob("*.txt"))
HEALTHY = sorted((HERE / "healthy").glob("*.txt"))
CLUES = [clue for family in (OWN, *FAMILIES, SYSTEM) for clue in family.clues]


def log(name: str) -> str:
    """The error lines of one file, without its two lines of heading."""
    return (HERE / "logs" / f"{name}.txt").read_text().split("\n", 2)[2]


# One process in both.
SAME = {"19597": "15617"}


def of_one_process(text: str) -> str:
    for one, other in SAME.items():
        text = text.replace(one, other)
    return text


def names(text: str) -> list[str]:
    return [one.name for one in explain(text)]


def holdfast_explain(*given: str) -> int:
    parser = argparse.ArgumentParser()
    command.arguments(parser)
    return command.run(parser.parse_args(given))


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_real_log_is_named(path):
    """What people posted is recognized, causes first."""
    source, expects, text = path.read_text().split("\n", 2)
    assert re.fullmatch(r'# source: (https://\S+|an article, ".+")', source)
    assert names(text) == expects.removeprefix("# expects: ").split(", ")


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_a_healthy_log_is_left_in_peace(path):
    """Words like killed, timeout or OOM alone are no finding."""
    assert explain(path.read_text()) == []


def test_there_are_enough_of_both():
    assert len(LOGS) >= 40
    assert len(HEALTHY) >= 20


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_a_cause_is_found_in_the_middle_of_ordinary_output(path):
    """What surrounds an error does not hide it, and adds nothing."""
    text = path.read_text() + log("torch-killed") + path.read_text()
    assert names(text) == ["worker-killed"]


def test_the_kernel_comes_before_what_torch_noticed():
    """The OOM line is the cause although it stands last; the dead worker follows from it."""
    found = explain(of_one_process(log("torch-killed") + log("dmesg-cgroup-oom")))
    assert [one.name for one in found] == ["worker-oom-killed", "worker-killed"]
    assert found[0].follows_from == ()
    assert found[1].follows_from == ("worker-oom-killed",)


def test_the_first_death_comes_before_broken_connections():
    """Ranks that lost their peer are consequences of the one that was killed."""
    found = explain(log("gloo-closed") + log("torchrun-root-cause"))
    assert [one.name for one in found] == ["worker-killed", "rank-failed-first"]
    assert found[1].follows_from == ("worker-killed",)


def test_a_chain_names_its_root():
    """Memory -> the executor -> its Python -> the interrupted task: each names the beginning of the chain."""
    text = log("spark-interrupted") + log("spark-python-worker-crashed") + log("spark-yarn-memory")
    found = explain(text)
    assert [one.name for one in found] == [
        "job-over-memory",
        "executor-lost",
        "spark-python-worker-lost",
        "jvm-interrupted",
    ]
    assert {one.follows_from for one in found[1:]} == {("job-over-memory",)}


KILLED = "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed."
OOM = "Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB, anon-rss:1kB, file-rss:0kB"


@pytest.mark.parametrize(
    ("killed_at", "oom_at", "follows"),
    [
        ("2024-05-01 12:00:05,123 ERROR ", "2024-05-01 12:00:04 host kernel: ", True),
        ("2024-05-01 12:00:05 ", "2024-05-01 12:00:30 ", True),  # written a little later
        ("2024-05-01 12:00:05 ", "2024-05-01 14:30:00 ", False),
        ("[2024-05-01T12:00:05Z] ", "2024-05-01T14:00:00+02:00 ", True),
        ("24/05/01 12:00:05 ERROR ", "24/05/01 18:00:00 WARN ", False),
        ("May  1 12:00:05 host ", "May  1 13:00:05 host kernel: ", False),
        ("E0501 12:00:05.123456 99 ", "E0501 13:00:05.123456 99 ", False),
        ("[  100.000000] ", "[ 4000.000000] ", False),
        ("2024-05-01 12:00:05 ", "[ 4000.000000] ", True),  # clocks that cannot be compared
        ("2024-05-01 12:00:05 ", "[Wed May  1 15:00:05 2024] ", False),
        ("2024-13-45 12:00:05 ", "2024-05-01 14:30:00 ", True),  # no date
        ("", "", True),
    ],
)
def test_nothing_follows_from_what_came_after_it(killed_at, oom_at, follows):
    """Where the log says when, a kill hours before the OOM line had another reason."""
    for text in (f"{killed_at}{KILLED}\n{oom_at}{OOM}\n", f"{oom_at}{OOM}\n{killed_at}{KILLED}\n"):
        found = {one.name: one.follows_from for one in explain(text)}
        assert found == {"worker-oom-killed": (), "worker-killed": ("worker-oom-killed",) if follows else ()}


OTHER = "Out of memory: Killed process 999 (chrome) total-vm:1kB, anon-rss:1kB, file-rss:0kB"


def test_the_kill_of_another_process_explains_nothing():
    """The kernel killed a browser; the worker died of something else, which nothing here names."""
    found = explain(f"{OTHER}\n{KILLED}\n")
    assert {one.name: one.follows_from for one in found} == {"worker-oom-killed": (), "worker-killed": ()}


def test_of_several_kills_the_one_of_this_process_is_the_cause():
    """Told apart by pid; the kernel's other lines go with the kill that they belong to."""
    invoked = "chrome invoked oom-killer: gfp_mask=0x100cca, order=0\noom-kill:constraint=CONSTRAINT_NONE,pid=999\n"
    found = explain(f"{invoked}{OTHER}\n{OOM}\n{KILLED}\n")
    assert [(one.name, one.lines) for one in found] == [
        ("worker-oom-killed", 3),
        ("worker-oom-killed", 1),
        ("worker-killed", 1),
    ]
    assert "(chrome)" in found[0].says and "4711 (python)" in found[1].says
    assert found[2].follows_from == ("worker-oom-killed",)


def test_a_kill_for_memory_does_not_explain_another_signal():
    """The OOM killer sends SIGKILL; the same process that ended by SIGTERM ended otherwise."""
    found = explain(f"{OOM}\n{KILLED.replace('Killed', 'Terminated')}\n")
    assert {one.name: one.follows_from for one in found} == {"worker-oom-killed": (), "worker-terminated": ()}


def test_an_error_number_explains_no_other_one():
    """EMFILE in the sample's own traceback; the EAGAIN of somebody else's fork is not its cause."""
    raised = "OSError: Caught OSError in DataLoader worker process 0.\nOSError: [Errno 24] Too many open files\n"
    found = explain(f"bash: fork: retry: Resource temporarily unavailable [Errno 11]\n{raised}")
    assert {one.name: one.follows_from for one in found} == {
        "cannot-start-process": (),
        "descriptors-exhausted": (),
        "sample-raised": ("descriptors-exhausted",),
    }


@pytest.mark.parametrize(
    ("pasted", "name"),
    [
        ("java.lang.InterruptedException", "jvm-interrupted"),
        ("Java Interrupted Exception", "jvm-interrupted"),
        ("DataLoader worker (pid XXX) is killed by signal: 9", "worker-killed"),
        ("SIGKILL", "worker-killed"),
        ("signal: 9", "worker-killed"),
        ("error: test failed (signal: 9, SIGKILL: kill)", "worker-killed"),
        ("ProcessExitedException", "rank-failed-first"),
        ("Resource temporarily unavailable", "cannot-start-process"),
        ("concurrent.futures.process.BrokenProcessPool", "worker-exited"),
        ("OSError: Can't read data (inflate() failed)", "handle-shared-by-fork"),
    ],
)
def test_what_people_quote_is_known_alone(pasted, name):
    """Articles and threads quote a few words, without pid and traceback."""
    (one,) = explain(f"{pasted}\n")
    assert one.name == name


def test_what_is_the_programs_own_is_named_as_such(tmp_path, capsys):
    """No cause is made up for an exception of the user's; it is said which one it was."""
    path = tmp_path / "pool.log"
    for text, last in (
        ("ERROR:root:ValueError processing 0: Even numbers cause errors!", "ValueError"),
        ("TimeoutError: Simulating an external timeout exception", "TimeoutError: Simulating an"),
    ):
        assert last_exception(text).startswith(last)
        path.write_text(text)
        assert holdfast_explain(str(path)) == 1
        assert last in capsys.readouterr().out


def test_bare_eagain_is_processes_and_never_descriptors():
    (one,) = explain("Resource temporarily unavailable\n")
    assert "never one of open files" in one.says and "ulimit -n" not in one.advice
    assert one.confidence == "possible"


# What Holdfast itself said -------------------------------------------------------------------------------------------


DEATH = Case(
    what=What.EXITED,
    worker=2,
    cause=Cause.SIGNAL,
    code=11,
    task=88,
    index=4711,
    stage=Stage.FETCH,
    evidence=Evidence(pid=1),
    did="started a new worker, which loads the batch again",
    again=Again(1, 88, (4711,), 0),
)


def test_an_error_of_holdfast_is_its_finding():
    """The text of the exception names it; what it says and advises is given, and its page."""
    incident = incident_of(DEATH)
    (one,) = explain(f"Traceback:\nholdfast.errors.WorkerLost: {incident}\n")
    assert one.name == incident.finding == "worker-segfault"
    assert incident.says in one.says and incident.headline in one.says
    assert one.advice == incident.advice


def test_a_log_line_of_holdfast_is_its_finding():
    (one,) = explain(f"WARNING:holdfast:{incident_of(DEATH).line}\n")
    assert one.name == "worker-segfault"


def test_several_incidents_of_holdfast_do_not_explain_each_other():
    """Each was found out by itself: nothing is concluded from their order."""
    lost = incident_of(replace(DEATH, cause=Cause.EXIT, code=3))
    found = explain(f"holdfast.errors.WorkerLost: {incident_of(DEATH)}\nholdfast.errors.WorkerLost: {lost}\n")
    assert {one.name: one.follows_from for one in found} == {"worker-segfault": (), "worker-exited": ()}


@pytest.mark.parametrize(
    "kind", [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.HoldfastError)]
)
def test_each_error_of_holdfast_is_known_by_its_name(kind):
    if kind is errors.HoldfastError:
        return
    (one,) = explain(f"holdfast.errors.{kind.__name__}: what happened\n")
    assert one.name == "holdfast-raised" and one.says.startswith(kind.__name__)


def test_an_exception_that_came_back_as_itself_says_where():
    """A user's own error has a note of Holdfast's under it."""
    text = "ValueError: bad pixel\nin worker 1 (pid 7) while loading index 37 (batch 9, attempt 1)\n"
    (one,) = explain(text)
    assert one.name == "sample-raised" and "ValueError: bad pixel, while loading index 37" in one.says


def run_folder(path: Path) -> Path:
    folder = RunFolder(str(path), "loader")
    for case in (DEATH, DEATH, replace(DEATH, cause=Cause.EXIT, code=3)):
        folder.write(asdict(incident_of(case)))
    return folder.file


def test_a_run_folder_is_told(tmp_path, capsys):
    """Each finding once, with its count, its last incident, and its page; a file of it says the same."""
    file = run_folder(tmp_path / "run")
    for place in (file.parent, file):
        assert holdfast_explain(str(place)) == 0
        told = capsys.readouterr().out
        assert "of Holdfast, with 3 incidents:" in told
        assert "\nworker-segfault x2: SIGSEGV" in told and "\nworker-exited: " in told
        assert "while loading index 4711 (batch 88, attempt 1)" in told
        assert "    more   holdfast explain worker-segfault" in told and f"holdfast repro {place}" in told
        assert holdfast_explain(str(place), "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert [(one["name"], one["count"]) for one in found["findings"]] == [
            ("worker-segfault", 2),
            ("worker-exited", 1),
        ]


def test_a_run_folder_that_anybody_wrote_breaks_nothing(tmp_path, capsys):
    """Lines that are no JSON, records without fields, a pipe in the place of a file."""
    (tmp_path / "trainer-1-0.jsonl").write_text("{")
    lines = [{"record": "part"}, [1], {"record": "incident", "headline": 3}]
    lines.append({"record": "incident", "headline": "x\x1b[31m", "seen": 7})
    (tmp_path / "trainer-1-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.mkfifo(tmp_path / "trainer-1-2.jsonl")
    assert holdfast_explain(str(tmp_path)) == 0
    told = capsys.readouterr().out
    assert "left out trainer-1-0.jsonl" in told and "\nunknown:\n" in told and "\x1b" not in told


@pytest.mark.parametrize("width", [60, 100])
def test_the_command_wraps_to_the_terminal(tmp_path, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    path = tmp_path / "train.log"
    path.write_text(log("torch-killed") + log("spark-interrupted") + log("eagain-bare"))
    run = run_folder(tmp_path / "run").parent
    for given in (str(path), str(run), "--list"):
        holdfast_explain(given)
        told = capsys.readouterr().out.replace(str(run), "RUN")
        assert max(map(len, told.splitlines())) <= width


def test_a_traceback_has_the_time_of_its_head():
    trace = "2024-05-01 12:00:05 ERROR it failed\nTraceback (most recent call last):\n  File x\n" + KILLED
    assert explain(f"{trace}\n2024-05-01 15:00:00 {OOM}")[1].follows_from == ()


def test_an_exception_does_not_explain_a_death():
    """torch sends exceptions to the trainer; a worker that is gone had another reason."""
    found = explain(log("torch-file-missing") + log("torch-exited-unexpectedly"))
    assert {one.name: one.follows_from for one in found} == {
        "file-missing": (),
        "sample-raised": ("file-missing",),
        "worker-exited": (),
    }


def test_an_interrupted_jvm_is_told_truthfully():
    """Nothing in Python raises a Java exception, and the text says so."""
    (one,) = explain(log("spark-interrupted"))
    assert "its own task thread" in one.says
    assert "Python raised nothing" in one.says
    for reason in ("cancelled", "stage failed", "timeout", "executor", "pre-empted"):
        assert reason in one.says
    assert "driver's log" in one.advice


def test_eagain_is_not_emfile():
    """One is a limit of processes and threads, the other one of open files."""
    (eagain,) = explain("BlockingIOError: [Errno 11] Resource temporarily unavailable\n")
    (emfile,) = explain("OSError: [Errno 24] Too many open files\n")
    assert (eagain.name, emfile.name) == ("cannot-start-process", "descriptors-exhausted")
    assert "never one of open files" in eagain.says
    assert "ulimit -u" in eagain.advice
    assert "ulimit -n" in emfile.advice


def test_a_full_disk_and_full_shared_memory_differ():
    """ENOSPC where a semaphore is made is /dev/shm; anywhere else a disk."""
    assert names("OSError: [Errno 28] No space left on device: 'model.pt'") == ["disk-full"]
    assert names(log("enospc-semaphore")) == ["shm-too-small"]
    assert names("OSError: [Errno 122] Disk quota exceeded: '/home/me/x'") == ["quota-exceeded"]


def test_memory_refused_inside_spark_points_at_its_limit():
    """spark.executor.pyspark.memory is RLIMIT_AS: a MemoryError under it is explained, a plain one not blamed on it."""
    inside = 'File "/opt/spark/python/lib/pyspark.zip/pyspark/worker.py", line 830, in main\nMemoryError\n'
    (guess,) = explain(inside)
    (likely,) = explain("spark.executor.pyspark.memory=4g\n" + inside)
    assert (guess.name, guess.confidence) == ("address-space-limited", "possible")
    assert (likely.name, likely.confidence) == ("address-space-limited", "likely")
    assert names("MemoryError\n") == ["allocation-refused"]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (
            "subprocess.CalledProcessError: Command '['python', 'a.py']' died with <Signals.SIGKILL: 9>.",
            "worker-killed",
        ),
        ("[launch.py:321:sigkill_handler] ['python', 'a.py'] exits with return code = -11", "worker-segfault"),
        ("container exited with code 137", "worker-killed"),
        ('"ExitCode": 137,', "worker-killed"),
        ("    exitCode: 139", "worker-segfault"),
        ("train.service: Main process exited, code=killed, status=9/KILL", "worker-killed"),
        ("train.service: Failed with result 'oom-kill'.", "worker-oom-killed"),
        ("python[411]: segfault at 0 ip 00007f sp 00007ffd error 4 in libfoo.so[7f00+1000]", "worker-segfault"),
        ("traps: python3[77] trap invalid opcode ip:7f sp:7f error:0 in libbar.so", "worker-illegal-instruction"),
        ("INFO: task python:4711 blocked for more than 120 seconds.", "hang-uninterruptible"),
        ("nfs: server storage01 not responding, still trying", "hang-io"),
        ("cgroup: fork rejected by pids controller in /docker/abc", "cannot-start-process"),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 9 GiB for an array", "allocation-refused"),
        ("TERM_RUNLIMIT: job killed after reaching LSF run time limit.", "terminated-by-scheduler"),
        ("=>> PBS: job killed: walltime 3610 exceeded limit 3600", "terminated-by-scheduler"),
        ("RuntimeError: can't start new thread", "cannot-start-process"),
        ("TypeError: cannot pickle '_thread.lock' object", "value-not-picklable"),
        ("KeyboardInterrupt", "interrupted"),
        ("DataLoader worker (pid 5) is killed by signal: Floating point exception. ", "worker-arithmetic-fault"),
        ("DataLoader worker (pid 5) is killed by signal: Hangup. ", "worker-terminated"),
        ("DataLoader worker (pid(s) 5, 6, 7) exited unexpectedly", "worker-exited"),
        ("TaskKilled (Stage cancelled: Job 3 cancelled)", "jvm-interrupted"),
    ],
)
def test_a_single_line_is_named(line, name):
    """What is known by its form: documented texts for which no thread is kept here."""
    assert names(line) == [name]


def test_the_gpu_is_not_the_host():
    assert names("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB") == ["gpu-memory-full"]


@pytest.mark.parametrize(
    ("frame", "name"),
    [
        ("    data = [self.dataset[idx] for idx in possibly_batched_index]", "sample-raised"),
        ("    return self.collate_fn(data)", "collate-raised"),
        ("    init_fn(worker_id)", "worker-init-raised"),
    ],
)
def test_an_exception_is_placed_by_its_traceback(frame, name):
    """Dataset, collate_fn or worker_init_fn: the worker's own traceback tells."""
    text = f"KeyError: Caught KeyError in DataLoader worker process 3.\nOriginal Traceback:\n{frame}\nKeyError: 7\n"
    (one,) = explain(text)
    assert one.name == name
    assert "KeyError in worker 3" in one.says


def test_a_supporting_line_alone_means_nothing():
    """torchrun sends SIGTERM at every end, and Spark kills slow copies of tasks."""
    assert explain("WARNING: Sending process 812914 closing signal SIGTERM\n") == []
    text = (
        "INFO Executor: Executor is trying to kill task 1.1 in stage 2.0 (TID 3), reason: another attempt succeeded\n"
    )
    assert explain(text) == []
    (one,) = explain(text + "java.lang.InterruptedException\n")
    assert [quote.line for quote in one.quotes] == [1, 2]


def test_quotes_are_numbered_few_and_short():
    """Lines count from 1; a flood is counted, not quoted; a line of a megabyte is cut."""
    flood = "fine\n" + "x" * 5000 + " OSError: [Errno 116] Stale file handle\n" * 10
    (one,) = explain(flood)
    assert one.lines == 10
    assert [quote.line for quote in one.quotes] == [2, 3, 4][:QUOTED]
    assert all(len(quote.text) <= QUOTE_CHARACTERS + 8 for quote in one.quotes)
    assert all("Stale file handle" in quote.text for quote in one.quotes)


def test_windows_line_ends_and_no_end_at_all():
    (one,) = explain("Killed\r\n")
    assert (one.name, one.quotes[0].text) == ("worker-killed", "Killed")
    assert names("Killed") == ["worker-killed"]
    assert names("") == []


@pytest.mark.parametrize("clue", CLUES, ids=lambda clue: clue.name)
def test_every_clue_is_well_made(clue: Clue):
    """Its words can be found, its texts can be filled in, and its name is a page's or will be."""
    assert words(clue.pattern)
    groups = {name: "x" for text in (clue.pattern, clue.above, clue.below) for name in re.compile(text).groupindex}
    clue.says.format(**groups)
    clue.advice.format(**groups)
    if clue.name != "{finding}":  # (Holdfast itself names it in the line)
        assert re.fullmatch(r"[a-z]+(-[a-z]+)+|interrupted|unknown", clue.name)
        assert clue.name in command._pages()


def test_words_lose_no_line():
    """What the quick search passes over, no pattern would have matched."""
    text = "".join(log(path.stem) for path in LOGS)
    for clue in CLUES:
        for line in text.splitlines():
            if re.search(clue.pattern, line):
                assert any(word in line for word in words(clue.pattern)), (clue.pattern, line)


def test_words_of_a_pattern():
    assert words(r"exitcode\s*: -9\b|Signal 9 \(SIGKILL\)") == ("exitcode", "Signal 9 (SIGKILL)")
    assert words(r"colou?rs of (?:the|a) rainbow") == (" rainbow",)
    with pytest.raises(ValueError, match="no plain word"):
        words(r"abc|(?:def|ghi)")


def test_consequences_do_not_run_in_circles():
    """Every chain of causes ends."""

    def walk(name, above=()):
        assert name not in above, above
        for effect in CONSEQUENCES.get(name, ()):
            walk(effect, (*above, name))

    for name in CONSEQUENCES:
        walk(name)


def test_the_command_tells_a_file(tmp_path, capsys):
    path = tmp_path / "train.log"
    path.write_text(of_one_process(log("torch-killed") + log("dmesg-cgroup-oom")))
    assert holdfast_explain(str(path)) == 0
    told = capsys.readouterr().out
    assert told.startswith("worker-oom-killed: the kernel killed process 15617 (python3)")
    assert "\n    line 6 RuntimeError: DataLoader worker (pid 15617)" in told
    assert "\n    follows from worker-oom-killed\n" in told
    assert told.rstrip().endswith("more   holdfast explain worker-killed")


def test_the_command_gives_json(tmp_path, capsys):
    path = tmp_path / "train.log"
    path.write_text(log("spark-yarn-memory"))
    assert holdfast_explain(str(path), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["lines"] == 2
    assert [one["name"] for one in told["findings"]] == ["job-over-memory", "executor-lost"]
    assert told["findings"][1]["follows_from"] == ["job-over-memory"]
    assert told["findings"][0]["quotes"][0]["line"] == 1


class Standard(io.TextIOWrapper):
    """Standard input, at a terminal or not."""

    def __init__(self, content: bytes, terminal: bool) -> None:
        super().__init__(io.BytesIO(content))
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize("given", [("-",), ()])
def test_the_command_reads_standard_input(given, monkeypatch, capsys):
    """Asked for with -, and when nothing is given and something is piped in; bytes that are no text do not stop it."""
    monkeypatch.setattr(sys, "stdin", Standard(b"\xff\xfe\n" + log("ray-oom").encode(), terminal=False))
    assert holdfast_explain(*given) == 0
    assert capsys.readouterr().out.startswith("job-over-memory: Ray's memory monitor")


def test_the_command_asks_for_something_at_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", Standard(b"", terminal=True))
    assert holdfast_explain() == 2
    assert "give a log file" in capsys.readouterr().err


def test_the_command_says_when_nothing_is_known(tmp_path, capsys):
    path = tmp_path / "fine.log"
    path.write_text("epoch 1\nepoch 2\n")
    assert holdfast_explain(str(path)) == 1
    told = capsys.readouterr().out
    assert told.startswith("no known finding in 2 lines\n")
    assert all(kind in told.replace("\n", " ") for kind in KINDS)
    assert holdfast_explain(str(path), "--json") == 1
    assert json.loads(capsys.readouterr().out) == {"lines": 2, "findings": [], "last_exception": ""}


def test_the_command_shows_a_page(capsys):
    assert holdfast_explain("jvm-interrupted") == 0
    page = capsys.readouterr().out
    assert page.startswith("# jvm-interrupted: the JVM interrupted its own task thread\n")
    for section in ("What it means", "How we know", "What to do", "When this is wrong"):
        assert f"\n## {section}\n" in page
    assert holdfast_explain("jvm-interrupted", "--json") == 0
    assert json.loads(capsys.readouterr().out)["name"] == "jvm-interrupted"


def test_the_command_knows_names_that_are_nearly_right(capsys):
    assert holdfast_explain("jvm-interupted") == 2
    told = capsys.readouterr().err
    assert "'jvm-interupted' is neither a file nor a finding" in told
    assert "jvm-interrupted" in told
    assert holdfast_explain("qqqq") == 2
    assert "--list" in capsys.readouterr().err


def test_the_command_says_what_a_folder_is_not(tmp_path, capsys):
    assert holdfast_explain(str(tmp_path)) == 2
    assert "is no run folder" in capsys.readouterr().err


def test_the_command_lists_findings(capsys):
    assert holdfast_explain("--list") == 0
    told = capsys.readouterr().out
    assert re.search(r"^node-evicted +Kubernetes took the pod off its node$", told, re.MULTILINE)
    assert holdfast_explain("--list", "--json") == 0
    assert json.loads(capsys.readouterr().out)["executor-lost"] == "a Spark executor went away"
