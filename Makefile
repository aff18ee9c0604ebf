# make demo   sets up and shows a training run that survives everything
# make test   sets up and runs all tests
# make lint   formats, fixes what ruff can fix, checks types
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU build of this torch is enough for everything here; TORCH=torch takes the newest.
TORCH ?= torch==2.13.0
# Tests start hundreds of interpreters: without compiled modules each takes a second longer.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all test-pure lint lint-check soak-ledger soak-interrupts causes bench bench-auto bench-pool failures parity-pool notebook compat clean

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "$(TORCH)" numpy
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: $(VENV)/ready
	$(BIN)/holdfast demo

test: lint-check
	$(BIN)/python -m pytest

# As if built without a compiler: loader, pool and faults, and what the extensions do. Ends with what was skipped, and why.
test-pure: $(VENV)/ready
	PYTHONPATH=tests/pure $(BIN)/python -m pytest -rs tests/test_house.py tests/shm tests/system tests/local tests/loader \
		tests/pool tests/parity tests/process/test_loader*.py tests/process/test_retries.py tests/process/test_streams.py \
		tests/process/test_pool*.py tests/process/test_chunks.py tests/process/test_evidence.py tests/faults/test_matrix.py

lint-check: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The same, and every test of ranks on every start method; ten minutes more.
test-all: $(VENV)/ready
	HOLDFAST_SLOW=1 $(BIN)/python -m pytest

# auto against fixed numbers of workers; eighteen minutes.
bench-auto: $(VENV)/ready
	$(BIN)/python benchmarks/auto.py

lint: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mypy

# 100,000 random schedules through the ledger, and 10,000 storms.
soak-ledger: $(VENV)/ready
	HOLDFAST_SCHEDULES=100000 $(BIN)/python -m pytest tests/core/test_schedules.py --timeout 0
	$(BIN)/python -m tests.core.soak 10000

# 10,000 signal handlers that raise inside next(), and as many timers; twenty minutes.
soak-interrupts: $(VENV)/ready
	$(BIN)/python -W ignore -m tests.faults.interrupts 10000

# Every cause that can be made here, on real processes, against the finding that is named: a confusion matrix. Some need
# libraries of others (in a folder beside), root, btrfs-progs, a JVM, py-spy or a GPU: what is not there is said.
causes: $(VENV)/ready .venv-causes/ready
	PYTHONPATH=.venv-causes $(BIN)/python -m tests.faults.causes

.venv-causes/ready:
	$(BIN)/python -m pip install --quiet --target .venv-causes --no-deps h5py grpcio typing_extensions opencv-python-headless
	touch $@

# Against torch's own loader, interleaved in one run; five minutes.
bench: $(VENV)/ready
	$(BIN)/python benchmarks/loader.py

# examples/ddp.ipynb, executed 20 times with Jupyter; in an environment of its own that borrows torch from the first.
notebook: .venv-notebook/ready
	.venv-notebook/bin/python benchmarks/notebook.py 20

.venv-notebook/ready: $(VENV)/ready
	$(PYTHON) -m venv .venv-notebook
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > .venv-notebook/borrowed
	echo "$(CURDIR)/src" >> .venv-notebook/borrowed
	cp .venv-notebook/borrowed "$$(.venv-notebook/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/borrowed.pth"
	.venv-notebook/bin/python -m pip install --quiet nbconvert ipykernel
	touch $@

# holdfast.Pool against ProcessPoolExecutor, multiprocessing.Pool, loky and pebble in one run; three minutes.
bench-pool: $(VENV)/ready .venv-peers/ready
	PYTHONPATH=.venv-peers $(BIN)/python benchmarks/pool.py

.venv-peers/ready:
	$(BIN)/python -m pip install --quiet --target .venv-peers --no-deps loky pebble
	touch $@

# The eight failures that people post most, with torch's loader and with ours: writes docs/failures.md; five minutes.
failures: $(VENV)/ready
	$(BIN)/python -m benchmarks.failures

# CPython's own tests of ProcessPoolExecutor, pointed at holdfast.Pool; five minutes.
parity-pool: $(VENV)/ready
	$(BIN)/python -m tests.parity.executor

# The oldest supported torch, the one we develop on, and the newest.
compat:
	PYTHON=$(PYTHON) ./tests/compat.sh

clean:
	rm -rf $(VENV) .venv-* src/holdfast/*/*.so build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
