"""llama.cpp: GGUF files only. Rules are those of the block types of 32 codes; of others nothing is said."""

from quantforge.contracts import Contract, Problem, Subject, Verdict
from quantforge.contracts._rules import matrices, refusals

FILE = "llama.cpp, ggml/src/gguf.cpp, gguf_init_from_reader"
TYPES = "llama.cpp, ggml/src/ggml.c, type_traits; gguf 0.19, gguf/constants.py, GGML_QUANT_SIZES"
GRIDS = {"Q4_0": (4, True), "Q4_1": (4, False), "Q8_0": (8, True)}
BLOCK = 32
ROUNDS = "on a CPU, activations are rounded to 8 bits where they meet blocks: results differ a little from float ones"


def check(subject: Subject) -> Verdict:
    """What llama.cpp does with a checkpoint."""
    found = matrices(subject)
    if subject.quant_method != "gguf":
        text = (
            "it reads GGUF files only; --format gguf writes one, convert_hf_to_gguf.py makes one of a float checkpoint"
        )
        return Verdict("llama-cpp", None, (Problem(text, FILE),))
    problems = [
        *refusals(
            found,
            lambda m: (
                m.grid.variant in GRIDS
                and (GRIDS[m.grid.variant] != (m.grid.bits, m.grid.symmetric) or m.grid.group_size != BLOCK)
            ),
            "types are Q4_0 (4 bits symmetric), Q4_1 (4 asymmetric) and Q8_0 (8 symmetric), in groups of 32",
            TYPES,
        ),
        *refusals(
            found,
            lambda m: m.grid.variant in GRIDS and m.in_features % BLOCK != 0,
            "rows must be a multiple of 32 long",
            FILE,
        ),
    ]
    kernel = None if problems else "ggml: " + ", ".join(sorted({m.grid.variant for m in found}))
    notes = (ROUNDS,) + (("splits layers over devices by its own rules",) if subject.tensor_parallel > 1 else ())
    return Verdict("llama-cpp", kernel, tuple(problems), notes)


CONTRACT = Contract(
    name="llama-cpp",
    summary="llama.cpp and what is built on it",
    versions="GGUF version 3; Q4_0 and Q8_0 run on a CPU with node-llama-cpp 3.22.1, the rest read in its source",
    tried=True,
    check=check,
)
