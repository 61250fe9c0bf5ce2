"""vLLM's plug-in without vLLM: what it does when it is told not to, and when vLLM is not what it expects.

What it adds is tried in vLLM itself (`test_live_servers.py`).
"""

import importlib
import logging
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quantforge.integrations import vllm as plugin

ROOT = Path(__file__).parent.parent

PLATFORMS = """
import enum
class PlatformEnum(enum.Enum):
    CPU = 1
    CUDA = 2
    ROCM = 3
class Platform:
    _enum = PlatformEnum.{name}
    def is_cpu(self): return self._enum == PlatformEnum.CPU
current_platform = Platform()
"""
KERNELS = """
from abc import ABC
from dataclasses import dataclass
from vllm.platforms import PlatformEnum
class CPUWNA16LinearKernel: pass
class MPLinearKernel(ABC): pass
@dataclass
class MPLinearLayerConfig:
    partition_weight_shape: tuple = ()
_POSSIBLE_KERNELS = {PlatformEnum.CPU: [CPUWNA16LinearKernel]}
"""
REST = {
    "envs": "VLLM_DISABLED_KERNELS = []",
    "logger": "import logging\ninit_logger = logging.getLogger",
    "scalar_type": "class scalar_types:\n uint4 = uint4b8 = uint8b128 = 0",
    "model_executor.layers.quantization.utils": "def replace_parameter(): pass",
    "model_executor.parameter": "def permute_param_layout_(): pass",
}


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[str, str]]]:
    """Runs the plug-in and gives level and text of the one line that it logs."""
    monkeypatch.delenv(plugin.SWITCH, raising=False)

    def run() -> tuple[str, str]:
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger="vllm.quantforge"):
            plugin.register()
        [record] = caplog.records
        return record.levelname, record.getMessage()

    yield run
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    for name in ("kernel", "gptq"):
        sys.modules.pop(f"{plugin.__name__}.{name}", None)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a package called vllm with those modules."""

    def make(**modules: str) -> None:
        for name, text in modules.items():
            folder = tmp_path / "vllm" / Path(*name.split("."))
            folder.mkdir(parents=True, exist_ok=True)
            for each in (folder, *folder.parents):
                if each == tmp_path:
                    break
                (each / "__init__.py").touch()
            (folder / "__init__.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)

    return make


def test_the_entry_point_is_the_function() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["quantforge"].partition(":")
    assert getattr(importlib.import_module(module), name) is plugin.register


def test_without_vllm_or_with_another_value_of_the_switch_it_warns_and_goes_on(
    said: Callable[[], tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    level, text = said()
    assert level == "WARNING" and "kernel not added, vLLM does without: ModuleNotFoundError" in text
    monkeypatch.setenv(plugin.SWITCH, "perhaps")
    level, text = said()
    assert level == "WARNING" and "QUANTFORGE_VLLM='perhaps' is none of missing, prefer, off" in text


def test_switched_off_it_does_not_even_import_vllm(
    said: Callable[[], tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv(plugin.SWITCH, "off")
    assert said() == ("INFO", "quantforge: nothing added: QUANTFORGE_VLLM=off")


def test_on_a_gpu_nothing_is_added_unless_asked_for(
    said: Callable[[], tuple[str, str]], fake: Callable[..., None]
) -> None:
    fake(platforms=PLATFORMS.format(name="CUDA"))
    level, text = said()
    assert level == "INFO" and "on a GPU only QUANTFORGE_VLLM=prefer adds its kernel" in text
    assert "nobody has yet run in vLLM there" in text


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"model_executor.kernels.linear": None}, "No module named 'vllm.model_executor.kernels'"),
        ({"model_executor.kernels.linear": KERNELS.replace("MPLinearKernel(", "Other(")}, "cannot import name 'MPLin"),
        ({"scalar_type": "class scalar_types: pass"}, "has no attribute 'uint4'"),
        ({}, "its layers do not tell act_type, group_size, weight_type, zero_points"),
    ],
    ids=["moved", "renamed", "other-types", "other-layers"],
)
def test_a_vllm_that_is_built_another_way_is_left_alone_with_a_warning(
    said: Callable[[], tuple[str, str]], fake: Callable[..., None], changed: dict[str, Any], told: str
) -> None:
    modules = {"platforms": PLATFORMS.format(name="CPU"), "model_executor.kernels.linear": KERNELS, **REST, **changed}
    fake(**{name: text for name, text in modules.items() if text is not None})
    for _ in range(2):
        level, text = said()
        assert level == "WARNING" and "kernel not added, vLLM does without: " in text and told in text
    if changed.get("model_executor.kernels.linear", KERNELS) == KERNELS:
        linear = importlib.import_module("vllm.model_executor.kernels.linear")
        platforms = importlib.import_module("vllm.platforms")
        assert linear._POSSIBLE_KERNELS[platforms.PlatformEnum.CPU] == [linear.CPUWNA16LinearKernel]


# ------------------------------------------------------------------------------------------------ with vLLM


@pytest.mark.servers
@pytest.mark.slow
def test_in_vllm_the_kernel_multiplies_by_every_grid_as_the_files_have_it() -> None:
    python = os.environ.get("QUANTFORGE_SERVER_VLLM_PLUGIN")
    if not python:
        pytest.skip("QUANTFORGE_SERVER_VLLM_PLUGIN is not set: scripts/servers.sh makes the environment and prints it")
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", plugin.SWITCH)}
    command = [python, "-P", str(Path(__file__).parent / "vllm_grids.py")]
    ran = subprocess.run(command, capture_output=True, text=True, env=own | {"TRITON_INTERPRET": "1"})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == "all as they should be"
