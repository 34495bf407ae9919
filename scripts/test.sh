#!/usr/bin/env bash
# Makes an environment if none is active, installs the tested set, checks style, and runs every test.
#
#   bash scripts/test.sh                       everything
#   bash scripts/test.sh tests/schedules -x    arguments go to pytest
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
source scripts/environment.sh
prepare_environment "$root"

export OMP_NUM_THREADS=1  # ranks are threads or processes; each computes on one core
export PYTHONUNBUFFERED=1

echo "checking style"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
echo "running the tests"
exec "$PYTHON" -m pytest -q --durations=25 --durations-min=1 "$@"
