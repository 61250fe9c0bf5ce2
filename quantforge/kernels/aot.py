"""Compiling kernels without a GPU, and inspecting what comes out.

Triton's compiler needs no driver. Its interpreter, which the environment variable TRITON_INTERPRET turns on, cannot be
in one process with it. `compile_all` therefore compiles in a process of its own, which runs this module:

    python -m quantforge.kernels.aot < builds.json > results.json
"""

import base64
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from quantforge.errors import QuantforgeError, UsageError
from quantforge.kernels.inspection import Inspection, inspect_cubin, read_amdgcn

TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_86": ("cuda", 86, 32),
    "sm_89": ("cuda", 89, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
}
"""Name -> Triton's backend, its architecture, threads of a warp."""

Entry = Literal["planar_matmul", "combine", "int8_matmul", "round_tokens", "combine_int8"]
MODULES = {"planar_matmul": "planar", "combine": "planar"}
"""The module of `sources` that holds a kernel; `int8` for the others."""

ALIGNED = {"K", "COLUMNS", "PADDED"}
"""Sizes that are multiples of 16 by construction, which the compiler must know to load 16 bytes at a time."""


@dataclass(frozen=True)
class Build:
    """One kernel for one target.

    Attributes:
        entry: the function in `sources`.
        target: a key of TARGETS.
        dtype: of activations, scales and bias, ``fp16`` or ``bf16``.
        constants: compile-time arguments by name; PTX and COMPUTE are added. An argument that is None is absent.
        out: dtype of what is written.
        warps, stages: of the launch.
        aligned: sizes that are multiples of 16 beyond those that always are.
        grid: programs along out features, rows of activations in one program, programs that share a tile.
    """

    entry: Entry
    target: str
    dtype: Literal["fp16", "bf16"]
    constants: tuple[tuple[str, Any], ...]
    out: str
    warps: int = 4
    stages: int = 3
    aligned: tuple[str, ...] = ("N",)
    grid: tuple[int, int, int] = field(default=(1, 1, 1), compare=False)

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise UsageError(f"no kernel is compiled for {self.target}; known are {', '.join(TARGETS)}")

    def __str__(self) -> str:
        """``planar_matmul-sm_90-fp16-16x128-4bit-g128-w32-partial``: equal builds, and only they, have equal names."""
        known = self.known
        parts = [self.entry, self.target, self.dtype]
        if "BLOCK_M" in known:
            parts.append(f"{known['BLOCK_M']}x{known['BLOCK_N']}")
        if "BITS" in known:
            parts += [f"{known['BITS']}bit", f"g{known['GROUP']}" if known["GROUP"] else "row", f"w{known['PLANE']}"]
            parts += ["sym"] if "zeros" in known else []
            parts += [] if known["WHOLE_K"] else ["padded"]
        parts += [f"splits{known['SPLITS']}"] if "SPLITS" in known else []
        parts += ["partial"] if known.get("PARTIAL") else [] if "bias" in known else ["bias"]
        parts += ["gated"] if known.get("GATED") else []
        parts += [] if self.aligned or "BLOCK_M" not in known else ["ragged"]
        return "-".join(parts)

    @property
    def known(self) -> dict[str, Any]:
        """The compile-time arguments."""
        return dict(self.constants)

    @property
    def threads(self) -> int:
        """Of one program."""
        return self.warps * TARGETS[self.target][2]


@dataclass(frozen=True)
class Binary:
    """What became of a build.

    Attributes:
        symbol: the kernel's name in the binary.
        kind: ``cubin`` or ``hsaco``.
        arguments: run-time arguments in order, as (name, type); `null_pointers` more follow, which Triton may pass.
    """

    build: Build
    symbol: str
    kind: str
    code: bytes = field(repr=False)
    arguments: tuple[tuple[str, str], ...]
    null_pointers: int
    inspection: Inspection
    triton: str

    @property
    def instructions_per_weight(self) -> float:
        """Of the main loop, over all threads, for one weight. ValueError for a kernel without weights."""
        known = self.build.known
        if "BLOCK_N" not in known:
            raise ValueError(f"{self.build.entry} reads no weights")
        inputs = known["BLOCK_K"] if "BLOCK_K" in known else known["PLANE"] * 16 // known["BITS"]
        return self.inspection.instructions_per_weight(inputs * known["BLOCK_N"], self.build.threads)


def compile_all(builds: Sequence[Build]) -> list[Binary]:
    """Compile and inspect, in another process and an empty cache.

    Raises:
        QuantforgeError: Triton is not installed, or its compiler fails.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        environment |= {"TRITON_CACHE_DIR": cache, "TRITON_DEFAULT_FP_FUSION": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        request = json.dumps([asdict(build) for build in builds])
        command = [sys.executable, "-m", "quantforge.kernels.aot"]
        done = subprocess.run(command, input=request, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise QuantforgeError(f"compiling kernels failed: {done.stderr.strip()[-2000:]}")
    results = json.loads(done.stdout)
    return [_binary(build, result) for build, result in zip(builds, results, strict=True)]


def _binary(build: Build, result: dict[str, Any]) -> Binary:
    inspection = result["inspection"]
    return Binary(
        build,
        result["symbol"],
        result["kind"],
        base64.b64decode(result["code"]),
        tuple((name, kind) for name, kind in result["arguments"]),
        result["null_pointers"],
        Inspection(**{**inspection, "loop": Counter(inspection["loop"])}),
        result["triton"],
    )


def compile_here(build: Build) -> dict[str, Any]:
    """Compile one build in this process, in which the interpreter must be off; the fields of its `Binary` as JSON."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, names = _function(build)
    constants = _constants(build, names)
    signature = {name: "constexpr" if name in constants else _type(name, build) for name in names}
    aligned = [
        index
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name in (*ALIGNED, *build.aligned)
    ]
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs=constants,
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    backend, arch, warp = TARGETS[build.target]
    options = {"num_warps": build.warps, "num_stages": build.stages}
    compiled = triton.compile(source, target=GPUTarget(backend, arch, warp), options=options)
    kind = "cubin" if backend == "cuda" else "hsaco"
    arguments = [(name, kind_) for name, kind_ in signature.items() if kind_ != "constexpr"]
    shared = int(compiled.metadata.shared)
    if kind == "cubin":
        tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        inspection = inspect_cubin(compiled.asm["cubin"], tools, shared)
        parameters = compiled.asm["ptx"].partition("{")[0].count(".param ")
    else:
        inspection = read_amdgcn(compiled.asm["amdgcn"], shared)
        parameters = len(re.findall(r"\.value_kind:\s+(?:by_value|global_buffer)", compiled.asm["amdgcn"]))
    return {
        "symbol": compiled.metadata.name,
        "kind": kind,
        "code": base64.b64encode(compiled.asm[kind]).decode(),
        "arguments": arguments,
        "null_pointers": parameters - len(arguments),
        "inspection": {**asdict(inspection), "loop": dict(inspection.loop)},
        "triton": triton.__version__,
    }


def _function(build: Build) -> tuple[Any, list[str]]:
    from importlib import import_module

    module = import_module(f"quantforge.kernels.sources.{MODULES.get(build.entry, 'int8')}")
    function = getattr(module, build.entry)
    return function, list(function.arg_names)


def _constants(build: Build, names: list[str]) -> dict[str, Any]:
    import triton.language as tl

    constants = build.known
    if "PTX" in names:
        constants["PTX"] = TARGETS[build.target][0] == "cuda"
        constants["COMPUTE"] = {"fp16": tl.float16, "bf16": tl.bfloat16}[build.dtype]
    return constants


def _type(name: str, build: Build) -> str:
    """Of a run-time argument, in Triton's words."""
    fixed = {"words": "*i16", "weight": "*i8", "codes": "*i8", "steps": "*fp32", "out": f"*{build.out}"}
    if build.entry == "int8_matmul" and name == "x":
        return "*i8"
    if name == "partials":
        return "*i32" if build.entry == "combine_int8" else "*fp32"
    return fixed.get(name, f"*{build.dtype}" if name in ("x", "scales", "zeros", "bias") else "i32")


def _build(fields: dict[str, Any]) -> Build:
    """From JSON, which has lists for tuples."""
    lists = {name: tuple(fields[name]) for name in ("aligned", "grid")}
    return Build(**{**fields, **lists, "constants": tuple((name, value) for name, value in fields["constants"])})


def main() -> None:
    """Compile the builds on standard input, write results to standard output."""
    builds = [_build(fields) for fields in json.load(sys.stdin)]
    json.dump([compile_here(build) for build in builds], sys.stdout)


if __name__ == "__main__":
    main()
