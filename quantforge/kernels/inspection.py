"""What a compiled kernel is made of, read from its disassembly: registers, spills, instructions of its main loop.

The main loop is the longest stretch with matrix instructions that a branch leads back over. Nothing is run.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantforge.errors import QuantforgeError

MATRIX_OPCODES = ("HMMA", "HGMMA", "IMMA", "IGMMA", "UTCHMMA", "UTCIMMA", "v_mfma", "v_wmma")
"""How instructions of the matrix units begin, NVIDIA's and AMD's."""

_SHAPES = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8, "16832": 16 * 8 * 32}
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")

_SASS = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.x]+)(.*?);")
_LABEL = re.compile(r"^(\.L\w+):")
_AMD = re.compile(r"^\s+([a-z]\w+)(.*)")
_AMD_BYTES = {"ubyte": 1, "ushort": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


_LOCAL_MEMORY = ("LDL", "STL")


@dataclass(frozen=True)
class Inspection:
    """One kernel.

    Attributes:
        registers: vector registers of a thread.
        spills: instructions that move registers to and from local memory (NVIDIA) or registers spilled (AMD).
        shared_bytes: shared memory of a program.
        loop: opcode -> count in the main loop, modifiers included.
    """

    registers: int
    spills: int
    shared_bytes: int
    loop: Counter[str]

    @property
    def loop_instructions(self) -> int:
        return sum(self.loop.values())

    @property
    def loop_spills(self) -> int:
        """Instructions of the main loop that move registers to and from local memory (NVIDIA)."""
        return sum(count for opcode, count in self.loop.items() if opcode.startswith(_LOCAL_MEMORY))

    @property
    def matrix_instructions(self) -> int:
        """In the main loop."""
        return sum(count for opcode, count in self.loop.items() if opcode.startswith(MATRIX_OPCODES))

    @property
    def matrix_products(self) -> int | None:
        """Multiplications of two numbers by one warp in the main loop; None where opcodes do not tell their shape."""
        total = 0
        for opcode, count in self.loop.items():
            if opcode.startswith(MATRIX_OPCODES):
                if (products := products_of(opcode)) is None:
                    return None
                total += products * count
        return total

    @property
    def load_bytes(self) -> Counter[int]:
        """Bytes of a load from global memory -> loads of that size in the main loop, by one thread."""
        sizes: Counter[int] = Counter()
        for opcode, count in self.loop.items():
            if (size := load_size(opcode)) is not None:
                sizes[size] += count
        return sizes

    def instructions_per_weight(self, weights: int, threads: int) -> float:
        """Instructions of the main loop over all `threads` of a program, for each of its `weights` in one turn."""
        return self.loop_instructions * threads / weights


def products_of(opcode: str) -> int | None:
    """Multiplications that one warp does with a matrix instruction; None when its name has no shape."""
    if (shape := _SHAPE.search(opcode)) is not None:
        m, n, k = map(int, shape.groups())
        return m * n * k // (4 if "GMMA" in opcode else 1)  # four warps share one of Hopper's
    return next((_SHAPES[part] for part in opcode.split(".") if part in _SHAPES), None)


def load_size(opcode: str) -> int | None:
    """Bytes that one thread loads from global memory with an instruction; None when it is no such load."""
    if opcode.startswith(("LDG.", "LDGSTS")) or opcode == "LDG":
        parts = opcode.split(".")
        named = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
        return next((named[part] for part in reversed(parts) if part in named), 4)
    if opcode.startswith(("global_load_", "buffer_load_")):
        size = opcode.split("_")[2]
        return next((count for name, count in _AMD_BYTES.items() if name == size), 2)
    return None


def inspect_cubin(code: bytes, tools: Path, shared_bytes: int) -> Inspection:
    """Read a cubin with the `cuobjdump` in `tools`; `shared_bytes` is what the launch asks for."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(code)
        usage = _run([str(tools / "cuobjdump"), "-res-usage", str(file)])
        listing = _run([str(tools / "cuobjdump"), "-sass", str(file)])
    found = re.search(r"REG:(\d+)", usage)
    if found is None:
        raise QuantforgeError(f"cuobjdump -res-usage names no registers: {usage[:200]!r}")
    return read_sass(listing, int(found[1]), shared_bytes)


def read_sass(listing: str, registers: int, shared_bytes: int) -> Inspection:
    """From what `cuobjdump -sass` prints."""
    code: list[tuple[int, str, str]] = []  # address, opcode, operands
    for line in listing.splitlines():
        if (match := _SASS.match(line)) is not None:
            code.append((int(match[1], 16), match[2], match[3]))
    spills = sum(opcode.startswith(_LOCAL_MEMORY) for _, opcode, _ in code)
    addresses = {address: index for index, (address, _, _) in enumerate(code)}
    jumps = []
    for index, (address, opcode, operands) in enumerate(code):
        if opcode.startswith("BRA") and (target := re.search(r"0x([0-9a-f]+)", operands)) is not None:
            to = int(target[1], 16)
            if to < address and to in addresses:  # the last jump of a kernel leads to itself
                jumps.append((addresses[to], index))
    return Inspection(registers, spills, shared_bytes, _main_loop([opcode for _, opcode, _ in code], jumps))


def read_amdgcn(text: str, shared_bytes: int) -> Inspection:
    """From the assembly that Triton's AMD compiler gives."""
    fields = {}
    for name in ("vgpr_count", "vgpr_spill_count"):
        if (match := re.search(rf"\.{name}:\s*(\d+)", text)) is None:
            raise QuantforgeError(f"the AMD assembly has no .{name}")
        fields[name] = int(match[1])
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    jumps = []
    for line in text.splitlines():
        if (label := _LABEL.match(line)) is not None:
            labels[label[1]] = len(opcodes)
        elif (match := _AMD.match(line)) is not None and not line.lstrip().startswith(";"):
            label_name = match[2].split(";")[0].strip()
            if match[1].startswith(("s_cbranch", "s_branch")) and label_name in labels:
                jumps.append((labels[label_name], len(opcodes)))
            opcodes.append(match[1])
    return Inspection(fields["vgpr_count"], fields["vgpr_spill_count"], shared_bytes, _main_loop(opcodes, jumps))


def _main_loop(opcodes: Sequence[str], jumps: Sequence[tuple[int, int]]) -> Counter[str]:
    """The opcodes of the longest loop with a matrix instruction, else of the longest; none when nothing jumps back.

    A jump back from waiting code behind the end of a kernel looks like a loop over all that lies between.
    """
    loops = sorted((opcodes[first : last + 1] for first, last in jumps), key=len, reverse=True)
    multiplying = (loop for loop in loops if any(opcode.startswith(MATRIX_OPCODES) for opcode in loop))
    return Counter(next(multiplying, loops[0] if loops else []))


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise QuantforgeError(f"{' '.join(command[:2])} failed: {done.stderr.strip()[:500]}")
    return done.stdout
