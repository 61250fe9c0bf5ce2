"""The layouts of the GPU kernels, and the bit arithmetic of their PTX, which needs a GPU, emulated for all words."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from quantforge.kernels import planar, rows

SOURCE = Path(planar.__file__).parent / "sources" / "planar.py"


def matrix(bits: int, out_features: int, in_features: int, groups: int) -> tuple[torch.Tensor, ...]:
    codes = torch.randint(0, 1 << bits, (out_features, in_features), dtype=torch.uint8)
    scales = torch.rand(out_features, groups).to(torch.float16)
    zeros = torch.randint(0, 1 << bits, (out_features, groups), dtype=torch.uint8)
    return codes, scales, zeros


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "group_size", "shape"),
    [
        (4, 32, (64, 128)),
        (4, 64, (100, 576)),
        (4, 128, (1, 200)),
        (4, 96, (70, 480)),
        (4, -1, (65, 37)),
        (8, 32, (64, 96)),
        (8, 128, (192, 300)),
        (8, 4096, (3, 1)),
    ],
)
def test_unpacking_gives_back_what_was_packed(
    bits: int, group_size: int, shape: tuple[int, int], symmetric: bool
) -> None:
    groups = 1 if group_size in (-1, 4096) else -(-shape[1] // group_size)
    codes, scales, zeros = matrix(bits, *shape, groups)
    packed = planar.pack(codes, scales, None if symmetric else zeros, bits=bits, group_size=group_size)
    words, padded_scales, padded_zeros = packed
    padded_out, padded_in = planar.padded_shape(bits, group_size, *shape)
    assert words.dtype == torch.int16
    assert words.shape == (padded_in * bits // 16, padded_out)
    assert padded_out % 64 == 0 and padded_out - shape[0] < 64
    assert not padded_scales[groups:].any() and not padded_scales[:, shape[0] :].any()
    back = planar.unpack(
        *packed, bits=bits, group_size=group_size, out_features=shape[0], in_features=shape[1]
    )  # fmt: skip
    assert torch.equal(back[0], codes)
    assert torch.equal(back[1], scales)
    assert (back[2] is None) if symmetric else torch.equal(back[2], zeros)
    assert (padded_zeros is None) or padded_zeros.dtype == scales.dtype


def test_a_word_holds_one_code_of_each_plane() -> None:
    codes = (torch.arange(128, dtype=torch.uint8) // 32 + torch.arange(128, dtype=torch.uint8) % 32 % 3)[None]
    words, _, _ = planar.pack(codes, torch.ones(1, 1), None, bits=4, group_size=128)
    assert words.shape == (32, 64)
    assert [int(word) & 0xFFFF for word in words[:4, 0]] == [0x3210, 0x4321, 0x5432, 0x3210]
    words, _, _ = planar.pack(codes, torch.ones(1, 1), None, bits=8, group_size=128)
    assert words.shape == (64, 64)
    assert [int(word) & 0xFFFF for word in words[:3, 0]] == [
        (int(codes[0, 64 + k]) << 8) | int(codes[0, k]) for k in range(3)
    ]


@pytest.mark.parametrize(
    ("bits", "group_size", "in_features", "width"),
    [(4, 128, 4096, 32), (4, 64, 576, 16), (4, -1, 576, 16), (4, 16, 4096, 16), (4, 64, 4160, 32),
     (8, 128, 4096, 64), (8, 96, 960, 32), (8, 48, 4096, 16)],
)  # fmt: skip
def test_planes_are_as_wide_as_group_and_padding_allow(
    bits: int, group_size: int, in_features: int, width: int
) -> None:
    assert planar.plane_width(bits, group_size, in_features) == width


def test_what_does_not_fit_is_refused() -> None:
    codes, scales, zeros = matrix(4, 8, 64, 2)
    with pytest.raises(ValueError, match="multiple of 16 inputs, not of 24"):
        planar.plane_width(4, 24, 96)
    with pytest.raises(ValueError, match="4 or 8 bits, not 3"):
        planar.pack(codes, scales, zeros, bits=3, group_size=32)
    with pytest.raises(ValueError, match=r"scales are \(8, 2\), not \(8, 4\)"):
        planar.pack(codes, scales, zeros, bits=4, group_size=16)
    with pytest.raises(ValueError, match="code 31 does not fit in 4 bits"):
        planar.pack(codes | 31, scales, zeros, bits=4, group_size=32)
    with pytest.raises(ValueError, match="words are"):
        words, *rest = planar.pack(codes, scales, zeros, bits=4, group_size=32)
        planar.unpack(words[1:], *rest, bits=4, group_size=32, out_features=8, in_features=64)


def test_rows_of_int8_come_back_and_are_padded_with_zeros() -> None:
    codes, scales, _ = matrix(8, 70, 200, 1)
    weight, padded = rows.pack(codes, scales)
    assert weight.dtype == torch.int8 and weight.shape == (128, 256) and padded.shape == (128,)
    assert torch.equal(weight[:70, :200].to(torch.int16), codes.to(torch.int16) - 128)
    assert not weight[70:].any() and not weight[:, 200:].any()
    back = rows.unpack(weight, padded, out_features=70, in_features=200)
    assert torch.equal(back[0], codes) and torch.equal(back[1], scales)
    with pytest.raises(ValueError, match="fill an int32"):
        rows.pack(torch.zeros(1, 1 << 17, dtype=torch.uint8), torch.ones(1, 1))


def test_gate_and_up_alternate() -> None:
    gate, up = torch.arange(6).reshape(3, 2), torch.arange(6).reshape(3, 2) + 10
    assert planar.interleave(gate, up).tolist() == [[0, 1], [10, 11], [2, 3], [12, 13], [4, 5], [14, 15]]


def assembly(function: str) -> list[str]:
    """The PTX of a function of the kernel's source, in order."""
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    found = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    calls = [node for node in ast.walk(found) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    asm = [call for call in calls if call.func.attr.startswith("inline_asm")]
    return [ast.literal_eval(call.args[0]) for call in sorted(asm, key=lambda call: call.lineno)]


def executed(ptx: str, word: np.ndarray) -> list[np.ndarray]:
    """What PTX of `shr.u32` and `lop3.b32` makes of 32-bit `word`: the registers $0, $1, ... that it writes."""
    last = max(map(int, re.findall(r"\$(\d)", ptx)))
    values = {f"${last}": word}
    statements = [s.strip() for s in ptx.replace(".reg .b32 t;", "").strip("{} ").split(";") if s.strip()]
    for statement in statements:
        opcode, *operands = re.split(r"[ ,]+", statement)
        inputs = [values[o] if o in values else np.uint32(int(o, 0)) for o in operands[1:]]
        if opcode == "shr.u32":
            values[operands[0]] = inputs[0] >> inputs[1]
        else:
            assert opcode == "lop3.b32"
            a, b, c, table = inputs
            result = np.zeros_like(a)
            for row in range(8):  # bit `row` of the table is the result for a, b, c = the bits of `row`
                if int(table) >> row & 1:
                    result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
            values[operands[0]] = result
    return [values[f"${index}"] for index in range(last)]


def words() -> tuple[np.ndarray, np.ndarray]:
    """Pairs of words in a register, so that each half is every 16-bit number once; and the two halves as [pairs, 2]."""
    low = np.arange(1 << 16, dtype=np.uint32)
    high = low * np.uint32(40503) & np.uint32(0xFFFF)  # odd, so again each number once
    assert len(np.unique(high)) == 1 << 16
    return low | high << np.uint32(16), np.stack([low, high], axis=1)


def as_float(bits: np.ndarray, dtype: str) -> np.ndarray:
    """The two 16-bit floats of each 32-bit register, [registers, 2] in float32."""
    halves = np.stack([bits & np.uint32(0xFFFF), bits >> np.uint32(16)], axis=1)
    if dtype == "float16":
        return halves.astype(np.uint16).view(np.float16).astype(np.float32)
    return (halves << np.uint32(16)).view(np.float32)


def fits(values: np.ndarray, dtype: str) -> bool:
    """Whether numbers are exact in a 16-bit float."""
    if dtype == "float16":
        return bool((values.astype(np.float16).astype(np.float32) == values).all())
    return not (values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF)).any()


CASES = [
    (4, "float16", plane, asm) for plane, asm in enumerate(assembly("_coded16")[2:])
] + [
    (8, "float16", plane, asm) for plane, asm in enumerate(assembly("_coded16")[:2])
] + [
    (4, "bfloat16", plane, asm) for plane, asm in enumerate(assembly("_coded_bf16"))
] + [
    (8, "bfloat16", plane, asm) for plane, asm in enumerate(assembly("_halves_bf16"))
]  # fmt: skip


def test_all_of_the_assembly_is_emulated() -> None:
    assert len(CASES) == 4 + 2 + 4 + 2 == SOURCE.read_text(encoding="utf-8").count("tl.inline_asm_elementwise(")


@pytest.mark.parametrize(("bits", "dtype", "plane", "ptx"), CASES, ids=lambda value: str(value)[:8])
def test_ptx_makes_the_offset_of_every_code_from_every_zero(bits: int, dtype: str, plane: int, ptx: str) -> None:
    registers, halves = words()
    codes = ((halves >> np.uint32(bits * plane)) & np.uint32((1 << bits) - 1)).astype(np.float32)
    made = [as_float(result, dtype) for result in executed(ptx, registers)]
    for zero in range(1 << bits):
        if bits == 8 and dtype == "bfloat16":  # (low - zero) + (high - 256)
            first, second = made[0] - np.float32(zero), made[1] - np.float32(256)
            assert fits(first, dtype) and fits(second, dtype)
            offset = first + second
        elif bits == 4 and dtype == "float16" and plane % 2:  # one rounding, of nothing
            constant = np.float32(-64 - zero)
            assert fits(np.array([constant]), dtype)
            offset = made[0] * np.float32(1 / 16) + constant
        else:
            constant = np.float32(zero + (1024 if dtype == "float16" else 128))
            assert fits(np.array([constant]), dtype)
            offset = made[0] - constant
        assert fits(offset, dtype)
        assert np.array_equal(offset, codes - np.float32(zero))
