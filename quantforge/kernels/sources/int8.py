"""Matrix product of INT8 activations and INT8 weights, and the rounding of activations per token.

Weights are int8 [padded out, padded in], activations int8 [M, padded in] with zeros in the padding.
"""

import triton
import triton.language as tl


@triton.jit
def round_tokens(x, codes, steps, K, PADDED, BLOCK: tl.constexpr):
    """One program a token: step = max |x| / 127.5, codes = x / step, clamped to -128 .. 127, half to even."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, K, BLOCK):
        values = tl.load(x + token * K + start + at, mask=start + at < K, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values))
    step = tl.div_rn(tl.max(largest, axis=0), 127.5)
    step = tl.where(step == 0.0, 1.0, step)
    tl.store(steps + token, step)
    for start in range(0, PADDED, BLOCK):
        values = tl.load(x + token * K + start + at, mask=start + at < K, other=0.0).to(tl.float32)
        scaled = tl.minimum(tl.maximum(tl.div_rn(values, tl.full((BLOCK,), 0.0, tl.float32) + step), -128.0), 127.0)
        whole = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2^23: nothing after the point is left, half to even
        tl.store(codes + token * PADDED + start + at, whole.to(tl.int32).to(tl.int8), mask=start + at < PADDED)


@triton.jit
def int8_matmul(
    x, weight, steps, scales, bias, out, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """out [M, N] = (x @ weight.T) * steps [M, 1] * scales [N] + bias, summed in int32; K is a multiple of BLOCK_K.

    With PARTIAL `out` is int32 [splits, M, N], for `combine_int8`; the third dimension of the grid splits K.
    """
    rm = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    x_rows = x + rm[:, None].to(tl.int64) * K
    w_rows = weight + rn[None, :].to(tl.int64) * K
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for block in range(tl.program_id(2), K // BLOCK_K, tl.num_programs(2)):
        k = block * BLOCK_K + rk
        a = tl.load(x_rows + k[None, :], mask=rm[:, None] < M, other=0)
        b = tl.load(w_rows + k[:, None])
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    inside = (rm[:, None] < M) & (rn[None, :] < N)
    if PARTIAL:
        rows = (tl.program_id(2) * M + rm[:, None]).to(tl.int64)
        tl.store(out + rows * N + rn[None, :], total, mask=inside)
    else:
        step = tl.load(steps + rm, mask=rm < M, other=0.0)
        result = total.to(tl.float32) * step[:, None] * tl.load(scales + rn).to(tl.float32)[None, :]
        if bias is not None:
            result += tl.load(bias + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
        tl.store(out + rm[:, None].to(tl.int64) * N + rn[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def combine_int8(partials, steps, scales, bias, out, M, N, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """out [M, N] from int32 partials [SPLITS, M, N]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < M * N
    total = tl.zeros((BLOCK,), tl.int32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partials + split * M * N + at, mask=inside, other=0)
    step = tl.load(steps + at // N, mask=inside, other=0.0)
    result = total.to(tl.float32) * step * tl.load(scales + at % N, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        result += tl.load(bias + at % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
