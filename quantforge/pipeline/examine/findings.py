"""What an examination finds, as data."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from quantforge.contracts import Verdict
from quantforge.errors import SourceError

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or may be.

    Attributes:
        severity: an ``error`` makes a checkpoint unfit (it is refused, or loaded and silently wrong); a ``warning`` is
            something to know.
        code: the kind of fault, one word for programs.
        where: the file, tensor, site or key of a config.
        text: what is wrong, with the numbers, and what to do.
    """

    severity: Severity
    code: str
    where: str
    text: str


def error(code: str, where: str, text: str) -> Finding:
    return Finding("error", code, where, text)


def warning(code: str, where: str, text: str) -> Finding:
    return Finding("warning", code, where, text)


def refused(fault: SourceError, where: str) -> Finding:
    """What a part of the toolkit refused to read."""
    return Finding("error", fault.code, where, str(fault))


@dataclass(frozen=True)
class Examination:
    """Everything that was found in one checkpoint directory.

    Attributes:
        path: the directory.
        quant_method: of its config, or inferred; None for a float checkpoint.
        tensors: how many were read.
        sites: how many quantized sites were decoded.
        findings: errors and warnings, in the order of the files.
        notes: what was inferred or could not be told, in words.
        errors_by_site: with a reference, ``|w - original| / |original|`` of each site.
        verdicts: what each server does with it.
    """

    path: str
    quant_method: str | None
    tensors: int
    sites: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    errors_by_site: Mapping[str, float] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()

    @property
    def ok(self) -> bool:
        """No errors; warnings do not count."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def listed(names: Iterable[str], shown: int = 3) -> str:
    """The first names and how many more there are."""
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes; NaN equals NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
