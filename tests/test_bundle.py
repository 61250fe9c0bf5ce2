"""Kernels beside the weights: what is in the folder, that it stands alone, and that a changed byte is found."""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantforge.errors import PlanError
from quantforge.kernels.bundle import VARIANT, Matrix, unserved, write_source
from quantforge.pipeline.plan import make_plan
from quantforge.pipeline.run import quantize
from quantforge.recipe import Recipe

TARGETS = ("sm_80", "gfx942")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (pip install triton)"
)


def recipe_for(tiny_exports: dict[str, Path], output: Path, **own: object) -> Recipe:
    fields = {"model": str(tiny_exports["source"]), "output": str(output), "method": "rtn", "group_size": 16}
    return Recipe.model_validate(fields | own)


@pytest.fixture(scope="module")
def bundled(tiny_exports: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with kernels, 8-bit down_proj and 3-bit o_proj among it."""
    rules = ({"match": "*.down_proj", "bits": 8, "group_size": -1}, {"match": "*.o_proj", "bits": 3})
    recipe = recipe_for(tiny_exports, tmp_path_factory.mktemp("bundled") / "out", bundle_kernels=TARGETS, rules=rules)
    assert list(quantize(recipe, make_plan(recipe)))
    return Path(str(recipe.output))


@needs_triton
def test_the_manifest_describes_every_binary_and_every_shape(bundled: Path) -> None:
    folder = bundled / "kernels"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["licence"] == "Apache-2.0" and "Not run on this hardware" in manifest["note"]
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    described = {entry["file"]: entry for entry in manifest["binaries"]}
    assert files == {"manifest.json", *described, *manifest["source"]}
    for name, digest in [*manifest["source"].items(), *((e["file"], e["sha256"]) for e in described.values())]:
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    for entry in described.values():
        assert (folder / entry["file"]).read_bytes()[:4] == b"\x7fELF"
        assert entry["target"] in TARGETS and entry["spills"] == 0 and entry["registers"] > 0
        assert entry["arguments"][0] == ["x", "*bf16"] and entry["multiples_of_16"]
    assert {entry["file"].rpartition(".")[2] for entry in described.values()} == {"cubin", "hsaco"}
    served = {(m["out_features"], m["in_features"], m["bits"], m["target"], m["step"]) for m in manifest["matrices"]}
    shapes = [(32, 32, 4), (16, 32, 4), (64, 32, 4), (32, 64, 8)]  # q; k and v; gate and up; down
    assert served == {
        (*shape, target, step) for shape in shapes for target in TARGETS for step in ("decode", "prefill")
    }
    assert {m["count"] for m in manifest["matrices"] if m["out_features"] == 64} == {2}
    for matrix in manifest["matrices"]:
        assert all(launch["binary"] in described and len(launch["grid"]) == 3 for launch in matrix["launches"])
    assert [(m["out_features"], m["bits"], m["reason"]) for m in manifest["without"]] == [
        (32, 3, "no kernel reads codes of 3 bits")
    ]


@needs_triton
def test_verify_compares_the_hashes_of_kernels_too(bundled: Path) -> None:
    from quantforge.pipeline.examine import examine

    def faults() -> Iterator[tuple[str, str]]:
        yield from ((f.code, f.where) for f in examine(str(bundled)).findings if f.severity == "error")

    assert not list(faults())
    binary = next((bundled / "kernels").rglob("*.cubin"))
    original = binary.read_bytes()
    binary.write_bytes(original[:-1] + b"?")
    assert list(faults()) == [("changed", binary.relative_to(bundled).as_posix())]
    binary.write_bytes(original)


@needs_triton
def test_a_conversion_has_kernels_too(tiny_exports: dict[str, Path], tmp_path: Path) -> None:
    from quantforge.pipeline.convert import convert_checkpoint

    convert_checkpoint(tiny_exports["w8a8"], "compressed-tensors", tmp_path / "out", targets=["gfx942"])
    manifest = json.loads((tmp_path / "out" / "kernels" / "manifest.json").read_text())
    entries = {entry["entry"] for entry in manifest["binaries"]}
    assert entries == {"round_tokens", "int8_matmul"} and not manifest["without"]
    assert (
        f"kernels/{manifest['binaries'][0]['file']}"
        in json.loads((tmp_path / "out" / "quantforge.json").read_text())["files"]
    )
    with pytest.raises(PlanError, match="no kernels for sm_70"):
        convert_checkpoint(tiny_exports["w8a8"], "compressed-tensors", tmp_path / "other", targets=["sm_70"])


LINEAR = """
import sys, torch
sys.modules["quantforge"] = None  # importing it fails from here on
from pathlib import Path
{load}
codes = torch.randint(0, 16, (70, 200), dtype=torch.uint8)
scales = torch.rand(70, 4).to(torch.float16)
x = torch.randn(3, 200).to(torch.float16)
packed = kernel.planar.pack(codes, scales, None, bits=4, group_size=64)
found = kernel.w4a16_linear_triton(x, *packed, None, 64, 70)
weight = (codes.double() - 8) * scales.double().repeat_interleave(64, 1)[:, :200]
expected = x.double() @ weight.T
assert (found.double() - expected).norm() < 5e-4 * expected.norm()
print("equal")
"""
BY_PATH = """
import importlib.util
spec = importlib.util.spec_from_file_location("_quantforge_linear", Path({path!r}) / "__init__.py")
kernel = importlib.util.module_from_spec(spec)
sys.modules["_quantforge_linear"] = kernel
spec.loader.exec_module(kernel)
"""
BY_PACKAGE = """
from kernels import get_local_kernel
kernel = get_local_kernel(Path({path!r}))
"""


def ran(program: str) -> str:
    environment = os.environ | {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    return done.stdout.strip() or done.stderr[-2000:]


@needs_triton
def test_the_source_runs_without_this_package(tmp_path: Path) -> None:
    write_source(tmp_path / VARIANT)
    assert ran(LINEAR.format(load=BY_PATH.format(path=str(tmp_path / VARIANT)))) == "equal"


@needs_triton
@pytest.mark.skipif(importlib.util.find_spec("kernels") is None, reason="the package kernels is not installed")
def test_the_package_kernels_loads_the_folder_from_its_path(tmp_path: Path) -> None:
    write_source(tmp_path / VARIANT)
    assert ran(LINEAR.format(load=BY_PACKAGE.format(path=str(tmp_path)))) == "equal"


def test_what_no_kernel_serves_is_said() -> None:
    def reason(**own: object) -> str | None:
        fields = {"bits": 4, "group_size": 128, "symmetric": True, "bias": False, "integers": False}
        return unserved(Matrix(64, 256, **(fields | own)))  # type: ignore[arg-type]

    assert reason() is None and reason(bits=8, group_size=-1, integers=True) is None
    assert reason(bits=2) == "no kernel reads codes of 2 bits"
    assert reason(group_size=24) == "the planar layout needs groups of a multiple of 16 inputs, not of 24"
    assert reason(bits=8, integers=True) == "INT8 activations need symmetric 8-bit weights with one scale a row"


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        ({"bundle_kernels": ("sm_80", "sm_75")}, "no kernels for sm_75; there are sm_80"),
        ({"bundle_kernels": ("sm_80",), "formats": ("gguf",), "group_size": 32}, "gguf files are read by kernels of"),
    ],
)
def test_impossible_bundles_are_refused_with_the_plan(
    own: dict[str, object], problem: str, tiny_exports: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=problem):
        make_plan(recipe_for(tiny_exports, tmp_path / "out", **own))
