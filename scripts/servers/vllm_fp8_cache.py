"""How vLLM on a CPU makes numbers FP8 for its cache: its own kernels on random keys and values, against float64.

    VLLM_PLUGINS=none .servers/vllm/bin/python scripts/servers/vllm_fp8_cache.py

Runs in vLLM's environment, without this package. Prints, for each kernel, how many bytes of the cache differ from
those of keys and values cut off towards zero and rounded to nearest, and the attention's relative error against
float64 attention on either, as lines of a Markdown table.
"""

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

HEADS, KEY_HEADS, WIDTH, LENGTH, BLOCK = 9, 3, 64, 48, 128
LARGEST = 448.0
"""Of E4M3."""


def rounded(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float8_e4m3fn).float()


def cut_off(values: torch.Tensor) -> torch.Tensor:
    """To E4M3 towards zero: 3 bits behind the first, exponents down to -6."""
    exponent = (torch.frexp(values).exponent - 1).clamp(min=-6)
    step = torch.exp2(exponent - 3.0)
    return (values / step).trunc() * step


def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal, in float64; [length, heads, width]."""
    keys, values = (x.double().repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * WIDTH**-0.5
    scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def served(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, isa: str, scales: dict[str, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels' output and the cache's first block; in FP8 with `scales`, as it is without."""
    dtype = torch.uint8 if scales else query.dtype
    kind = {"kv_cache_dtype": "fp8_e4m3" if scales else "auto"}
    cache = torch.zeros(2, KEY_HEADS, 2 * BLOCK, WIDTH, dtype=dtype)
    parts = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, *parts, torch.arange(LENGTH), isa, **scales, **kind)
    starts, lengths = torch.tensor([0, LENGTH], dtype=torch.int32), torch.tensor([LENGTH], dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        1, HEADS, KEY_HEADS, WIDTH, lengths, query.dtype, starts, True, -1, isa, True, **kind
    )
    output = torch.zeros_like(query)
    blocks = torch.tensor([[0, 1]], dtype=torch.int32)
    ops.cpu_attention_with_kv_cache(
        query, *parts, output, starts, lengths, WIDTH**-0.5, True, None, -1, blocks, 0.0, plan, None, **scales, **kind
    )
    return output, cache[0]


def differing(cache: torch.Tensor, numbers: torch.Tensor) -> int:
    """Bytes that are in the cache more often than among `numbers`; the kernel has an order of its own."""
    wanted = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
    counts = [torch.bincount(each.flatten().long(), minlength=256)[1:] for each in (cache, wanted)]
    return int((counts[0] - counts[1]).clamp(min=0).sum())


def main() -> None:
    current_platform.import_kernels()
    torch.manual_seed(0)
    for isa, dtype in (("vec", torch.float16), ("amx", torch.bfloat16)):
        query = torch.randn(LENGTH, HEADS, WIDTH).to(dtype)
        keys, values = (torch.randn(LENGTH, KEY_HEADS, WIDTH).to(dtype) for _ in range(2))
        scales = {"k_scale": float(keys.abs().max()) / LARGEST, "v_scale": float(values.abs().max()) / LARGEST}
        exact = attention(query, keys, values)

        def error(output: torch.Tensor, reference: torch.Tensor = exact) -> str:
            return f"{float((output.double() - reference).norm() / reference.norm()):.4f}"

        output, cache = served(query, keys, values, isa, scales)
        scaled = [keys.float() / scales["k_scale"], values.float() / scales["v_scale"]]
        found = {}
        for way in (cut_off, rounded):
            codes = [way(x) for x in scaled]
            differ = differing(cache[:, :BLOCK], codes[0]) + differing(cache[:, BLOCK:], codes[1])
            reference = attention(query, codes[0] * scales["k_scale"], codes[1] * scales["v_scale"])
            found[way] = (f"{error(output, reference)} ({differ} of {2 * keys.numel()} bytes differ)", reference)
        cells = [error(served(query, keys, values, isa, {})[0]), found[cut_off][0], found[rounded][0], error(output)]
        print(f"| {isa}, {str(dtype)[6:]} |", " | ".join([*cells, error(found[rounded][1])]), "|", flush=True)


if __name__ == "__main__":
    main()
