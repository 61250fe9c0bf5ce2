"""text-generation-inference on NVIDIA GPUs, read at 3.3.7; paths are below ``server/text_generation_server/``."""

from collections.abc import Iterator

from quantforge.contracts import Contract, Problem, Subject, Verdict
from quantforge.contracts._rules import (
    EMBEDDINGS,
    HEADS,
    Matrix,
    cache_scheme,
    grids_of,
    kept_inside,
    matrices,
    missing_keys,
    names_listed,
    packed_outer,
    refusals,
    settings_of,
    straddling,
    unequal_parts,
    uneven_split,
)

VERSION = "text-generation-inference 3.3.7"
GROUPS = (None, 32, 64, 128)
"""``GPTQ_MARLIN_GROUP_SIZES``; None is -1."""


def source(file: str, symbol: str) -> str:
    return f"{VERSION}, {file}, {symbol}"


MARLIN = source("layers/marlin/gptq.py", "can_use_gptq_marlin")
CONFIG = source("utils/quantization.py", "_get_quantizer_config")
PACKED = source("layers/compressed_tensors/wna16_int.py", "WNA16IntLoader.get_multi_weights_col")


def check(subject: Subject) -> Verdict:
    """What TGI does with a checkpoint."""
    found = matrices(subject)
    problems: list[Problem] = []
    kernel = "unquantized"
    notes: list[str] = []
    problems += uneven_split(subject, found, source("utils/weights.py", "Weights.get_sharded"))
    if subject.sites:
        problems += unequal_parts(subject, source("layers/gptq/__init__.py", "GPTQWeightsLoader.get_multi_weights_col"))
        heads = (*EMBEDDINGS, *HEADS)
        problems += packed_outer(subject, heads, source("layers/tensor_parallel.py", "TensorParallelHead.load"))
        if "quantization_config" not in subject.config:
            problems.append(Problem("quantization_config must stand at the top of config.json", CONFIG))
    match subject.quant_method:
        case None:
            pass
        case "gptq" | "awq":
            fast = all(map(_marlin, found))
            problems += _int_problems(subject, found, fast)
            bits = {m.grid.bits for m in found}
            slow = "AWQ" if subject.quant_method == "awq" else "Exllama" if bits == {4} else "Triton"
            kernel = "Marlin" if fast else slow
            notes += (
                [] if fast else [f"slower: {slow} instead of Marlin (4 or 8 bits, symmetric, group 32, 64, 128, -1)"]
            )
        case "compressed-tensors":
            problems += _compressed_tensors_problems(subject, found)
            _cache(subject, problems, notes)
            kernel = "Marlin" if any(m.grid.variant == "pack-quantized" for m in found) else "CUTLASS INT8"
        case "gguf":
            problems.append(
                Problem(
                    "GGUF is read by its llama.cpp backend only, see llama-cpp",
                    source("utils/quantization.py", "get_loader"),
                )
            )
        case method:
            problems.append(
                Problem(f"quant_method {method} is not one it knows", source("models/__init__.py", "get_model"))
            )
    return Verdict("tgi", None if problems else kernel, tuple(problems), () if problems else tuple(notes))


def _cache(subject: Subject, problems: list[Problem], notes: list[str]) -> None:
    """``k_scale`` and ``v_scale`` are looked for by name; kv_cache_scheme is not looked at."""
    if (cache := cache_scheme(subject)) is None:
        return
    where = source("layers/attention/kv_cache.py", "KVScales.__post_init__")
    if cache.strategy == "attn_head":
        problems.append(Problem("scales of the cache per head are not taken; --kv-cache fp8 has one a layer", where))
    elif not cache.is_fp8:
        notes.append(f"scales of the cache are not used: it has no such cache ({cache.grid})")
    else:
        notes.append("scales of the cache are used with --kv-cache-dtype fp8_e4m3fn, and else ignored")


def _marlin(m: Matrix) -> bool:
    symmetric = m.grid.symmetric or m.grid.variant == "gemm"
    return m.grid.bits in (4, 8) and m.grid.group_size in GROUPS and symmetric


def _int_problems(subject: Subject, found: list[Matrix], fast: bool) -> Iterator[Problem]:
    """GPTQ and AWQ. One grid for all, and no list of layers that are not quantized."""
    yield from missing_keys(subject, [("bits", "w_bit"), ("group_size", "q_group_size")], CONFIG)
    if len(grids := grids_of(subject)) > 1:
        yield Problem(
            f"one grid is read for all layers (no dynamic rules), and there are: {'; '.join(sorted(grids))}", CONFIG
        )
    left = settings_of(subject).get("modules_to_not_convert")
    if (kept := kept_inside(subject)) and (fast or not left):
        yield Problem(
            f"all linear layers are taken for quantized, and these are not: {names_listed(kept)}",
            source("layers/marlin/gptq.py", "GPTQMarlinWeightsLoader") if fast else CONFIG,
        )
    yield from straddling(found, source("layers/marlin/gptq.py", "repack_gptq_for_marlin"))
    if fast:
        return
    if subject.quant_method == "awq":
        only = source("layers/awq/quantize/cuda.py", "WQLinear")
        yield from refusals(found, lambda m: m.grid.bits != 4, "awq is taken with 4 bits only", only)
        return
    triton = source("layers/gptq/triton.py", "QuantLinear")
    yield from refusals(found, lambda m: m.grid.bits not in (2, 4, 8), "gptq is taken with 2, 4 or 8 bits", triton)
    yield from refusals(
        found,
        lambda m: m.grid.variant == "gptq_v2" and not _marlin(m),
        "checkpoint_format gptq_v2 is not looked at: zeros are read as version 1, one too high",
        source("layers/gptq/triton.py", "matmul_248_kernel"),
    )


def _compressed_tensors_problems(subject: Subject, found: list[Matrix]) -> Iterator[Problem]:
    loader = source("layers/compressed_tensors/loader.py", "CompressedTensorsLoader._create_loader_for_group")
    yield from missing_keys(subject, [("config_groups",)], loader)
    packed = [m for m in found if m.grid.variant == "pack-quantized"]
    integer = [m for m in found if m.grid.variant != "pack-quantized"]
    yield from refusals(
        packed, lambda m: m.grid.bits not in (4, 8), "packed weights are taken with 4 or 8 bits", loader
    )
    yield from refusals(
        packed, lambda m: m.grid.group_size not in GROUPS, "group sizes are 32, 64, 128 or -1",
        source("layers/marlin/gptq.py", "repack_gptq_for_marlin"),
    )  # fmt: skip
    yield from refusals(
        packed,
        lambda m: not m.grid.symmetric,
        "zero points of fused layers are looked for under a name (qzeros) that the format has not; use --sym",
        PACKED,
    )
    yield from refusals(
        packed, lambda m: m.grid.act_order, "g_idx is looked for under a name that the format has not", PACKED
    )
    yield from straddling(packed, source("layers/marlin/gptq.py", "repack_gptq_for_marlin"))
    yield from refusals(
        integer,
        lambda m: m.grid.bits != 8 or not m.grid.symmetric,
        "int-quantized weights are taken with 8 bits, symmetric",
        source("layers/compressed_tensors/w8a8_int.py", "W8A8IntLoader.__init__"),
    )


CONTRACT = Contract(
    name="tgi",
    summary="text-generation-inference on NVIDIA GPUs",
    versions="3.3.7, read in its source; not run",
    tried=False,
    check=check,
)
