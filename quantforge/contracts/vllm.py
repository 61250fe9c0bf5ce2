"""vLLM on NVIDIA GPUs, read in the sources of 0.32.0; paths are below ``vllm/model_executor/`` unless they say more."""

from collections.abc import Iterator

from quantforge.contracts import Contract, Problem, Subject, Verdict
from quantforge.contracts._rules import (
    EMBEDDINGS,
    FP8,
    HEADS,
    CacheScheme,
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

VERSION = "vLLM 0.32.0"
QUANTIZATION = "layers/quantization"
GROUPS = (None, 32, 64, 128)
"""``MARLIN_SUPPORTED_GROUP_SIZES``; None is -1, one scale per row."""

MARLIN_TYPES = {(4, True), (8, True), (4, False)}
MACHETE_TYPES = {*MARLIN_TYPES, (8, False)}


def source(file: str, symbol: str) -> str:
    return f"{VERSION}, {file}, {symbol}"


TYPES = source(f"{QUANTIZATION}/auto_gptq.py", "AutoGPTQConfig.TYPE_MAP")
KERNELS = source("kernels/linear/__init__.py", "choose_mp_linear_kernel")
MARLIN = source(f"{QUANTIZATION}/utils/marlin_utils.py", "_check_marlin_supported")
SPLIT = source("layers/linear.py", "QKVParallelLinear and distributed/utils.py, divide")


def check(subject: Subject) -> Verdict:
    """What vLLM does with a checkpoint."""
    found = matrices(subject)
    problems = [*common_problems(subject, found)]
    method = subject.quant_method
    kernels: set[str] = set()
    notes = [*tied_head_notes(subject), *cast_scale_notes(subject)]
    if method is None:
        kernels = {"unquantized"}
    elif method in ("gptq", "auto-round"):
        problems += gptq_problems(subject, found)
        kernels = _mixed_precision(found, problems, notes)
    elif method == "awq":
        problems += awq_problems(subject, found)
        kernels = _awq_kernels(subject, found, problems, notes)
    elif method == "compressed-tensors":
        problems += compressed_tensors_problems(subject, found)
        integer = [m for m in found if m.grid.variant != "pack-quantized"]
        packed = [m for m in found if m.grid.variant == "pack-quantized"]
        kernels = ({"CUTLASS INT8"} if integer else set()) | _mixed_precision(packed, problems, notes)
        notes += [*ignored_activations(packed), *_cache_notes(subject)]
    else:
        problems.append(unknown_method(method))
    return Verdict("vllm", None if problems else ", ".join(sorted(kernels)), tuple(problems), tuple(notes))


def ignored_activations(packed: list[Matrix]) -> Iterator[str]:
    """Packed weights with quantized activations (W4A8): computed as if activations were not quantized."""
    if with_inputs := [m for m in packed if m.grid.activation_bits is not None]:
        yield (
            f"the quantization of activations is ignored beside packed weights: {listed(with_inputs)} (measured on the "
            "CPU build; on GPUs the optional Humming kernel may use it)"
        )


def unknown_method(method: str) -> Problem:
    return Problem(
        f"quant_method {method} is not one it knows; --format compressed-tensors and gptq are",
        source(f"{QUANTIZATION}/__init__.py", "QUANTIZATION_METHODS"),
    )


def common_problems(subject: Subject, found: list[Matrix]) -> Iterator[Problem]:
    """Rules of every method: config, splits over devices, fused matrices, experts, tied embeddings."""
    if settings_of(subject) and "quant_method" not in settings_of(subject):
        yield Problem(
            "quantization_config names no quant_method; add the one the tensors are in",
            f"{VERSION}, vllm/config/model.py, ModelConfig._verify_quantization",
        )
    yield from uneven_split(subject, found, SPLIT)
    fused = {
        "compressed-tensors": source(f"{QUANTIZATION}/compressed_tensors/utils.py", "should_ignore_layer"),
        "awq": source(f"{QUANTIZATION}/utils/quant_utils.py", "is_layer_skipped"),
    }
    default = source(f"{QUANTIZATION}/utils/gptq_utils.py", "is_layer_gptq_quantized")
    yield from unequal_parts(subject, fused.get(str(subject.quant_method), default))
    experts = source(f"{QUANTIZATION}/compressed_tensors/compressed_tensors_moe", "get_moe_method")
    yield from unequal_experts(subject, experts)
    if subject.quant_method in ("gptq", "awq", "auto-round"):
        yield from packed_outer(
            subject, EMBEDDINGS, source(f"{QUANTIZATION}/auto_gptq.py", "AutoGPTQConfig.get_quant_method")
        )
        if settings_of(subject).get("lm_head") is not True:
            where = source(f"{QUANTIZATION}/utils/gptq_utils.py", "get_linear_quant_method, parallel_lm_head_quantized")
            yield from packed_outer(subject, HEADS, where)


# ------------------------------------------------------------------------------------------------ formats


def gptq_problems(
    subject: Subject, found: list[Matrix], types: frozenset[int] = frozenset((4, 8))
) -> Iterator[Problem]:
    """GPTQ of either version; with symmetric grids the zeros in the file are not looked at."""
    yield from refusals(
        found,
        lambda m: not m.grid.symmetric or m.grid.bits not in types,
        f"gptq is taken symmetric with {' or '.join(map(str, sorted(types)))} bits only; "
        "--format compressed-tensors holds asymmetric 4-bit grids",
        TYPES,
    )
    yield from refusals(found, lambda m: m.grid.group_size not in GROUPS, "group sizes are 32, 64, 128 or -1", MARLIN)
    yield from gptq_file_problems(subject, found)


def gptq_file_problems(subject: Subject, found: list[Matrix]) -> Iterator[Problem]:
    """What is asked of the config and of shapes, whatever the grid."""
    if subject.quant_method == "gptq":
        keys = source(f"{QUANTIZATION}/auto_gptq.py", "AutoGPTQConfig.from_config")
        yield from missing_keys(subject, [("bits",), ("group_size",), ("desc_act",), ("sym",)], keys)
    yield from refusals(
        found,
        lambda m: m.grid.act_order and m.grid.group_size is not None,
        "desc_act (g_idx) is no longer taken with groups; solve with static groups and desc_act false",
        source(f"{QUANTIZATION}/utils/gptq_utils.py", "normalize_and_validate_gptq_desc_act"),
    )
    yield from straddling(found, source("parameter.py", "_ColumnvLLMParameter.load_merged_column_weight"))
    yield from _ragged_zeros(found, source(f"{QUANTIZATION}/auto_gptq.py", "AutoGPTQLinearMethod.create_weights"))


def awq_problems(subject: Subject, found: list[Matrix]) -> Iterator[Problem]:
    """AWQ: four bits, symmetric or not."""
    needed = [("bits", "w_bit"), ("group_size", "q_group_size"), ("zero_point",)]
    yield from missing_keys(subject, needed, source(f"{QUANTIZATION}/auto_awq.py", "AutoAWQConfig.from_config"))
    types = source(f"{QUANTIZATION}/auto_awq.py", "AutoAWQConfig.TYPE_MAP")
    yield from refusals(found, lambda m: m.grid.bits != 4, "awq is taken with 4 bits only", types)
    rows = source(f"{QUANTIZATION}/auto_awq.py", "AutoAWQLinearMethod.create_weights")
    yield from straddling(found, rows)
    yield from _ragged_zeros(found, rows)


def compressed_tensors_problems(subject: Subject, found: list[Matrix]) -> Iterator[Problem]:
    """compressed-tensors: packed weights of any width it has a kernel for, or INT8 weights with INT8 activations."""
    scheme = f"{QUANTIZATION}/compressed_tensors/compressed_tensors.py"
    yield from missing_keys(subject, [("config_groups",)], source(scheme, "CompressedTensorsConfig.from_config"))
    yield from refusals(
        found,
        lambda m: m.grid.act_order,
        "actorder group (weight_g_idx) is no longer taken; use actorder static or none",
        source(scheme, "CompressedTensorsConfig._quantization_scheme_map_from_config"),
    )
    integer = [m for m in found if m.grid.variant != "pack-quantized"]
    yield from refusals(
        integer,
        lambda m: m.grid.activation_bits is None,
        "INT8 weights that are not packed (int-quantized) need quantized activations; --activation-bits 8, or pack",
        source(scheme, "CompressedTensorsConfig._quantization_scheme_map_from_config"),
    )
    yield from refusals(
        integer,
        lambda m: m.grid.bits != 8 or not m.grid.symmetric or m.grid.group_size is not None,
        "int-quantized weights are taken with 8 bits, symmetric, one scale per row",
        source(scheme, "CompressedTensorsConfig._is_dynamic_token_w8a8"),
    )
    yield from _cache_problems(subject)
    packed = [m for m in found if m.grid.variant == "pack-quantized"]
    divides = f"{VERSION}, vllm/distributed/utils.py, verify_group_size_divides_partition"
    yield from straddling(packed, divides)


def _cache_problems(subject: Subject) -> Iterator[Problem]:
    cache = cache_scheme(subject)
    if cache is not None and not (cache.is_fp8 and cache.strategy in ("tensor", "attn_head")):
        yield Problem(
            f"kv_cache_scheme is taken as {FP8}, per tensor or attn_head only, and not as {cache.label()}, whatever "
            "--kv-cache-dtype says; make the export with --kv-cache fp8 or none",
            source(
                f"{QUANTIZATION}/compressed_tensors/compressed_tensors.py",
                "CompressedTensorsKVCacheMethod.validate_kv_cache_scheme",
            ),
        )


def _cache_notes(subject: Subject) -> Iterator[str]:
    """``layers/attention/attention.py``, `Attention`; ``v1/attention/backends/flash_attn.py``."""
    if (cache := cache_scheme(subject)) is None:
        return
    yield (
        f"keys and values are cached in FP8, {cache_source(cache)}, unless --kv-cache-dtype says otherwise; where "
        "attention computes in FP8, queries are rounded too, with a scale of 1"
    )
    if cache.strategy == "attn_head":
        yield "scales per head need FlashAttention 3 or newer (--attention-backend FLASH_ATTN on Hopper)"


def cache_source(cache: CacheScheme) -> str:
    """Where scales come from; none are computed while it runs."""
    return "with scales of 1, since dynamic ones are not computed" if cache.dynamic else "with the scales in the file"


def _ragged_zeros(found: list[Matrix], where: str) -> Iterator[Problem]:
    yield from refusals(
        found,
        lambda m: m.out_local % (32 // m.grid.bits) != 0,
        "the outputs on each device must fill whole 32-bit words of zeros",
        where,
    )


# ------------------------------------------------------------------------------------------------ kernels


def _machete(m: Matrix) -> bool:
    """``kernels/linear/mixed_precision/machete.py``: Hopper only."""
    fits = m.in_local % 64 == 0 and m.out_local % 128 == 0
    return fits and (m.grid.bits, m.grid.symmetric) in MACHETE_TYPES and m.grid.group_size in (None, 64, 128)


def _marlin(m: Matrix) -> bool:
    """``kernels/linear/mixed_precision/marlin.py``."""
    return (m.grid.bits, m.grid.symmetric) in MARLIN_TYPES and m.grid.group_size in GROUPS and m.groups_fit


def _padded(m: Matrix) -> bool:
    """Whether Marlin pads the matrix, and its inputs or outputs at every forward (``marlin_padded_nk``)."""
    return not any(m.out_local % n == 0 and m.in_local % k == 0 for n, k in ((64, 128), (128, 64)))


def _triton(m: Matrix) -> bool:
    """``kernels/linear/mixed_precision/triton_w4a16.py``."""
    groups = m.grid.group_size in (*GROUPS, 256) or m.grid.group_size == m.in_features
    return m.grid.bits == 4 and m.out_local % 8 == 0 and groups and m.groups_fit


def _exllama(m: Matrix) -> bool:
    """``kernels/linear/mixed_precision/exllama.py``: float16 activations only."""
    words = m.out_local % (32 // m.grid.bits) == 0
    return m.grid.symmetric and m.grid.bits in (4, 8) and m.grid.group_size is not None and m.groups_fit and words


def _mixed_precision(found: list[Matrix], problems: list[Problem], notes: list[str]) -> set[str]:
    """The kernels `choose_mp_linear_kernel` takes, of those that come with vLLM; adds problems and notes."""
    if problems:  # said already, in the words of the rule that comes first
        return set()
    kernels: set[str] = set()
    for m in found:
        if _marlin(m):
            kernels.add("Marlin")
        elif _triton(m):
            kernels.add("TritonW4A16")
        elif _machete(m):
            kernels.add("Machete")
        elif _exllama(m):
            kernels.add("Exllama")
    without = [m for m in found if not (_machete(m) or _marlin(m) or _exllama(m) or _triton(m))]
    if without:
        text = (
            "no kernel that comes with it takes these (Marlin: 4 or 8 bits symmetric, 4 asymmetric, group 32, 64, 128 "
            "or -1; Machete, on Hopper: 8 asymmetric too, inputs in 64s and outputs in 128s)"
        )
        problems.append(Problem(f"{text}: {listed(without)}", KERNELS))
    if padded := [m for m in found if _marlin(m) and _padded(m)]:
        notes.append(f"slower: Marlin pads shapes that are no multiple of 64 x 128 at every forward: {listed(padded)}")
    if "Machete" in kernels:
        notes.append("8-bit asymmetric grids have a kernel on Hopper (compute capability 9.0) only: Machete")
    elif found and all(map(_machete, found)) and kernels == {"Marlin"}:
        notes.append("on Hopper: Machete")
    if "Exllama" in kernels:
        notes.append("slow: Exllama, which needs --dtype float16")
    return kernels


def _awq_kernels(subject: Subject, found: list[Matrix], problems: list[Problem], notes: list[str]) -> set[str]:
    """Marlin where it can, else AWQ's own GEMM (``auto_awq.py``, ``AutoAWQConfig.get_quant_method``)."""
    if problems:
        return set()
    zeros = settings_of(subject).get("zero_point") is True  # without, no type of Marlin's matches
    slow = [m for m in found if not zeros or m.grid.group_size not in GROUPS]
    if slow:
        notes.append(f"slow: AWQ's own GEMM instead of Marlin: {listed(slow)}")
    return {"AWQ GEMM"} if slow else _mixed_precision(found, problems, notes)


CONTRACT = Contract(
    name="vllm",
    summary="vLLM on NVIDIA GPUs",
    versions="0.32.0, read in its source; not run",
    tried=False,
    check=check,
)
