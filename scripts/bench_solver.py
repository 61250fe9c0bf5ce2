"""Time the solver's three parts against plain code: ``python scripts/bench_solver.py --threads 2``.

Prints the least of several runs in milliseconds. The reference is GPTQ as the paper writes it (arXiv 2210.17323).
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from quantforge.methods import WeightProblem, gptq
from quantforge.numerics.gram import GramAccumulator
from quantforge.numerics.grid import minmax_grid
from quantforge.spec import QuantSpec


def textbook_factor(gram: Tensor, damping: float) -> Tensor:
    """U, the upper Cholesky factor of the damped gram's inverse."""
    damped = gram + damping * gram.diagonal().mean() * torch.eye(len(gram))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return upper


def textbook_columns(weight: Tensor, upper: Tensor, scale: Tensor, zero: Tensor, spec: QuantSpec) -> Tensor:
    """Columns in order, the error of each pushed to those behind it, blocks of 128."""
    group = weight.shape[1] // scale.shape[1]
    scale, zero = scale.float().repeat_interleave(group, 1), zero.float().repeat_interleave(group, 1)
    rest, codes = weight.clone(), torch.empty_like(weight)
    for start in range(0, weight.shape[1], 128):
        stop = min(start + 128, weight.shape[1])
        block, factor = rest[:, start:stop].clone(), upper[start:stop, start:stop]
        errors = torch.zeros_like(block)
        for j in range(stop - start):
            s, z = scale[:, start + j], zero[:, start + j]
            code = torch.clamp(torch.round(block[:, j] / s) + z, 0, spec.code_max)
            error = (block[:, j] - (code - z) * s) / factor[j, j]
            block[:, j:] -= error.unsqueeze(1) @ factor[j, j:].unsqueeze(0)
            codes[:, start + j], errors[:, j] = code, error
        rest[:, stop:] -= errors @ upper[start:stop, stop:]
    return codes.to(torch.uint8)


def fastest(runs: int, *functions: Callable[[], object]) -> list[float]:
    """Least milliseconds of each function, their runs interleaved so that noise hits all alike."""
    best = [float("inf")] * len(functions)
    for _ in range(runs):
        for i, function in enumerate(functions):
            began = time.perf_counter()
            function()
            best[i] = min(best[i], 1000 * (time.perf_counter() - began))
    return best


def row(name: str, times: list[float]) -> None:
    ours, plain = times
    print(f"  {name:<14}{ours:9.1f} ms   plain {plain:9.1f} ms   x{plain / ours:.2f}", flush=True)


def accumulate(x: Tensor) -> Tensor:
    accumulator = GramAccumulator(x.shape[1], "bench")
    accumulator.add(x)
    return accumulator.mean()


def bench(out_features: int, in_features: int, tokens: int, runs: int, block_size: int) -> None:
    """One shape, float32, 4 bits, group 64 (or per channel)."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(in_features, in_features, generator=generator) / in_features**0.5
    x = torch.randn(tokens, in_features, generator=generator) @ mixing
    weight = torch.randn(out_features, in_features, generator=generator)
    spec = QuantSpec(bits=4, group_size=64 if in_features % 64 == 0 else None)
    scale, zero = minmax_grid(weight, spec)
    options = gptq.METHOD.resolve({"act_order": False, "block_size": block_size})
    print(f"[{out_features}, {in_features}], {tokens} tokens, {torch.get_num_threads()} threads")
    row("gram", fastest(runs, lambda: accumulate(x), lambda: x.t() @ x / tokens))
    gram = accumulate(x)
    row("factorization", fastest(runs, lambda: gptq.factorize(gram, 0.01), lambda: textbook_factor(gram, 0.01)))
    feedback, upper = gptq.factorize(gram, 0.01).feedback, textbook_factor(gram, 0.01)
    assert feedback is not None
    order = torch.arange(in_features)

    def ours() -> Tensor:
        return gptq.round_columns(weight, feedback, order, scale, zero, spec, block_size)

    def plain() -> Tensor:
        return textbook_columns(weight, upper, scale, zero, spec)

    def whole() -> Tensor:
        return textbook_columns(weight, textbook_factor(gram, 0.01), *minmax_grid(weight, spec), spec)

    row("columns", fastest(runs, ours, plain))
    problem = WeightProblem("bench", weight, spec, gram, tokens, options)
    row("whole solve", fastest(runs, lambda: gptq.solve(problem), whole))
    print(f"  codes that differ {float((ours() != plain()).float().mean()):.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="+", default=["960x576", "3072x576", "576x1536"], help="OUTxIN ...")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32768, help="input rows of the gram")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--block-size", type=int, default=int(gptq.METHOD.options["block_size"].default))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for shape in arguments.shapes:
        out_features, in_features = map(int, shape.split("x"))
        bench(out_features, in_features, arguments.tokens, arguments.runs, arguments.block_size)


if __name__ == "__main__":
    main()
