#!/usr/bin/env bash
# Style, types and every test, on a fresh machine or not. Arguments go to pytest: bash scripts/test.sh -m "not slow" -k recipe
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_env.sh

ruff check .
ruff format --check .
mypy
HF_HUB_OFFLINE=1 "$PYTHON" -m pytest -q -n auto --dist worksteal "$@"
