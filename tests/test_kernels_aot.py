"""Kernels compiled for GPUs that are not here: what the compiler made of them, read from the machine code."""

import importlib.util
import os
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from quantforge.errors import QuantforgeError, UsageError
from quantforge.kernels import aot
from quantforge.kernels.aot import TARGETS, Binary, Build, compile_all
from quantforge.kernels.inspection import Inspection, load_size, products_of, read_amdgcn, read_sass
from quantforge.kernels.matrix import LONG, combine_build, int8_build, planar_build, round_tokens_build
from quantforge.kernels.planar import planes_of

EVERYTHING = os.environ.get("QUANTFORGE_KERNELS") == "all"
pytestmark = pytest.mark.timeout(3600)  # with QUANTFORGE_KERNELS=all
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (pip install triton)"
)

SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""What a program can have; 99 kB on the others (CUDA C++ programming guide, technical specifications)."""

DECODE, PREFILL = 16, 1024
QUICK = [
    *(planar_build(target, 4, 128, rows=DECODE) for target in TARGETS),
    planar_build("sm_90", 4, 128, rows=DECODE, dtype="bf16", symmetric=True),
    planar_build("sm_80", 8, 128, rows=DECODE),
    planar_build("sm_90", 4, 128, rows=PREFILL),
    planar_build("sm_89", 8, 128, rows=PREFILL),
    int8_build("sm_80", rows=DECODE),
]
"""What every run of the tests compiles; QUANTFORGE_KERNELS=all takes the whole matrix."""

WHOLE = list(dict.fromkeys([
    *QUICK,
    *(planar_build(target, bits, 128, rows=rows, dtype=dtype, symmetric=symmetric)
      for target in TARGETS for bits in (4, 8) for rows in (DECODE, PREFILL)
      for dtype in ("fp16", "bf16") for symmetric in (False, True)),
    *(planar_build(target, 4, group_size, rows=DECODE) for target in TARGETS for group_size in (32, 64, -1)),
    *(planar_build(target, 4, 64, rows=rows, in_features=576) for target in TARGETS for rows in (DECODE, 64)),
    *(int8_build(target, rows=rows) for target in TARGETS for rows in (DECODE, PREFILL)),
]))  # fmt: skip
BUILDS = WHOLE if EVERYTHING else QUICK


@cache
def compiled() -> dict[Build, Binary]:
    """All builds at once: importing Triton takes as long as compiling one."""
    return dict(zip(BUILDS, compile_all(BUILDS), strict=True))


@pytest.fixture(params=BUILDS, ids=str)
def binary(request: pytest.FixtureRequest) -> Binary:
    return compiled()[request.param]


@needs_triton
def test_no_register_is_spilled_in_the_main_loop_and_next_to_none_outside(binary: Binary) -> None:
    """ptxas saves two registers around the loop of three builds; AMD's count is of the whole kernel."""
    found = binary.inspection
    assert found.loop_spills == 0
    assert found.spills <= (0 if binary.build in QUICK or binary.build.target.startswith("gfx") else 6)


@needs_triton
def test_shared_memory_suffices(binary: Binary) -> None:
    assert binary.inspection.shared_bytes <= SHARED_BYTES.get(binary.build.target, 99 << 10)


@needs_triton
def test_the_main_loop_multiplies_exactly_what_it_should(binary: Binary) -> None:
    """A loop that the compiler found nothing to do in would look good in every other way."""
    known = binary.build.known
    depth = known["BLOCK_K"] if "BLOCK_K" in known else known["PLANE"] * planes_of(known["BITS"])
    if binary.inspection.matrix_products is None:
        assert binary.build.target == "sm_100" and binary.inspection.matrix_instructions
        pytest.skip(f"{binary.build}: instructions on tensor memory do not name their shapes")
    assert binary.inspection.matrix_products * binary.build.warps == known["BLOCK_M"] * known["BLOCK_N"] * depth


@needs_triton
def test_weights_are_loaded_16_bytes_at_a_time(binary: Binary) -> None:
    """Weights, and activations of which a thread has 16 bytes, need so many loads of 16, or some were narrower."""
    known, threads = binary.build.known, binary.build.threads
    if binary.build.entry == "int8_matmul":
        words, activations, planes = known["BLOCK_K"] * known["BLOCK_N"], known["BLOCK_M"] * known["BLOCK_K"], 1
    else:
        words, activations = (2 * known["PLANE"] * known[block] for block in ("BLOCK_N", "BLOCK_M"))
        planes = planes_of(known["BITS"])
    wide = activations // (16 * threads) * planes
    assert binary.inspection.load_bytes[16] == words // (16 * threads) + wide


@needs_triton
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_decoding_4_bits_takes_at_most_3_instructions_a_weight(target: str) -> None:
    builds = [b for b in BUILDS if b.target == target and b.entry == "planar_matmul" and b.known["BITS"] == 4]
    decoding = [b for b in builds if b.known["BLOCK_M"] == 16 and b.known["GROUP"] == 128]
    assert decoding
    for build in decoding:
        binary = compiled()[build]
        assert binary.instructions_per_weight <= 3.0, build
        assert not {opcode for opcode in binary.inspection.loop if opcode.startswith(("I2F", "STS.128", "STS.64"))}


@needs_triton
def test_binaries_name_their_arguments() -> None:
    binary = compiled()[QUICK[0]]
    names = ["x", "words", "scales", "zeros", "out", "M", "N", "K", "COLUMNS"]
    assert [name for name, _ in binary.arguments] == names
    assert dict(binary.arguments)["words"] == "*i16"
    assert (binary.symbol, binary.kind, binary.code[:4]) == ("planar_matmul", "cubin", b"\x7fELF")
    assert {compiled()[build].null_pointers for build in QUICK} == {2}


@needs_triton
def test_what_goes_with_the_products_compiles_too() -> None:
    """Sums of splits, gate-up-SiLU in both places, tokens to INT8."""
    builds = []
    for target in ("sm_90", "gfx942"):
        decoding, long = (planar_build(target, 4, 128, rows=rows, gated=True) for rows in (DECODE, PREFILL))
        integers = int8_build(target, rows=DECODE)
        assert decoding.grid[2] > 1 and integers.grid[2] > 1
        builds += [
            long,
            combine_build(decoding, bias=True),
            combine_build(integers),
            round_tokens_build(target, "bf16"),
        ]
    for binary in compile_all(builds):
        assert binary.inspection.spills == 0 and binary.null_pointers == 2, binary.build


@needs_triton
def test_a_compiler_that_fails_says_why() -> None:
    with pytest.raises(QuantforgeError, match="compiling kernels failed"):
        compile_all([replace(QUICK[0], constants=(("BLOCK_M", 16),))])


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(UsageError, match="no kernel is compiled for sm_75; known are sm_80"):
        planar_build("sm_75", 4, 128, rows=1)
    assert aot.TARGETS["gfx942"] == ("hip", "gfx942", 64)


def test_long_inputs_are_whole_blocks() -> None:
    assert LONG % 128 == 0


SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;                  /* 0x00000a0000017a02 */
        /*0010*/                   STL [R1], R2 ;                          /* 0x0 */
        /*0020*/                   LDGSTS.E.BYPASS.128 [R3], [R4.64] ;     /* 0x0 */
        /*0030*/              @!P0 LDG.E.U16 R5, [R6.64] ;                 /* 0x0 */
        /*0040*/                   HMMA.16816.F32 R8, R8, R9, R8 ;         /* 0x0 */
        /*0050*/               @P1 BRA 0x40 ;                              /* 0x0 */
        /*0060*/               @P0 BRA 0x20 ;                              /* 0x0 */
        /*0070*/                   EXIT ;                                  /* 0x0 */
        /*0080*/                   BRA 0x80 ;                              /* 0x0 */
"""


@pytest.mark.parametrize("waiting", [0, 9])
def test_the_main_loop_is_the_longest_way_back_over_matrix_instructions(waiting: int) -> None:
    """Not the way back from code behind the end that waits, which the sums of a tile may lie between."""
    behind = [f"/*{0x90 + 16 * line:04x}*/ FADD R1, R1, R2 ;" for line in range(waiting)]
    behind += [f"/*{0x90 + 16 * waiting:04x}*/ BRA 0x70 ;"] if waiting else []
    found = read_sass("\n".join([SASS, *behind]), 40, 1024)
    loop = {"LDGSTS.E.BYPASS.128": 1, "LDG.E.U16": 1, "HMMA.16816.F32": 1, "BRA": 2}
    assert found == Inspection(40, 1, 1024, Counter(loop))
    assert (found.matrix_instructions, found.load_bytes) == (1, {16: 1, 2: 1})
    assert found.matrix_products == 16 * 8 * 16
    assert found.instructions_per_weight(weights=640, threads=128) == 1.0


def test_amd_assembly_is_read_alike() -> None:
    text = """
\ts_load_dwordx2 s[0:1], s[2:3], 0x0
.LBB0_1:
\tglobal_load_dwordx4 v[0:3], v[4:5], off
\tv_mfma_f32_16x16x16_f16 a[0:3], v[0:1], v[2:3], a[0:3]
\ts_cbranch_scc1 .LBB0_1
\ts_endpgm
    .vgpr_count:     84
    .vgpr_spill_count: 3
"""
    found = read_amdgcn(text, 512)
    assert (found.registers, found.spills, found.loop_instructions, found.matrix_instructions) == (84, 3, 3, 1)
    assert found.load_bytes == {16: 1} and found.matrix_products == 16 * 16 * 16
    with pytest.raises(QuantforgeError, match=r"no \.vgpr_count"):
        read_amdgcn("", 0)


@pytest.mark.parametrize(
    ("opcode", "size"),
    [("LDG.E", 4), ("LDG.E.64", 8), ("LDGSTS.E.BYPASS.LTC128B.128", 16), ("LDG.E.128.CONSTANT", 16), ("LDS.128", None),
     ("LDGDEPBAR", None), ("global_load_dwordx2", 8), ("global_load_ushort", 2), ("global_load_short_d16_hi", 2)],
)  # fmt: skip
def test_sizes_of_loads(opcode: str, size: int | None) -> None:
    assert load_size(opcode) == size


@pytest.mark.parametrize(
    ("opcode", "products"),
    [("HMMA.16816.F32.BF16", 2048), ("IMMA.16832.S8.S8", 4096), ("HGMMA.64x128x16.F32", 32768), ("UTCHMMA", None),
     ("v_mfma_f32_32x32x8_f16", 8192), ("v_mfma_i32_16x16x32_i8", 8192)],
)  # fmt: skip
def test_products_of_matrix_instructions(opcode: str, products: int | None) -> None:
    assert products_of(opcode) == products
