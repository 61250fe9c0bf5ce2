"""SGLang on NVIDIA GPUs, read in the sources of 0.5.23; paths are below ``sglang/srt/layers/quantization/``."""

from collections.abc import Iterator

from quantforge.contracts import Contract, Problem, Subject, Verdict
from quantforge.contracts._rules import (
    EMBEDDINGS,
    HEADS,
    Matrix,
    cache_scheme,
    cast_scale_notes,
    listed,
    matrices,
    missing_keys,
    packed_outer,
    refusals,
    settings_of,
    straddling,
    tied_head_notes,
    unequal_experts,
    unequal_parts,
    uneven_split,
)

VERSION = "SGLang 0.5.23"
GROUPS = (None, 32, 64, 128)
"""``MARLIN_SUPPORTED_GROUP_SIZES``; None is -1."""

FLOAT16 = "slow: AWQ's own kernel instead of Marlin, in float16 only (--dtype float16)"


def source(file: str, symbol: str) -> str:
    return f"{VERSION}, {file}, {symbol}"


REMOVED = source("gptq/schemes/gptq_linear.py", "GPTQLinearScheme._init_kernel (the kernel without Marlin is removed)")
TILES = f"{VERSION}, sglang/kernels/jit/csrc/gemm/marlin/gptq_marlin.cuh, size_n and prob_k checks"
KERNELS = f"{VERSION}, sglang/kernels/jit/csrc/gemm/marlin/gptq_marlin.cuh, COMMON_GET_IF"


def check(subject: Subject) -> Verdict:
    """What SGLang does with a checkpoint."""
    found = matrices(subject)
    problems = [*_common_problems(subject, found)]
    notes = [*tied_head_notes(subject), *cast_scale_notes(subject)]
    kernel = "unquantized"
    match subject.quant_method:
        case None:
            pass
        case "gptq" | "auto-round":
            problems += _gptq_problems(subject, found)
            kernel = "Marlin"
        case "awq":
            problems += _awq_problems(subject, found)
            slow = [m for m in found if m.out_local % 64 or m.in_local % 128 or m.grid.group_size not in GROUPS]
            slow = slow if settings_of(subject).get("zero_point") is True else found
            kernel = "AWQ" if len(slow) == len(found) else "Marlin, AWQ" if slow else "Marlin"
            notes += [f"{FLOAT16}: {listed(slow)}"] if slow else []
        case "compressed-tensors":
            problems += _compressed_tensors_problems(subject, found)
            packed = [m for m in found if m.grid.variant == "pack-quantized"]
            notes += _cache_notes(subject)
            kernel = ", ".join(["Marlin"] * bool(packed) + ["CUTLASS INT8"] * (len(packed) < len(found)))
        case "gguf":
            kernel = "GGUF"
            notes.append("not looked into: its GGUF loader takes a file, with --load-format gguf")
        case method:
            problems.append(
                Problem(
                    f"quant_method {method} is not checked here; --format compressed-tensors and gptq are read",
                    source("__init__.py", "BASE_QUANTIZATION_METHODS"),
                )
            )
    return Verdict("sglang", None if problems else kernel, tuple(problems), () if problems else tuple(notes))


def _cache_notes(subject: Subject) -> Iterator[str]:
    """``compressed_tensors/compressed_tensors.py``, `CompressedTensorsKVCacheMethod.is_supported_scheme`."""
    if (cache := cache_scheme(subject)) is None:
        return
    if cache.is_fp8 and cache.strategy == "tensor" and not cache.dynamic:
        yield "keys and values are cached in FP8 with the scales in the file, unless --kv-cache-dtype says otherwise"
    else:
        yield f"kv_cache_scheme is ignored ({cache.label()}): scales are taken for FP8, per tensor, static only"


def _common_problems(subject: Subject, found: list[Matrix]) -> Iterator[Problem]:
    yield from uneven_split(subject, found, f"{VERSION}, sglang/srt/layers/linear.py, QKVParallelLinear")
    fused = source("compressed_tensors/utils.py", "should_ignore_layer")
    yield from unequal_parts(
        subject,
        fused if subject.quant_method == "compressed-tensors" else source("utils.py", "get_linear_quant_method"),
    )
    yield from unequal_experts(subject, source("compressed_tensors/compressed_tensors.py", "get_moe_scheme"))
    if subject.quant_method in ("gptq", "awq", "auto-round"):
        where = source("utils.py", "get_linear_quant_method")
        yield from packed_outer(subject, EMBEDDINGS, where)
        if settings_of(subject).get("lm_head") is not True:
            yield from packed_outer(subject, HEADS, where)


def _tiles(m: Matrix) -> bool:
    """Marlin's thread tiles: outputs in 64s with inputs in 128s, or the other way round."""
    return any(m.out_local % n == 0 and m.in_local % k == 0 for n, k in ((64, 128), (128, 64)))


def _tile_problems(found: list[Matrix]) -> Iterator[Problem]:
    text = "Marlin takes outputs in 64s with inputs in 128s, or outputs in 128s with inputs in 64s, on each device"
    yield from refusals(found, lambda m: not _tiles(m), text, TILES)


def _gptq_problems(subject: Subject, found: list[Matrix]) -> Iterator[Problem]:
    """Only what Marlin takes: the plain kernel has been removed."""
    if subject.quant_method == "gptq":
        keys = source("gptq/gptq.py", "GPTQMarlinConfig.is_gptq_marlin_compatible")
        yield from missing_keys(subject, [("bits",), ("group_size",), ("desc_act",), ("sym",)], keys)
    yield from refusals(
        found,
        lambda m: not m.grid.symmetric or m.grid.bits not in (4, 8),
        "gptq is taken symmetric with 4 or 8 bits only; --format compressed-tensors holds asymmetric 4-bit grids",
        REMOVED,
    )
    yield from refusals(found, lambda m: m.grid.group_size not in GROUPS, "group sizes are 32, 64, 128 or -1", REMOVED)
    yield from straddling(found, source("gptq/schemes/gptq_marlin.py", "GPTQMarlinLinearScheme.create_weights"))
    yield from _tile_problems(found)


def _awq_problems(subject: Subject, found: list[Matrix]) -> Iterator[Problem]:
    needed = [("bits", "w_bit"), ("group_size", "q_group_size"), ("zero_point",)]
    yield from missing_keys(subject, needed, source("awq/awq.py", "AWQConfig.from_config"))
    yield from refusals(
        found, lambda m: m.grid.bits != 4, "awq is taken with 4 bits only", source("awq/awq.py", "AWQConfig.__init__")
    )
    rows = source("awq/schemes/awq_linear.py", "AWQLinearScheme.create_weights")
    yield from straddling(found, rows)
    yield from refusals(found, lambda m: m.out_local % 8 != 0, "outputs on each device must come in 8s", rows)


def _compressed_tensors_problems(subject: Subject, found: list[Matrix]) -> Iterator[Problem]:
    yield from missing_keys(
        subject, [("config_groups",)], source("compressed_tensors/compressed_tensors.py", "from_config")
    )
    scheme = source("compressed_tensors/schemes/compressed_tensors_wNa16.py", "CompressedTensorsWNA16")
    packed = [m for m in found if m.grid.variant == "pack-quantized"]
    integer = [m for m in found if m.grid.variant != "pack-quantized"]
    yield from refusals(
        packed, lambda m: m.grid.bits not in (4, 8), "packed weights are taken with 4 or 8 bits", scheme
    )
    yield from refusals(
        packed,
        lambda m: m.grid.bits == 8 and not m.grid.symmetric,
        "there is no kernel for 8-bit asymmetric grids",
        KERNELS,
    )
    yield from refusals(
        packed, lambda m: m.grid.group_size not in GROUPS, "group sizes are 32, 64, 128 or -1",
        source("marlin_utils.py", "MARLIN_SUPPORTED_GROUP_SIZES"),
    )  # fmt: skip
    yield from straddling(packed, scheme)
    yield from _tile_problems(packed)
    yield from refusals(
        packed,
        lambda m: m.grid.activation_bits is not None,
        "packed weights are taken without quantized activations",
        source("compressed_tensors/compressed_tensors.py", "_get_scheme_from_parts"),
    )
    yield from refusals(
        integer,
        lambda m: (
            m.grid.bits != 8 or not m.grid.symmetric or m.grid.group_size is not None or not m.grid.activation_bits
        ),
        "int-quantized weights are taken with 8 bits, symmetric, one scale per row, and quantized activations",
        source("compressed_tensors/compressed_tensors.py", "_is_dynamic_token_w8a8"),
    )


CONTRACT = Contract(
    name="sglang",
    summary="SGLang on NVIDIA GPUs",
    versions="0.5.23, read in its source; not run",
    tried=False,
    check=check,
)
