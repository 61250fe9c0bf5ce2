"""Packed codes: exact words, identities, and the layout of the GPTQ reference code at 3 bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_grids import words

from quantforge.numerics.bits import pack_codes, period, unpack_codes

GOLDEN = {
    2: (list(range(4)) * 4, (0xE4E4E4E4,)),
    3: (list(range(8)) * 4, (0x88FAC688, 0xC688FAC6, 0xFAC688FA)),
    4: (list(range(16)), (0x76543210, 0xFEDCBA98)),
    8: ([1, 2, 3, 255, 0, 128, 127, 254], (0xFF030201, 0xFE7F8000)),
}


@pytest.mark.parametrize("bits", GOLDEN)
def test_packed_words_equal_words_written_out_by_hand(bits: int) -> None:
    codes, expected = GOLDEN[bits]
    packed = pack_codes(torch.tensor(codes, dtype=torch.uint8), bits, dim=0)
    assert packed.dtype == torch.int32
    assert torch.equal(packed, words(*expected))


@pytest.mark.parametrize(("bits", "word"), [(2, 0b01_10_11), (3, 0b001_010_011), (4, 0x123), (8, 0x010203)])
def test_unused_bits_of_the_last_word_are_zero(bits: int, word: int) -> None:
    assert torch.equal(pack_codes(torch.tensor([3, 2, 1], dtype=torch.uint8), bits, dim=0), words(word))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("count", [64, 96, 128, 768])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_unpacking_returns_the_packed_codes_in_the_fewest_whole_words(bits: int, count: int, dim: int) -> None:
    shape = (count, 24) if dim == 0 else (24, count)
    codes = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    packed = pack_codes(codes, bits, dim)
    assert packed.shape[dim] == -(-count * bits // 32)
    assert packed.is_contiguous()
    assert torch.equal(unpack_codes(packed, bits, dim, count), codes)


def test_3_bit_rows_take_72_12_and_384_words_for_768_128_and_4096_values() -> None:
    rows = [pack_codes(torch.zeros(count, dtype=torch.uint8), 3, 0).shape[0] for count in (768, 128, 4096)]
    assert rows == [72, 12, 384]


@settings(max_examples=60)
@given(st.data(), st.sampled_from([2, 3, 4, 8]), st.lists(st.integers(0, 40), min_size=1, max_size=3))
def test_any_shape_along_any_dim_is_the_bit_stream_of_its_values(
    data: st.DataObject, bits: int, shape: list[int]
) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    seed = data.draw(st.integers(0, 2**31))
    codes = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = pack_codes(codes, bits, dim)
    assert torch.equal(unpack_codes(packed, bits, dim, codes.shape[dim]), codes)
    for values, stream in zip(_lines(codes, dim), _lines(packed, dim), strict=True):
        as_number = sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(stream))
        assert as_number == sum(value << (bits * i) for i, value in enumerate(values))


def _lines(tensor: torch.Tensor, dim: int) -> list[list[int]]:
    """All 1-D lines of `tensor` along `dim`; an empty one is left out."""
    moved = tensor.movedim(dim, -1)
    return moved.reshape(-1, moved.shape[-1]).tolist() if tensor.numel() else []


def test_non_contiguous_codes_pack_like_their_copy() -> None:
    codes = torch.randint(0, 8, (96, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pack_codes(codes.t(), 3, dim=1), pack_codes(codes.t().contiguous(), 3, dim=1))
    assert torch.equal(pack_codes(codes.t(), 3, dim=1).t(), pack_codes(codes, 3, dim=0))


def test_3_bit_stream_is_the_reference_layout_of_32_values_in_3_words() -> None:
    codes = torch.randint(0, 8, (64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(pack_codes(codes, 3, dim=0), words(*_reference_3_bits(codes.tolist())))


def _reference_3_bits(values: list[int]) -> list[int]:
    """The schedule of the GPTQ reference packer: 10 values, one split 2 + 1, 10 values, one split 1 + 2, 10 values."""
    packed = []
    for start in range(0, len(values), 32):
        block = values[start : start + 32]
        first, second, third = 0, 0, 0
        for j in range(10):
            first |= block[j] << (3 * j)
            second |= block[11 + j] << (3 * j + 1)
            third |= block[22 + j] << (3 * j + 2)
        first |= (block[10] & 3) << 30
        second |= block[10] >> 2
        second |= (block[21] & 1) << 31
        third |= block[21] >> 1
        packed += [first, second, third]
    return packed


@pytest.mark.parametrize(("bits", "expected"), [(2, (16, 1)), (3, (32, 3)), (4, (8, 1)), (8, (4, 1))])
def test_period_is_the_shortest_run_that_ends_on_a_word(bits: int, expected: tuple[int, int]) -> None:
    assert period(bits) == expected


def test_a_code_that_does_not_fit_is_refused_instead_of_spilling_into_its_neighbour() -> None:
    with pytest.raises(ValueError, match="code 8 does not fit in 3 bits"):
        pack_codes(torch.tensor([0, 8], dtype=torch.uint8), 3, dim=0)


def test_wrong_dtypes_widths_and_counts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"uint8, not torch\.int32"):
        pack_codes(torch.zeros(8, dtype=torch.int32), 4, dim=0)
    with pytest.raises(ValueError, match="got 5"):
        pack_codes(torch.zeros(8, dtype=torch.uint8), 5, dim=0)
    with pytest.raises(ValueError, match=r"int32, not torch\.int64"):
        unpack_codes(torch.zeros(1, dtype=torch.int64), 4, dim=0, count=8)
    with pytest.raises(ValueError, match="9 codes of 4 bits take 2 words, not 1"):
        unpack_codes(torch.zeros(1, dtype=torch.int32), 4, dim=0, count=9)
