"""Matrix product with weights of 4 or 8 bits in the planar layout, for 16-bit activations.

The layout: int16 words [padded in * BITS / 16, columns]; a block of 16 / BITS planes of PLANE inputs is PLANE rows, and
bits ``BITS * i ..`` of row r hold the code of input ``(block * planes + i) * PLANE + r``. Scales and zeros are [groups,
columns] in one 16-bit float. Words of padded inputs meet activations of 0; what lies in padded columns is never stored.

How 16-bit floats are made of codes: a code of at most 10 bits or'ed into the mantissa of 1024.0 is ``1024 + code`` in
float16, one of at most 7 bits or'ed into that of 128.0 is ``128 + code`` in bfloat16, and taking the constant and the
zero away again is exact. With PTX, one ``lop3`` does this to two codes that share a register; the same without it costs
twice as many instructions on NVIDIA hardware, whose compiler takes the pairs apart.
"""

import triton
import triton.language as tl


@triton.jit
def _coded16(words, i: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr):
    """float16: 1024 + code of plane i; of the odd planes at 4 bits 1024 + 16 * code, which saves their shift."""
    if PTX:
        if BITS == 8:
            if i == 0:
                return tl.inline_asm_elementwise(
                    "lop3.b32 $0, $1, 0x00ff00ff, 0x64006400, 0xea;",
                    "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2,
                )  # fmt: skip
            else:
                return tl.inline_asm_elementwise(
                    "{ .reg .b32 t; shr.u32 t, $1, 8; lop3.b32 $0, t, 0x00ff00ff, 0x64006400, 0xea; }",
                    "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2,
                )  # fmt: skip
        elif i == 0:
            return tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x000f000f, 0x64006400, 0xea;",
                "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
        elif i == 1:
            return tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x00f000f0, 0x64006400, 0xea;",
                "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
        elif i == 2:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 t; shr.u32 t, $1, 8; lop3.b32 $0, t, 0x000f000f, 0x64006400, 0xea; }",
                "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 t; shr.u32 t, $1, 8; lop3.b32 $0, t, 0x00f000f0, 0x64006400, 0xea; }",
                "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
    elif BITS == 8:
        return (((words >> (8 * i)) & 0xFF) | 0x6400).to(tl.float16, bitcast=True)
    else:
        return (((words >> (8 * (i // 2))) & (0xF << (4 * (i % 2)))) | 0x6400).to(tl.float16, bitcast=True)


@triton.jit
def _coded_bf16(words, i: tl.constexpr):
    """bfloat16: 128 + code of plane i, 4 bits, of two codes at once (PTX)."""
    if i == 0:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x000f000f, 0x43004300, 0xea;",
            "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    elif i == 1:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.u32 t, $1, 4; lop3.b32 $0, t, 0x000f000f, 0x43004300, 0xea; }",
            "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    elif i == 2:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.u32 t, $1, 8; lop3.b32 $0, t, 0x000f000f, 0x43004300, 0xea; }",
            "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.u32 t, $1, 12; lop3.b32 $0, t, 0x000f000f, 0x43004300, 0xea; }",
            "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _halves_bf16(words, i: tl.constexpr):
    """bfloat16: 128 + the low 7 bits of a code of 8, and 128 + 128 * its highest bit, the last of an exponent (PTX)."""
    if i == 0:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $2, 0x007f007f, 0x43004300, 0xea; lop3.b32 $1, $2, 0x00800080, 0x43004300, 0xea;",
            "=&r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.u32 t, $2, 8; lop3.b32 $0, t, 0x007f007f, 0x43004300, 0xea;"
            " lop3.b32 $1, t, 0x00800080, 0x43004300, 0xea; }",
            "=&r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def offsets(words, zero, i: tl.constexpr, COMPUTE: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr):
    """code - zero of plane i, exact; `zero` and the result are of dtype COMPUTE."""
    if COMPUTE == tl.float16:
        coded = _coded16(words, i, BITS, PTX)
        if BITS == 4 and i % 2 == 1:
            sixteenth = tl.full(coded.shape, 0.0625, tl.float16)
            return tl.fma(coded, sixteenth, (-64.0 - zero).to(tl.float16).broadcast_to(coded.shape))
        else:
            return coded - (zero + 1024.0).to(tl.float16)
    elif PTX and BITS == 4:
        return _coded_bf16(words, i) - (zero + 128.0).to(tl.bfloat16)
    elif PTX:
        low, high = _halves_bf16(words, i)
        return (low - zero) + (high - 256.0).to(tl.bfloat16)
    else:  # bfloat16 where it has no packed arithmetic, or float32 instead of it in the interpreter
        code = (words.to(tl.int32) >> (BITS * i)) & (15 if BITS == 4 else 255)
        offset = code.to(tl.float32) - zero.to(tl.float32)
        if COMPUTE == tl.float32:
            return offset
        else:  # the lower half of these integers is zero, so nothing need be rounded
            return (offset.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _row(values, at, BLOCK_N: tl.constexpr):
    """BLOCK_N adjacent 16-bit floats, each loaded with its neighbour: nothing below 4 bytes is copied ahead of time."""
    FLOAT: tl.constexpr = values.dtype.element_ty
    column = tl.arange(0, BLOCK_N)
    pairs = tl.load((values + at).to(tl.pointer_type(tl.int32)) + column // 2)
    return (pairs >> (column % 2 * 16)).to(tl.int16).to(FLOAT, bitcast=True)


@triton.jit
def planar_matmul(
    x, words, scales, zeros, bias, out, M, N, K, COLUMNS,
    GROUP: tl.constexpr, BITS: tl.constexpr, PLANE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, AFTER_DOT: tl.constexpr, TRANSPOSED: tl.constexpr,
    WHOLE_K: tl.constexpr, PARTIAL: tl.constexpr, PTX: tl.constexpr, COMPUTE: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """out [M, N] = x [M, K] @ dequantized.T + bias, by one program a tile of BLOCK_M x BLOCK_N.

    GROUP 0 is one group in all. CHUNK planes share a scale. With AFTER_DOT partial sums of a chunk are scaled in
    float32, else the weights before the product. TRANSPOSED computes the transposed tile, weights first. With WHOLE_K
    the inputs need no padding. STAGES blocks are on their way at once; the loop says so itself, or the compiler would
    leave scales out. The third dimension of the grid splits the blocks of K; with PARTIAL `out` is float32 [splits, M,
    N], to be summed by `combine`, which then does the rest. With GATED columns alternate gate and up, and `out` is
    silu(gate) * up, [M, N / 2]. `zeros` None is 2^(BITS-1).
    """
    PLANES: tl.constexpr = 16 // BITS
    INPUTS: tl.constexpr = PLANES * PLANE
    rm = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, PLANE)
    m = tl.expand_dims(rm, 0 if TRANSPOSED else 1)
    n = tl.expand_dims(rn, 1 if TRANSPOSED else 0)
    k_x = tl.expand_dims(rk, 1 if TRANSPOSED else 0)
    k_w = tl.expand_dims(rk, 0 if TRANSPOSED else 1)
    x_rows = x + m.to(tl.int64) * K
    if TRANSPOSED:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in tl.range(tl.program_id(2), tl.cdiv(K, INPUTS), tl.num_programs(2), num_stages=STAGES):
        w = tl.load(words + (block * PLANE + k_w) * COLUMNS + n)
        for chunk in tl.static_range(PLANES // CHUNK):
            if GROUP == 0:
                group = 0
            else:
                group = (block * INPUTS + chunk * CHUNK * PLANE) // GROUP
            at = group * COLUMNS + tl.program_id(0) * BLOCK_N
            scale = tl.expand_dims(_row(scales, at, BLOCK_N), 1 if TRANSPOSED else 0)
            if zeros is None:
                zero = tl.full((1, 1), 1 << (BITS - 1), COMPUTE)
            else:
                zero = tl.expand_dims(_row(zeros, at, BLOCK_N).to(COMPUTE), 1 if TRANSPOSED else 0)
            if AFTER_DOT:
                part = tl.zeros_like(total)
            for j in tl.static_range(CHUNK):
                k = block * INPUTS + (chunk * CHUNK + j) * PLANE + k_x
                if WHOLE_K:
                    a = tl.load(x_rows + k, mask=m < M, other=0.0).to(COMPUTE)
                else:
                    a = tl.load(x_rows + k, mask=(m < M) & (k < K), other=0.0).to(COMPUTE)
                b = offsets(w, zero, chunk * CHUNK + j, COMPUTE, BITS, PTX)
                if not AFTER_DOT:
                    b = b * scale.to(COMPUTE)
                if AFTER_DOT:
                    part = tl.dot(b, a, part) if TRANSPOSED else tl.dot(a, b, part)
                else:
                    total = tl.dot(b, a, total) if TRANSPOSED else tl.dot(a, b, total)
            if AFTER_DOT:
                total += part * scale.to(tl.float32)
    if PARTIAL:
        rows = (tl.program_id(2) * M + m).to(tl.int64)
        tl.store(out + rows * N + n, total, mask=(m < M) & (n < N))
    else:
        if bias is not None:
            total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        if GATED:
            if TRANSPOSED:
                total = tl.trans(total)
            gate, up = tl.split(tl.reshape(total, (BLOCK_M, BLOCK_N // 2, 2)))
            total = gate * tl.sigmoid(gate) * up
            m = rm[:, None]
            n = (tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2))[None, :]
            N = N // 2
        tl.store(out + m.to(tl.int64) * N + n, total.to(out.dtype.element_ty), mask=(m < M) & (n < N))


@triton.jit
def _summed(partials, bias, at, inside, count, N, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partials + split * count + at, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + at % N, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def combine(partials, bias, out, M, N, SPLITS: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """out [M, N] = the sum of float32 partials [SPLITS, M, N], in their order, + bias; gated, silu(gate) * up."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if GATED:
        inside = at < M * (N // 2)
        gate = _summed(partials, bias, at * 2, inside, M * N, N, SPLITS, BLOCK)
        total = gate * tl.sigmoid(gate) * _summed(partials, bias, at * 2 + 1, inside, M * N, N, SPLITS, BLOCK)
    else:
        inside = at < M * N
        total = _summed(partials, bias, at, inside, M * N, N, SPLITS, BLOCK)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
