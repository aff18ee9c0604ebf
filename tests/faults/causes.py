"""Every cause that can be made here, on real processes, and the finding that must be named for it.

As a command it prints what was made against what was named, as a list and as a confusion matrix, and exits with 1 when
anything lies off its diagonal: python -m tests.faults.causes [words of a cause's name ...]
"""

import contextlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from holdfast import DataLoader, Policy
from holdfast.diagnose.finding import TRAINER
from holdfast.system import snapshot
from holdfast.system.run_files import records_of
from holdfast.system.signal_origin import can_note

from .cause_table import BY_THE_HANDLER, CAUSES, LIBRARIES, SPEED, Cause
from .harm import ROOT, Faulty

T = TypeVar("T")


def observe(cause: Cause) -> list[dict[str, Any]]:
    """Make it, in this process: the incidents of an epoch, in their order."""
    if cause.before is not None:
        cause.before()
    fault = cause.fault
    if cause.finding == "sample-retried":
        calls: list[int] = []

        def fault() -> Any:
            calls.append(1)
            return cause.fault() if len(calls) == 1 else None

    dataset = Faulty(fault, cause.index) if cause.dataset is None else cause.dataset()
    policy = Policy(**cause.policy)
    arguments = {"num_workers": 1, "batch_size": cause.batch_size, **cause.arguments}
    loader = DataLoader(dataset, policy=policy, **arguments)
    iterator = iter(loader)
    lost = 0
    for _ in range(20):
        try:
            if next(iterator, None) is None:
                break
            time.sleep(cause.pause_s)
        except Exception:
            lost += 1
    iterator._shutdown_workers()
    report = json.loads(loader.report().to_json())
    incidents = [{**incident, "batches_lost": lost} for incident in report["incidents"]]
    if cause.finding in SPEED:
        return [{"finding": one["name"], **one} for one in report["speed"]]
    return incidents + told_by_the_witness() if cause.finding == "trainer-signalled" else incidents


def told_by_the_witness() -> list[dict[str, Any]]:
    """What `holdfast run` keeps of the trainer itself."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        kept = [record for path in Path(os.environ["T"]).glob("trainer-*.jsonl") for record in records_of(path)]
        if mine := [one for one in kept if one["record"] == "incident" and one["worker"] == TRAINER]:
            return mine
        time.sleep(0.05)
    return []


def missing(cause: Cause) -> str:
    """Why it cannot be made here; "" when it can."""
    if "java" in repr(cause.words) and shutil.which("java") is None:
        return "no JVM here"
    if cause.needs == "py-spy":
        return "" if snapshot.find() is not None else "py-spy is not installed"
    if cause.needs == "python3.11":
        return "" if sys.version_info[:2] == (3, 11) else "this Python guards its C stack"
    if cause.needs == "x86_64":
        return "" if platform.machine() == cause.needs else "machine code of another processor"
    if cause.needs in LIBRARIES:
        return "" if importlib.util.find_spec(cause.needs) is not None else f"{cause.needs} is not installed"
    if cause.needs == "cuda":
        return "" if torch.cuda.is_available() else "no CUDA device"
    if cause.needs == "root":
        return "" if os.getuid() == 0 else "needs root"
    if cause.needs and shutil.which(cause.needs) is None:
        return f"there is no program {cause.needs}"
    if not can_note() and any(noted in " ".join(cause.words) for noted in BY_THE_HANDLER):
        return "built without a compiler"
    rooted = any(word in cause.within for word in ("unshare", "cgroup", "script"))
    if (rooted or cause.finding == "permission-denied") and os.getuid() != 0:
        return "needs root"
    if "/sys/fs/cgroup/" in cause.within and not os.path.isdir("/sys/fs/cgroup/memory"):
        return "no cgroup version 1 here"
    return ""


def with_advice(cause: Cause) -> Cause:
    """The same cause, where its advice was followed."""
    heeded = cause.heeded
    assert heeded is not None
    return replace(
        cause,
        fault=heeded.fault or cause.fault,
        dataset=heeded.dataset or cause.dataset,
        policy=cause.policy | heeded.policy,
        arguments=cause.arguments | heeded.arguments,
    )


def named(cause: Cause) -> tuple[str, str]:
    """(finding, all that was said) of the incident it is about."""
    incidents, said = made(cause)
    if incidents is None:
        return "no report", said
    try:
        told = incidents[cause.which]
    except IndexError:
        return "nothing", f"{len(incidents)} incidents"
    told.pop("evidence", None)  # what was said counts, not what was seen
    return told["finding"], json.dumps(told, indent=1, ensure_ascii=False)


def still_wrong(cause: Cause) -> str:
    """What its advice does not help against; "" when it helps."""
    heeded = cause.heeded
    assert heeded is not None
    incidents, said = made(cause, "--heeded")
    if incidents is None:
        return f"no report: {said}"
    if heeded.gone and any(told["finding"] == cause.finding for told in incidents):
        return f"still {cause.finding}: {said}"
    lost = 0 if heeded.gone or not incidents else incidents[0]["batches_lost"]
    return f"{lost} batches were lost: {said}" if lost else ""


def made(cause: Cause, how: str = "--one") -> tuple[list[dict[str, Any]] | None, str]:
    """(the incidents, all that was printed), from an interpreter of its own; no incidents if it ended otherwise."""
    run = f"{sys.executable} -m tests.faults.causes {how} {CAUSES.index(cause)}"
    under_run = run.replace(" -m ", " -m holdfast run -m ", 1)
    command = cause.within.replace("{run}", run).replace("{under_run}", under_run) if cause.within else run
    # Into files: a program that a hung worker had started would keep a pipe open.
    with (
        tempfile.TemporaryDirectory() as folder,
        open(f"{folder}/out", "w+") as out,
        open(f"{folder}/err", "w+") as err,
    ):
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=ROOT,
            stdout=out,
            stderr=err,
            start_new_session=True,
            # What a worker that dies here had made in its temporary folder goes with ours.
            env={**os.environ, "T": f"{folder}/file", "TMPDIR": folder},
        )
        try:
            process.wait(timeout=90)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said, complaints = (Path(file.name).read_text(errors="replace") for file in (out, err))
    line = said.strip().splitlines()[-1] if said.strip() else ""
    if not line.startswith("["):
        return None, f"status {process.returncode}: {said}{complaints}"
    return json.loads(line), said + complaints


def alone(cause: Cause) -> bool:
    """Others must not run meanwhile: it is about the machine's counters, its limits, or who waits for whom."""
    about_time = cause.finding in (*SPEED, "hang-native")
    return about_time or "cgroup" in cause.within


def all_of(causes: list[Cause], ask: Callable[[Cause], T]) -> Iterator[tuple[Cause, T]]:
    """The answer about each (`named`, `still_wrong`). Most of the time they wait: so two at once."""
    with ThreadPoolExecutor(2) as two:
        running = {cause.name: two.submit(ask, cause) for cause in causes if not alone(cause)}
        for cause in causes:
            if cause.name in running:
                yield cause, running[cause.name].result()
    for cause in causes:
        if alone(cause):
            yield cause, ask(cause)


def wrong_about(cause: Cause, finding: str, said: str) -> str:
    """What is not as it should be; "" when all is."""
    if finding != cause.finding:
        return f"should be {cause.finding}"
    absent = [word for word in cause.words if word not in said]
    if absent:
        return f"does not say {', '.join(absent)}"
    if cause.confidence and json.loads(said)["confidence"] != cause.confidence:
        return f"is {json.loads(said)['confidence']}, should be {cause.confidence}"
    return ""


def matrix(pairs: list[tuple[str, str]]) -> list[str]:
    """Rows: what was made; columns, numbered as the rows: what was named. A dot is none; only the diagonal is right."""
    names = sorted({name for pair in pairs for name in pair})
    counts = Counter(pairs)
    width = max(map(len, names), default=0)
    lines = [f"{'':{width + 4}}" + "".join(f"{number:3d}" for number in range(1, len(names) + 1))]
    for number, made in enumerate(names, 1):
        cells = "".join(f"{counts[made, told] or '.':>3}" for told in names)
        lines.append(f"{number:3d} {made:{width}}{cells}")
    return lines


def main(wanted: list[str]) -> int:
    pairs: list[tuple[str, str]] = []
    wrong = skipped = 0
    chosen = [cause for cause in CAUSES if not wanted or any(word in cause.name for word in wanted)]
    for cause in chosen:
        if why := missing(cause):
            skipped += 1
            print(f"{cause.name:44s} not made: {why}", flush=True)
    for cause, (finding, said) in all_of([cause for cause in chosen if not missing(cause)], named):
        trouble = wrong_about(cause, finding, said)
        pairs.append((cause.finding, finding))
        wrong += bool(trouble)
        print(f"{cause.name:44s} {finding:28s} {trouble and 'WRONG: ' + trouble}".rstrip(), flush=True)
        if trouble:
            print(said)
    off = sum(made != told for made, told in pairs)
    print("\nMade (rows) against named (columns)\n" + "\n".join(matrix(pairs)))
    print(f"\n{len(pairs)} causes: {off} off the diagonal, {wrong - off} with the wrong words, {skipped} not made here")
    return int(wrong > 0)


if __name__ == "__main__":
    if sys.argv[1:2] in (["--one"], ["--heeded"]):
        chosen = CAUSES[int(sys.argv[2])]
        print("\n" + json.dumps(observe(chosen if sys.argv[1] == "--one" else with_advice(chosen))))
        sys.stdout.flush()
        os._exit(0)
    sys.exit(main(sys.argv[1:]))
