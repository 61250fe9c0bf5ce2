"""What an examination found, in words: facts for a list, rows for a table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quantforge.cli.outlookview import show_servers

if TYPE_CHECKING:
    from quantforge.cli.ui import Ui
    from quantforge.pipeline.examine import Examination, Finding
    from quantforge.pipeline.repair import Repaired

Fact = tuple[str, str]
SHOWN = 3


def show(ui: "Ui", found: "Examination", done: "Repaired | None") -> None:
    """Findings, repairs and what is left, verdicts of servers, and how it ends."""
    after = found if done is None else done.after
    ui.facts(_facts(found))
    if done is not None:
        ui.facts([("repaired", plain(text)) for text in done.repairs])
        ui.facts([("output", f"{done.path}, examined again"), *_facts(after)[1:]])
    show_servers(ui, [("", after.verdicts)] if after.verdicts else [])
    errors, warnings = len(after.errors), len(after.findings) - len(after.errors)
    ui.facts([("result", f"errors: {errors}, warnings: {warnings}" if errors or warnings else "sound")])


def _facts(found: "Examination") -> list[Fact]:
    """The checkpoint, every kind of finding with its first examples, what was inferred, distances from the original."""
    kind = found.quant_method or "floating point"
    sites = f", {found.sites} quantized sites" if found.sites else ""
    facts = [("checkpoint", f"{found.path} ({kind}, {found.tensors} tensors{sites})")]
    for severity in ("error", "warning"):
        kinds: dict[str, list[Finding]] = {}
        for finding in found.findings:
            if finding.severity == severity:
                kinds.setdefault(finding.code, []).append(finding)
        facts += [fact for code, findings in kinds.items() for fact in _of_one_kind(severity, code, findings)]
    facts += [("note", plain(note)) for note in found.notes]
    if found.errors_by_site:
        errors = found.errors_by_site
        nearest, farthest = min(errors.values()), max(errors.values())
        name = max(errors, key=lambda site: errors[site])
        said = f"{nearest:.4f} to {farthest:.4f} (relative error of {len(errors)} sites), most {plain(name)}"
        facts.append(("distance", said))
    return facts


def _of_one_kind(severity: str, code: str, findings: "Sequence[Finding]") -> list[Fact]:
    facts = [(severity, f"{code}: {plain(finding.text)}") for finding in findings[:SHOWN]]
    if len(findings) > SHOWN:
        facts.append((severity, f"{code}: and {len(findings) - SHOWN} more (--json has all)"))
    return facts


def plain(text: str) -> str:
    """Text from a file without what would steer a terminal."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
