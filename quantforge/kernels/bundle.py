"""A folder of kernels that goes with a checkpoint: source, binaries for its shapes, and a manifest of both.

kernels/
  build/torch-universal/     Triton source and launchers, which import torch and triton alone; the layout that the
                             package `kernels` loads from a path: get_local_kernel(Path("DIR/kernels"))
  binaries/TARGET/*.cubin    compiled ahead of time (*.hsaco for AMD)
  manifest.json              each binary's entry, tile, registers, spills, shared memory, arguments and SHA-256; for
                             each shape of the model the launches that serve it
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantforge import __version__
from quantforge.kernels import aot, launch, planar, rows, tiles, w4a16, w8a8, w8a16
from quantforge.kernels.aot import Binary, Build, compile_all
from quantforge.kernels.matrix import Dtype, combine_build, int8_build, planar_build, round_tokens_build

FOLDER = "kernels"
MANIFEST = "manifest.json"
NAME = "quantforge-linear"
LICENCE = "Apache-2.0"
VARIANT = Path("build") / "torch-universal"
LAUNCHERS = (launch, planar, rows, tiles, w4a16, w8a16, w8a8)
"""Modules that are copied, with imports of this package made relative. What `sources` holds needs no change."""

ROWS = {"decode": 16, "prefill": 1024}
"""Launches that get a binary, by the most rows of activations; the source serves any number."""

UNTRIED = "Compiled and inspected without a GPU; checked for numbers in Triton's interpreter. Not run on this hardware."


@dataclass(frozen=True)
class Matrix:
    """A kind of matrix in a model. `group_size` -1 is one scale a row; with `integers` activations are INT8 as well."""

    out_features: int
    in_features: int
    bits: int
    group_size: int
    symmetric: bool
    bias: bool
    integers: bool


def write_bundle(folder: Path, matrices: Mapping[Matrix, int], targets: Sequence[str], dtype: Dtype) -> None:
    """Write everything into `folder`, which must not exist. `matrices` are counted.

    Raises QuantforgeError when the compiler fails; UsageError for an unknown target.
    """
    launches: list[dict[str, Any]] = []
    without: list[dict[str, Any]] = []
    builds: dict[Build, None] = {}
    for matrix, count in matrices.items():
        if (reason := unserved(matrix)) is not None:
            without.append({**asdict(matrix), "count": count, "reason": reason})
            continue
        for target in targets:
            for step, most in ROWS.items():
                steps = _steps(matrix, target, most, dtype)
                builds |= {build: None for build in steps}
                grids = [{"binary": _file(build).as_posix(), "grid": list(build.grid)} for build in steps]
                launches.append({**asdict(matrix), "count": count, "target": target, "step": step, "launches": grids})
    binaries = compile_all(list(builds))
    write_source(folder / VARIANT)
    described = [_write_binary(folder, binary) for binary in binaries]
    manifest = {
        "quantforge": __version__,
        "triton": binaries[0].triton if binaries else None,
        "licence": LICENCE,
        "note": UNTRIED,
        "source": {path.as_posix(): _hash(folder / path) for path in _files(folder, VARIANT)},
        "grid": "[programs along out features, rows of activations in one program, programs that share a tile]",
        "binaries": described,
        "matrices": launches,
        "without": without,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def unserved(matrix: Matrix) -> str | None:
    """Why there is no kernel for a matrix; None when there is one."""
    if matrix.integers and (matrix.bits, matrix.symmetric) == (8, True) and matrix.group_size == planar.WHOLE_ROW:
        return None
    if matrix.integers:
        return "INT8 activations need symmetric 8-bit weights with one scale a row"
    if matrix.bits not in planar.WIDTHS:
        return f"no kernel reads codes of {matrix.bits} bits"
    try:
        planar.plane_width(matrix.bits, matrix.group_size, matrix.in_features)
    except ValueError as error:
        return str(error)
    return None


def write_source(variant: Path) -> None:
    """The package that the universal layout asks for, from this package's own files."""
    (variant / "sources").mkdir(parents=True)
    for module in LAUNCHERS:
        file = Path(str(module.__file__))
        text = file.read_text(encoding="utf-8")
        relative = text.replace("from quantforge.kernels import ", "from . import ").replace(
            "from quantforge.kernels.", "from ."
        )
        (variant / file.name).write_text(relative, encoding="utf-8")
    for file in sorted((Path(str(aot.__file__)).parent / "sources").glob("*.py")):
        (variant / "sources" / file.name).write_bytes(file.read_bytes())
    (variant / "__init__.py").write_text(_INIT, encoding="utf-8")
    metadata = {
        "name": NAME,
        "id": f"_{NAME.replace('-', '_')}_{__version__.replace('.', '_')}",
        "version": 1,
        "license": LICENCE,
        "python-depends": [],
        "backend": {"type": "cuda"},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


_INIT = '''"""Linear layers over packed weights of 4 and 8 bits: `planar.pack` lays them out, `rows.pack` for INT8."""

from . import planar, rows
from .w4a16 import w4a16_gated_triton, w4a16_linear_triton
from .w8a8 import w8a8_linear_triton
from .w8a16 import w8a16_gated_triton, w8a16_linear_triton

__all__ = [
    "planar", "rows", "w4a16_gated_triton", "w4a16_linear_triton", "w8a16_gated_triton", "w8a16_linear_triton",
    "w8a8_linear_triton",
]
'''


def _steps(matrix: Matrix, target: str, most: int, dtype: Dtype) -> list[Build]:
    """The kernels of one product, in order."""
    if matrix.integers:
        first = [round_tokens_build(target, dtype)]
        product = int8_build(
            target, rows=most, dtype=dtype, bias=matrix.bias,
            out_features=matrix.out_features, in_features=matrix.in_features,
        )  # fmt: skip
    else:
        first = []
        product = planar_build(
            target, matrix.bits, matrix.group_size, rows=most, dtype=dtype, symmetric=matrix.symmetric,
            bias=matrix.bias, out_features=matrix.out_features, in_features=matrix.in_features,
        )  # fmt: skip
    last = [combine_build(product, bias=matrix.bias)] if product.grid[2] > 1 else []
    return [*first, product, *last]


def _write_binary(folder: Path, binary: Binary) -> dict[str, Any]:
    """Write one binary; its entry in the manifest."""
    build, found = binary.build, binary.inspection
    file = _file(build)
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_bytes(binary.code)
    has_weights = "BLOCK_N" in build.known
    return {
        "file": file.as_posix(),
        "sha256": _hash(folder / file),
        "target": build.target,
        "entry": build.entry,
        "symbol": binary.symbol,
        "dtype": build.dtype,
        "constants": build.known,
        "warps": build.warps,
        "threads": build.threads,
        "stages": build.stages,
        "registers": found.registers,
        "spills": found.spills,
        "shared_bytes": found.shared_bytes,
        "instructions_per_weight": round(binary.instructions_per_weight, 2) if has_weights else None,
        "arguments": [list(argument) for argument in binary.arguments],
        "null_pointers": binary.null_pointers,
        "multiples_of_16": sorted({*aot.ALIGNED, *build.aligned} & {name for name, _ in binary.arguments}),
        "licence": LICENCE,
    }


def _file(build: Build) -> Path:
    kind = "cubin" if aot.TARGETS[build.target][0] == "cuda" else "hsaco"
    return Path("binaries") / build.target / f"{build}.{kind}"


def _files(folder: Path, below: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in (folder / below).rglob("*") if path.is_file())


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
