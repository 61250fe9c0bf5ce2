"""The compiled CPU kernel: `cpu/panels.c`, built when it is first needed and loaded by ctypes.

It is built at first use and not when the package is installed: the wheel stays one for all platforms, an editable
install or a source tree works alike, and the code is made for the processor that runs it. The library, plain C without
a trace of torch's ABI, is kept in the user's cache directory under a hash of source, flags and compiler. Where no
compiler is found, or it fails, the operators go on without it, slower, and `status` says why.

Threads are torch's own: the C code starts none, it calls the ``GOMP_parallel`` that torch has already loaded.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quantforge.errors import UsageError

SOURCE = Path(__file__).parent / "cpu" / "panels.c"
SWITCH = "QUANTFORGE_CPU_KERNEL"
"""Environment variable: a level's name forces it, ``none`` does without; read when the kernel is first needed."""

COMMON = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared", "-pthread")
LEVELS = {
    "avx512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mfma -mf16c -mprefer-vector-width=512".split(),
    "avx2-vnni": "-mavx2 -mfma -mf16c -mavxvnni".split(),
    "avx2": "-mavx2 -mfma -mf16c".split(),
    "portable": [],
}
"""Instruction sets, the best first. Portable is 128-bit vectors as the compiler has them: SSE2, or NEON."""

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SMALL = 1 << 18
"""Products below which waking other threads costs more than they bring."""


class _Struct(ctypes.Structure):
    """``struct matrix`` of `cpu/panels.c`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in "words scales zeros bias parallel".split()),
        *((name, ctypes.c_int64) for name in "bits out_features in_features group_size".split()),
        *((name, ctypes.c_int64) for name in "scale_type x_type integers".split()),
    )


class Sizes(NamedTuple):
    """Of a matrix; `group_size` in whole words."""

    bits: int
    out_features: int
    in_features: int
    group_size: int


class Matrix:
    """A matrix in the layout of `panels`, and what is multiplied by it, as the library is told.

    These are addresses: the tensors, contiguous and on the CPU, must outlive every use. Nothing is checked. `bias` has
    the dtype of x. `integers`: activations are rounded to 8 bits, per group, or per token where a row is one group of
    8-bit codes.
    """

    def __init__(
        self, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, dtype: torch.dtype,
        sizes: Sizes, *, integers: bool = False,
    ) -> None:  # fmt: skip
        self.out_features, self.in_features = sizes.out_features, sizes.in_features
        self.elements = sizes.out_features * sizes.in_features
        addresses = (None if each is None else each.data_ptr() for each in (weight, scales, zeros, bias))
        self._struct = _Struct(*addresses, _pool(), *sizes, TYPES[scales.dtype], TYPES[dtype], integers)
        self.address = ctypes.addressof(self._struct)


@dataclass(frozen=True)
class Status:
    """Which kernel runs: a level's name, or None with the reason."""

    level: str | None
    reason: str
    library: ctypes.CDLL | None = None


@cache
def status() -> Status:
    """Build or find the library for this processor; warns once when there is none.

    UsageError for a level in the environment that is unknown, or that this machine cannot build or run.
    """
    wanted = os.environ.get(SWITCH, "")
    if wanted == "none":
        return Status(None, f"{SWITCH}=none")
    if wanted and wanted not in LEVELS:
        raise UsageError(f"{SWITCH}={wanted!r} is none of {', '.join(LEVELS)}, none")
    reasons = []
    for level in [wanted] if wanted else _candidates():
        try:
            library = load(level)
        except (OSError, subprocess.SubprocessError, RuntimeError) as error:
            reasons.append(f"{level}: {error}")
            continue
        if library.supported():
            return Status(level, "; ".join(reasons), library)
        reasons.append(f"{level}: this processor cannot run it")
    reason = "; ".join(reasons)
    if wanted:
        raise UsageError(f"{SWITCH}={wanted} cannot be had here ({reason}); unset it to take the best level there is")
    warnings.warn(
        f"quantforge: no compiled CPU kernel, packed layers run slowly ({reason}): 4 bits in groups of 32 to 256 by "
        "torch's int4pack, beside bfloat16 activations with scales rounded to bfloat16; others are dequantized at "
        "every call; install a C compiler such as gcc",
        RuntimeWarning,
        stacklevel=2,
    )
    return Status(None, reason)


def _candidates() -> list[str]:
    """Levels worth a try, by what torch says of the processor."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ["portable"]
    capability = torch.backends.cpu.get_cpu_capability()
    skip = {"AVX512": 0, "AVX2": 1}.get(capability, 3)
    return list(LEVELS)[skip:]


@cache
def load(level: str) -> ctypes.CDLL:
    """The library of a level, built unless the cache has it.

    Raises RuntimeError without a compiler, when it fails, or on Windows; OSError when the library cannot be written or
    loaded.
    """
    if os.name != "posix":
        raise RuntimeError(f"built on Linux and macOS only, not on {platform.system()}")
    compiler = next((found for name in _compilers() if (found := shutil.which(name))), None)
    if compiler is None:
        raise RuntimeError(f"no C compiler ({', '.join(_compilers())})")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    flags = [*COMMON, *LEVELS[level]]
    parts = [SOURCE.read_text(encoding="utf-8"), *flags, version, platform.machine()]
    name = f"panels-{level}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:20]}.so"
    folder = _cache_folder()
    if folder is None:
        _say_uncached()
        with tempfile.TemporaryDirectory(prefix="quantforge-") as scratch:
            return _declared(_compiled(compiler, flags, Path(scratch) / name))
    path = folder / name
    if _ours(path):
        try:
            return _declared(path)
        except (OSError, AttributeError):  # damaged: a disk that was full, a machine that stopped
            path.unlink()
    return _declared(_compiled(compiler, flags, path))


def _compilers() -> tuple[str, ...]:
    return tuple(name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name)


def _cache_folder() -> Path | None:
    """A folder that only this user can write to, or None when none can be made."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(root) / "quantforge"
    if not folder.is_absolute():
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder if os.access(folder, os.W_OK) and _ours(folder) else None
    except OSError:
        return None


@cache
def _say_uncached() -> None:
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    warnings.warn(
        f"quantforge: no folder under {root} that this user alone can write to, so the CPU kernel is compiled anew by "
        "each process, which takes seconds; set XDG_CACHE_HOME to a folder of your own",
        RuntimeWarning,
        stacklevel=2,
    )


def _ours(path: Path) -> bool:
    """Whether it exists, belongs to this user like a link to it, and nobody else can write to it: it will be run."""
    try:
        link, found = path.lstat(), path.stat()
    except FileNotFoundError:
        return False
    return link.st_uid == found.st_uid == os.getuid() and not found.st_mode & 0o022


def _compiled(compiler: str, flags: list[str], path: Path) -> Path:
    """Compile to `path`, which appears whole or not at all."""
    with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent) as folder:
        scratch = Path(folder) / path.name
        command = [compiler, *flags, str(SOURCE), "-o", str(scratch), "-lm"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if ran.returncode or not scratch.is_file():
            said = " ".join(ran.stderr.split())[:300] or "it wrote nothing"
            raise RuntimeError(f"{compiler} failed: {said}")
        scratch.chmod(0o700)
        os.replace(scratch, path)
    return path


def _declared(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.linear.argtypes = [pointer, pointer, pointer, number, number]
    library.transposed.argtypes = [pointer, pointer, number, number, number]
    library.transposed.restype = None
    return library


@cache
def _pool() -> int | None:
    """The address of GOMP_parallel of the OpenMP runtime in this process; None: threads are started for each call."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):
        return None


@cache
def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for products of bfloat16, which torch then uses."""
    names = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")  # of torch.cpu, in the versions that have them
    return any(getattr(torch.cpu, name, bool)() for name in names)


def linear(library: ctypes.CDLL, matrix: Matrix, x: Tensor) -> Tensor:
    """``x @ w.T + bias`` [..., out] for contiguous x [..., in] of the matrix's dtype."""
    shape = list(x.shape)
    shape[-1] = matrix.out_features
    y = x.new_empty(shape)
    tokens = x.numel() // matrix.in_features
    threads = torch.get_num_threads() if tokens * matrix.elements >= SMALL else 1
    if library.linear(matrix.address, x.data_ptr(), y.data_ptr(), tokens, threads):
        raise MemoryError(f"no memory to multiply {tokens} tokens of {matrix.in_features} values")
    return y


def transpose_into(y: Tensor, library: ctypes.CDLL, matrix: Matrix, *, column: int) -> None:
    """Fill contiguous y [in, width], of the matrix's dtype, with columns of the transposed weight, from `column`, a
    multiple of 16, on."""
    threads = torch.get_num_threads() if y.numel() >= SMALL else 1
    library.transposed(matrix.address, y.data_ptr(), column, y.shape[1], threads)
