"""What the docs show is what the code says: each example is produced here, by a real death where one can be made.

Figures differ from run to run, so any number stands for any other; "..." in the docs stands for anything.
"""

import inspect
import json
import os
import re
import signal
import traceback
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import holdfast
from holdfast.cli import explain, run
from holdfast.core.messages import Cause, Exited, Lost, Place, Stage, What
from holdfast.diagnose.finding import Again, Case, Finding
from holdfast.diagnose.incident import BadSample
from holdfast.diagnose.narrator import Record
from holdfast.diagnose.report import speed_of
from holdfast.diagnose.run_folder import INCIDENT, PART, TOTALS
from holdfast.diagnose.stats import LoaderStats
from holdfast.launch import elastic
from holdfast.loader.loader_narrator import LoaderNarrator
from holdfast.local.keeper import fact_log
from holdfast.policy import PARSERS
from holdfast.pool.progress import Progress
from holdfast.system.cgroups import ControlGroup, Oom, OomWatch
from holdfast.system.evidence import Evidence, View
from holdfast.system.signal_origin import Fault, Sender
from holdfast.system.snapshot import Bounds, Snapshot
from holdfast.testing import Saboteur

ROOT = Path(holdfast.__file__).parents[2]
DOCS = ROOT / "docs"


needs_counters = pytest.mark.skipif(
    not OomWatch(0.0).readable, reason="the kernel's counters of kills for memory cannot be read here"
)


def block(page, beginning):
    """The block of code in a page whose first line begins so."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (found,) = (text for text in blocks if text.startswith(beginning))
    return found


NUMBER = r"\d+(?:[.,]\d+)*"
# What this machine is (a container, a scheduler's) may stand among the facts.
AROUND = re.compile(r"; this runs under [^;\n]*")


def pattern(text):
    """What else this example might say."""
    parts = re.split(rf"(\.\.\.|{NUMBER})", text)
    return "".join(".*?" if p == "..." else NUMBER if re.fullmatch(NUMBER, p) else re.escape(p) for p in parts)


def same(shown, said):
    """The whole of it is what was said; both without what is around this machine."""
    shown, said = (AROUND.sub("", text.rstrip()) for text in (shown, said))
    assert re.fullmatch(pattern(shown), said, re.DOTALL), f"{shown}\n--- is\n{said}"


def printed(error):
    """What Python prints of an exception that nobody catches, without its traceback."""
    return "".join(traceback.format_exception_only(error))


def killed(item):
    if item == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


killed.__qualname__ = killed.__name__ = "process"


def test_the_segfault_of_the_readme():
    loader = holdfast.DataLoader(Saboteur(list(range(64)), at={37: "segfault"}), batch_size=4, num_workers=2)
    with pytest.raises(holdfast.WorkerLost) as caught:
        list(loader)
    same(block("README.md", "holdfast.errors.WorkerLost"), printed(caught.value))


@needs_counters
def test_the_killed_task_of_a_pool():
    with holdfast.Pool(2) as pool:
        error = [pool.submit(killed, item) for item in range(10)][7].exception()
    same(block("docs/pool.md", "holdfast.errors.TaskLost"), printed(error))
    (row,) = re.findall(r"`TaskLost: (worker .*?)`", (DOCS / "pool.md").read_text())
    same(row.replace("(work,", "(process,"), str(error).partition("\n")[0])


# What gloo says of a peer that has gone differs; the trainer may notice it before it learns of the death.
GLOO = re.compile(r"(raised RuntimeError: \[).*?(?:ms later|noticed [\d.]+ ms before):")


def train(rank):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for step in range(1, 6):
        if rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            print(f"step {step}, loss {0.6 - step / 40:.3f}", flush=True)
        dist.barrier()


@needs_counters
def test_the_killed_rank(capfd):
    with pytest.raises(holdfast.RankExited) as caught:
        holdfast.spawn(train, (), nprocs=2)
    shown = block("docs/spawn.md", "holdfast.launch.cause.RankExited")
    said = re.sub(r"      \| step [12],.*\n", "", printed(caught.value))
    same(*(GLOO.sub(r"\1 ..., 0 ms later:", text) for text in (shown, said)))


# What only a memory limit that is too small, a scheduler or another machine makes: the evidence is written down here.

GROUP = ControlGroup(version=2, memory_limit=64 << 30, memory_used=64 << 30)
OOM = Evidence(
    pid=15911, counters=True, oom=Oom("cgroup", 3, 4), memory=((0.1, 11469 << 20),), peak_bytes=11512 << 20, group=GROUP
)


def test_the_worker_that_the_kernel_killed_for_memory():
    event = Exited(2, 0, 0.0, Cause.SIGNAL, signal.SIGKILL, Place(88, 0, Stage.FETCH, 1.0), OOM)
    place = (4711, Again(0, 88, (4711,), 0))
    narrator = LoaderNarrator(Record(), holdfast.Policy(), None, "fork", lambda *_: place, lambda _: None)
    error = narrator.lost(Lost(88, 0, event, 2))
    same(block("docs/findings.md", "holdfast.errors.WorkerLost"), printed(error))


def test_the_trainer_that_slurm_signalled(capfd):
    sender = Sender(4102, 0, 0, ((4102, "slurmstepd: [1234.0]"), (1, "/usr/sbin/init")))
    run._tell(None, signal.SIGTERM, Evidence(pid=4711, sender=sender, worlds=("Slurm",)))
    same(block("docs/run.md", "holdfast: the trainer"), capfd.readouterr().err)


def test_the_error_file_of_torchrun(tmp_path):
    shown = json.loads(re.sub(r"\n\s+", " ", block("docs/spawn.md", '{"message"')))
    case = Case(
        what=What.EXITED,
        worker=1,
        pid=25911,
        cause=Cause.SIGNAL,
        code=signal.SIGKILL,
        evidence=Evidence(pid=25911, counters=True),
    )
    elastic.ErrorHandler()._record(str(tmp_path / "error.json"), case, 1794751829.94)
    said = json.loads((tmp_path / "error.json").read_text())
    assert keys(said) == keys(shown)
    assert said["message"]["message"] == shown["message"]["message"]
    told, example = (file["message"]["extraInfo"] for file in (said, shown))
    same(example["py_callstack"], told["py_callstack"])
    for name in ("rank", "pid", "at", "finding", "confidence"):
        assert told["holdfast"][name] == example["holdfast"][name]
    assert told["timestamp"] == example["timestamp"]


def keys(found):
    return {name: keys(part) for name, part in found.items()} if isinstance(found, dict) else None


def test_the_line_of_progress():
    line = Progress("render", 1234, 10000, 3, 1, 8, 21.5, 57.3, False)
    same(block("docs/pool.md", "render: "), str(line))


def test_the_findings_of_a_log(tmp_path, capsys):
    shown = block("docs/explain.md", "$ (cat train.log")
    lines = [""] * 212
    lines[86] = "RuntimeError: DataLoader worker (pid 4024) is killed by signal: Killed."
    lines[211] = (
        "[Sun Mar 30 08:24:00 2025] Memory cgroup out of memory: Killed process 4024 (python) total-vm:25165824kB, "
        "anon-rss:12582912kB, file-rss:102400kB, shmem-rss:0kB, UID:1000 pgtables:24576kB oom_score_adj:0"
    )
    explain._explain("\n".join(lines), False)
    same(*(" ".join(text.split()) for text in (shown.partition("\n")[2], capsys.readouterr().out)))


# Tables.


def named_in(text):
    return set(re.findall(r"`(\w+)`", text))


def tables(page):
    """Each table of a page: [(first cell, the other cells)], without its head."""
    found = re.findall(r"((?:^\|.*\n)+)", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
    return [[tuple(re.split(r"(?<!\\) \| ", row.strip("| "), maxsplit=1)) for row in t.splitlines()[2:]] for t in found]


def parts_of(kind):
    return {each.name for each in fields(kind)} if is_dataclass(kind) else set(kind._fields)


def test_the_tables_of_the_report_are_its_json():
    """Every field stands in them, and nothing else."""
    loader = holdfast.DataLoader(list(range(8)), batch_size=4, num_workers=1)
    assert len(list(loader)) == 2
    told = loader.report().to_dict()
    top, incident, evidence, _ = tables("report.md")
    assert [named_in(cell).pop() for cell, *_ in top] == list(told)
    rows = {named_in(cell).pop(): named_in(text) for cell, text in top}
    device = {"device_waited_s", "device_ran_s", "device_waited_share"}
    assert rows["stats"] == set(told["stats"]) | device
    assert rows["bad_samples"] == parts_of(BadSample)
    assert parts_of(Finding) <= rows["speed"]
    assert set().union(*(named_in(cell) for cell, _ in incident)) == parts_of(holdfast.Incident)
    assert next(named_in(text) for cell, text in incident if cell == "`again`") == parts_of(Again) | {
        "literal",
        "pickled",
    }
    (stage,) = (text for cell, text in incident if "`stage`" in cell)
    assert all(re.search(rf"\b{each.name.lower()}\b", stage) for each in Stage)
    first = set().union(*(named_in(cell) for cell, _ in evidence))
    beside = set().union(*(named_in(text) for _, text in evidence))
    assert first == parts_of(Evidence)
    inside = set().union(*map(parts_of, (Snapshot, Bounds, ControlGroup, Oom, Sender, Fault, View)))
    assert inside <= beside
    assert beside <= inside | parts_of(Evidence)


def test_the_table_of_the_run_folder_has_every_record():
    """In the order in which the code names them, the trainer's first."""
    *_, records = tables("report.md")
    facts = re.findall(r'_append(?:_event)?\("(\w+)"', inspect.getsource(fact_log))
    named = [named_in(cell).pop() for cell, *_ in records]
    assert named[:3] == [PART, INCIDENT, TOTALS]
    assert sorted(named[3:]) == sorted([*facts, fact_log.WORKERS])


def test_the_table_of_the_policy_has_every_field_with_its_default():
    rows = {cell.strip("`"): text.partition(" | ")[0].strip("`") for cell, text in tables("policy.md")[0]}
    defaults = {
        each.name: each.default.__name__ if isinstance(each.default, type) else each.default
        for each in fields(holdfast.Policy)
    }
    shown = {name: eval(text, {"__builtins__": {"OSError": OSError}}) for name, text in rows.items()}
    assert shown == defaults


def test_the_docs_say_what_a_variable_and_an_option_may_set():
    text = " ".join((DOCS / "policy.md").read_text().split())
    (apart,) = re.findall(r"set each field except (.*?) for a whole program", text)
    assert named_in(apart) == {each.name for each in fields(holdfast.Policy)} - set(PARSERS)
    options = set(re.findall(r"`--([a-z-]+)`", tables("run.md")[0][0][0]))
    assert options == {name.replace("_", "-") for name in PARSERS}


def test_the_findings_of_speed_are_as_sure_as_the_index_says():
    totals = [LoaderStats(workers=4, cpus=2, ran_s=10.0, waited_s=waited) for waited in (0.0, 5.0)]
    found = [finding for stats in totals for finding in speed_of(stats)]
    text = (DOCS / "findings.md").read_text()
    for finding in found:
        assert re.search(rf"^\| \[{finding.name}\].* \| {finding.confidence} \|$", text, re.MULTILINE), finding.name
