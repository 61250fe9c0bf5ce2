"""Compile the GPU kernels for all targets, without a GPU, and print what they are made of, as docs/kernels.md does.

python scripts/kernel_table.py [--all]
"""

import sys

from quantforge.kernels.aot import TARGETS, compile_all
from quantforge.kernels.matrix import int8_build, planar_build

DECODE = [planar_build(target, 4, 128, rows=16) for target in TARGETS]
OTHERS = [
    *(planar_build(target, 4, 128, rows=16, dtype="bf16") for target in ("sm_80", "sm_90", "gfx942")),
    *(planar_build(target, 4, group, rows=16) for target in ("sm_80", "sm_90") for group in (64, 32, -1)),
    *(planar_build("sm_90", 8, 128, rows=16, dtype=dtype) for dtype in ("fp16", "bf16")),
    *(planar_build(target, 4, 128, rows=rows) for target in ("sm_80", "sm_90", "gfx942") for rows in (64, 1024)),
    *(int8_build(target, rows=16) for target in ("sm_80", "sm_90", "gfx942")),
]
MORE = [
    planar_build(target, bits, 128, rows=rows, dtype=dtype, symmetric=symmetric)
    for target in TARGETS
    for bits in (4, 8)
    for rows in (16, 32, 64, 1024)
    for dtype in ("fp16", "bf16")
    for symmetric in (False, True)
]


def main() -> None:
    builds = list(dict.fromkeys([*DECODE, *OTHERS, *(MORE if "--all" in sys.argv else [])]))
    print("| kernel | registers | spills | shared bytes | loop | instructions per weight | matrix instructions |")
    print("|---|---|---|---|---|---|---|")
    for build in builds:
        binary = compile_all([build])[0]
        found = binary.inspection
        cells = [build, found.registers, found.spills, found.shared_bytes, found.loop_instructions]
        print("|", *(f"{cell} |" for cell in cells), end=" ")
        print(f"{binary.instructions_per_weight:.2f} | {found.matrix_instructions} |", flush=True)


if __name__ == "__main__":
    main()
