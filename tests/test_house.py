"""The house: imports point one way, the map is true, every error survives pickling, the docs know every finding."""

import ast
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast import RankExited, RankRaised, cli, core, diagnose, errors, launch, loader, local, pool, shm, system
from holdfast.testing import FAULTS

from . import house

SOURCE = Path(holdfast.__file__).parent
DOCS = SOURCE.parents[1] / "docs"
# Lower may not import higher; siblings on one level do not import each other.
LEVELS = [
    {"errors", "policy"},
    {"core"},
    {"shm"},
    {"system"},
    {"remote_exception"},
    {"local"},
    {"diagnose"},
    {"loader", "launch", "pool"},
    {"testing"},
    {"cli"},
    {"__main__"},
]


def level(room):
    return next(i for i, rooms in enumerate(LEVELS) if room in rooms)


def test_imports_point_one_way():
    wrong = []
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                parts = name.split(".")
                if parts[0] != "holdfast" or len(parts) == 1:
                    continue
                if parts[1] != room and level(parts[1]) >= level(room) and {room, parts[1]} != {"errors", "policy"}:
                    wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert not wrong


@pytest.mark.parametrize("face", ["loader", "pool"])
def test_a_face_sees_the_contract_and_makes_its_host_in_one_place(face):
    seen = [
        name
        for path in (SOURCE / face).rglob("*.py")
        for name in re.findall(r"^\s*(?:from|import) (holdfast\.local\S*)", path.read_text(), re.MULTILINE)
    ]
    assert seen == ["holdfast.local.trainer.local_host"]


PROCESSES = ["protocol", "worker", "keeper", "trainer"]


def test_imports_between_the_processes_point_one_way():
    wrong = []
    for path in (SOURCE / "local").rglob("*.py"):
        process = path.relative_to(SOURCE / "local").parts[0]
        if process == "__init__.py":
            continue
        for name in re.findall(r"^\s*(?:from|import) holdfast\.local\.(\w+)", path.read_text(), re.MULTILINE):
            if PROCESSES.index(name) > PROCESSES.index(process):
                wrong.append(f"{path.relative_to(SOURCE)} imports local.{name}")
    assert not wrong


def test_torch_is_imported_where_it_belongs():
    allowed = {"loader", "launch", "pool", "testing", "cli"}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).parts
        if parts[0] in allowed or parts in {("shm", "pack.py"), ("shm", "slot_writer.py")}:
            continue
        assert not re.search(r"^\s*(import|from) torch\b", path.read_text(), re.MULTILINE), path


def test_what_only_reads_is_imported_without_torch():
    """`holdfast explain` and the like answer at once; an import of torch takes seconds."""
    rooms = {"__main__", "errors", "policy", "core", "system", "remote_exception", "diagnose", "cli"}
    names = [path.relative_to(SOURCE).with_suffix("").parts for path in SOURCE.rglob("*.py")]
    modules = [
        ".".join(("holdfast", *parts)) for parts in names if parts[0] in rooms and parts[-1] not in ("__init__", "demo")
    ]
    assert len(modules) > 40
    code = f"""
import importlib, sys
for name in {modules}:
    importlib.import_module(name)
    assert not {{"torch", "numpy"}} & set(sys.modules), name
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert not done.returncode, done.stderr


def test_core_does_no_io():
    for path in (SOURCE / "core").glob("*.py"):
        imported = re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.MULTILINE)
        assert not set(imported) & {
            "os",
            "socket",
            "select",
            "subprocess",
            "multiprocessing",
            "numpy",
            "time",
            "torch",
        }, path


def test_the_map_of_the_package_is_true():
    for room in {p.name for p in SOURCE.iterdir() if p.is_dir() and p.name != "__pycache__"}:
        assert f"{room}/" in holdfast.__doc__, room


def test_all_public_names_are_there():
    """Also those that are imported when they are first asked for; type checkers are told of the same modules."""
    code = """
import holdfast, sys
assert set(holdfast.__all__) <= set(dir(holdfast)) and not hasattr(holdfast, "nonsense")
from holdfast import *
assert set(holdfast.__all__) <= set(globals())
assert all(getattr(sys.modules[module], name) is globals()[name] for name, module in holdfast._MODULES.items())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert not done.returncode, done.stderr
    checked = next(node for node in ast.parse((SOURCE / "__init__.py").read_text()).body if isinstance(node, ast.If))
    assert {alias.name: line.module for line in checked.body for alias in line.names} == holdfast._MODULES


ROOMS = [core, shm, system, local, diagnose, loader, pool, launch, cli]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
def test_the_map_of_a_room_is_true(room):
    """Every module, and every folder, stands at the beginning of a line, before its description; nothing else does."""
    named = re.findall(r"^ *(\w+)/?  +", room.__doc__, re.MULTILINE)
    there = [path for path in Path(room.__file__).parent.rglob("*") if path.suffix == ".py" or path.is_dir()]
    assert sorted(named) == sorted(path.stem for path in there if path.stem.strip("_") == path.stem)


def test_a_module_of_launch_imports_only_those_above_it_in_the_map():
    order = re.findall(r"^(\w+)  +", launch.__doc__, re.MULTILINE)
    for i, module in enumerate(order):
        text = (SOURCE / "launch" / f"{module}.py").read_text()
        imported = re.findall(
            r"^from holdfast\.launch\.(\w+) import|^from holdfast\.launch import (\w+)", text, re.MULTILINE
        )
        assert {a or b for a, b in imported} <= set(order[:i]), module


def test_the_lane_without_extensions_hides_all_of_them():
    """See tests/pure."""
    built = re.findall(
        r'^name = "(holdfast\.[\w.]+)"', (SOURCE.parents[1] / "pyproject.toml").read_text(), re.MULTILINE
    )
    hidden = re.findall(r'"([\w.]+\._\w+)"', (Path(__file__).parent / "pure" / "sitecustomize.py").read_text())
    assert built and sorted(built) == sorted(f"holdfast.{name}" for name in hidden)


def test_files_that_texts_name_exist():
    """In the docs with the folder, in the source also by the name of a neighbour."""
    root = DOCS.parent
    rooms = "|".join(room.__name__.removeprefix("holdfast.") for room in ROOMS)
    pattern = rf"`((?:{rooms})/[\w/]+\.(?:py|c))`"
    missing = []
    for page in (*DOCS.glob("*.md"), root / "CONTRIBUTING.md"):
        for name in re.findall(pattern, page.read_text()):
            if not (SOURCE / name).exists():
                missing.append(f"{page.name}: {name}")
    for path in SOURCE.rglob("*.py"):
        for name in re.findall(r"(?<![\w./*<\"`-])((?:\w+/)*\w+\.(?:py|c))\b", path.read_text()):
            near = [folder / name for folder in (SOURCE, path.parent, path.parent.parent, root, SOURCE.parent)]
            if not any(file.exists() for file in near) and name not in ("iterator.py",):
                missing.append(f"{path.relative_to(SOURCE)}: {name}")
    assert not missing


def test_a_name_is_given_once():
    """No two classes, and no two modules, share one."""
    assert not house.shared_names()


def test_every_error_survives_pickling():
    kinds = [k for _, k in inspect.getmembers(errors, inspect.isclass) if issubclass(k, Exception)]
    kinds += [RankExited, RankRaised]  # elsewhere, for torch's errors are their other base
    assert len(kinds) > 8
    for kind in kinds:
        error = kind("what happened")
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert "what happened" in str(again)
        assert vars(again) == vars(error)
        assert kind.__name__ in errors.__doc__


def test_every_finding_has_its_page():
    pages = {page.stem for page in (SOURCE / "diagnose" / "pages").glob("*.md")}
    named = set()
    for path in (*(SOURCE / "diagnose").rglob("*.py"), *(SOURCE / "launch").glob("*.py")):
        named |= set(re.findall(r'"((?:worker|hang|sample|cannot|file|stale|shm|disk)-[a-z-]+)"', path.read_text()))
        named |= set(re.findall(r'Finding\(\s*"([a-z-]+)"', path.read_text()))
    assert len(named) > 30
    assert named <= pages, named - pages


def test_every_fault_has_a_name_people_can_read():
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in FAULTS)
