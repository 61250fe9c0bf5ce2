"""What servers accept, one file a server: rules as data and pure functions, each with the place where it is written.

A contract is asked about a checkpoint that is planned or exists, ours or another tool's, and needs nothing but its
config and the shapes and grids of its sites. To add a server, write ``contracts/<name>.py`` with a constant
``CONTRACT``. Dashes in a server's name are underscores in its file name. What several share is in ``_rules.py``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantforge.errors import UsageError
from quantforge.registry import load, names_in


@dataclass(frozen=True)
class SiteGrid:
    """One quantized site as its files and config describe it. `group_size` None means one scale per row.

    Attributes:
        variant: the layout: ``gptq``, ``gptq_v2``, ``pack-quantized``, ``int-quantized``, ``gemm``, ``Q4_0``, ...
        activation_bits: width of the inputs where they are quantized too, else None.
        act_order: True when the file assigns inputs to groups in an order of its own (``g_idx``).
    """

    out_features: int
    in_features: int
    bits: int
    group_size: int | None
    symmetric: bool
    variant: str
    activation_bits: int | None = None
    act_order: bool = False


@dataclass(frozen=True)
class Subject:
    """A checkpoint as a server would be given it.

    Attributes:
        config: config.json, ``quantization_config`` included where there is one.
        quant_method: ``gptq``, ``awq``, ``compressed-tensors``, ``gguf``; None for a float checkpoint.
        sites: the quantized sites by checkpoint name (without ``.weight``).
        kept: names of linear modules inside decoder layers that stay in floating point, and of the output head.
        scale_dtype: dtype of the scales, ``float16`` or ``bfloat16``.
        tensor_parallel: over how many devices each layer is split.
    """

    config: Mapping[str, Any]
    quant_method: str | None
    sites: Mapping[str, SiteGrid] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    scale_dtype: str | None = None
    tensor_parallel: int = 1


@dataclass(frozen=True)
class Problem:
    """Why a server refuses, or misreads: `text` says what, where (sites), the numbers and what to change.

    `source` is where the rule is written (project, version, file and symbol).
    """

    text: str
    source: str


@dataclass(frozen=True)
class Verdict:
    """What a server does with a subject.

    Attributes:
        kernel: what will multiply (``Marlin``, ``CPUWNA16``, ...); None when it refuses.
        problems: every reason for a refusal; empty when it loads.
        notes: what works less well than it could, or was ignored.
        remedy: what has it load all the same, where it refuses.
    """

    server: str
    kernel: str | None
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    remedy: str | None = None

    @property
    def loads(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class Contract:
    """The rules of one server. `versions` says of which they are; `tried` whether this project ran it, or read it."""

    name: str
    summary: str
    versions: str
    tried: bool
    check: Callable[[Subject], Verdict]


def contract_names() -> list[str]:
    """Names of all servers, from the files of this folder."""
    return names_in(__path__)


def load_contract(name: str) -> Contract:
    """Import one contract by name; raises UsageError naming the known ones."""
    return load(__name__, __path__, name, "CONTRACT", Contract, UsageError)


def all_verdicts(subject: Subject) -> list[Verdict]:
    """What every server does with `subject`, by name."""
    return [load_contract(name).check(subject) for name in contract_names()]
