#!/usr/bin/env bash
# The tests on the oldest supported torch, the one we develop on, and the newest, each in an environment of its own.
# Several GB are fetched: torch's builds from the registry come with CUDA. Usage: tests/compat.sh [VERSION ...]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(2.6.0 2.13.0 newest)
failed=()
for version in "${versions[@]}"; do
  venv=.venv-torch-$version
  if [ ! -e "$venv/ready" ]; then
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet uv
    wanted=torch==$version
    [ "$version" = newest ] && wanted=torch
    "$venv/bin/python" -m uv pip install --quiet --python "$venv/bin/python" "$wanted" numpy
    "$venv/bin/python" -m uv pip install --quiet --python "$venv/bin/python" --editable ".[dev]"
    touch "$venv/ready"
  fi
  echo "== torch $("$venv/bin/python" -c 'import torch; print(torch.__version__)')"
  "$venv/bin/python" -m pytest --timeout 300 -p no:randomly || failed+=("$version")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed on torch: ${failed[*]}"; exit 1; }
