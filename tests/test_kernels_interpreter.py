"""Runs interpreted_kernels.py: Triton decides between interpreter and compiler when it is first imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "interpreted_kernels.py"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (pip install triton)")
@pytest.mark.timeout(3600)  # with QUANTFORGE_KERNELS=all
@pytest.mark.parametrize("part", ["test_weight_only", "not test_weight_only"])
def test_kernels_equal_float64_in_the_interpreter(part: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-qx",
        *"-p no:cacheprovider -p no:xdist".split(),
        str(CASES),
        "-k",
        part,
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=CASES.parent.parent)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-500:]
