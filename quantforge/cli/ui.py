"""Everything a user sees. Results go to stdout (as JSON when asked), progress and remarks to stderr.

On a terminal a progress bar stays at the bottom; elsewhere (a file, a pipe) the same facts are plain lines.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from quantforge import report as events
from quantforge.cli import checkpointview, examined, outlookview
from quantforge.cli.runview import RunView, chosen, folded, gathered, leaf, megabytes
from quantforge.reading import ResolvedRecipe
from quantforge.recipe import Recipe, variant_name
from quantforge.shipped import summary_of

if TYPE_CHECKING:
    from quantforge.contracts import Verdict
    from quantforge.evaluate.divergence import EvalResult
    from quantforge.pipeline.convert import Conversion
    from quantforge.pipeline.describe import CheckpointDescription
    from quantforge.pipeline.examine import Examination
    from quantforge.pipeline.outlook import Outlook
    from quantforge.pipeline.plan import Plan
    from quantforge.pipeline.repair import Repaired

Advance = Callable[[str, int, int], None]


class Ui:
    """Renders one command. `out` and `err` are stdout and stderr unless a test gives others."""

    def __init__(
        self, *, as_json: bool = False, quiet: bool = False, out: Console | None = None, err: Console | None = None
    ) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.out = out or Console(markup=False, highlight=False, emoji=False)
        self.err = err or Console(markup=False, highlight=False, emoji=False, stderr=True)
        self._noted: set[str] = set()
        self._verified: set[str] = set()

    # -------------------------------------------------------------------------------------------- stderr

    def say(self, text: str) -> None:
        """A remark or a line of progress; silent under --quiet."""
        if not self.quiet:
            self.err.print(text, soft_wrap=True)

    def insist(self, text: str) -> None:
        """Something a user must hear, --quiet or not."""
        self.err.print(text, soft_wrap=True)

    def warn(self, text: str) -> None:
        """A warning, --quiet or not."""
        self.insist(f"warning: {text.removeprefix('warning: ')}")

    def notes(self, notes: Iterable[str]) -> None:
        """Remarks, each said once however often it comes back."""
        for note in notes:
            if note not in self._noted:
                self._noted.add(note)
                self.say(note if note.startswith("warning: ") else f"note: {note}")

    @contextmanager
    def progress(self) -> Iterator[Advance]:
        """Gives a callback (what, done, total): a bar on a terminal, otherwise a line at each tenth of the way."""
        if self.quiet or not self.err.is_terminal:
            tenths: dict[str, int] = {}

            def lines(what: str, done: int, total: int) -> None:
                tenth = 10 * done // total if total else 10
                if tenths.get(what) != tenth:
                    tenths[what] = tenth
                    self.say(f"{what} {done}/{total}")

            yield lines
            return
        with _bar(self.err) as bar:
            tasks: dict[str, TaskID] = {}

            def advance(what: str, done: int, total: int) -> None:
                if what not in tasks:
                    tasks[what] = bar.add_task(what, total=total, remark="")
                bar.update(tasks[what], completed=done, total=total)

            yield advance

    def follow(self, run: Iterable[events.Event]) -> events.RunReport:
        """Render a run while it goes on, one line a layer; returns its report."""
        view = self._follow(run)
        self._verified = view.verified
        assert view.finished is not None, "a run ends with RunFinished"
        return view.finished

    def follow_many(self, run: Iterable[events.Event]) -> list[events.RunReport]:
        """Render a run of several variants while it goes on; returns their reports, in the order of the variants."""
        finished = [view.finished for view in self._follow(run).variants.values()]
        return [report for report in finished if report is not None]

    def _follow(self, run: Iterable[events.Event]) -> RunView:
        view = RunView(self)
        if self.quiet or not self.err.is_terminal:
            for event in run:
                view.show(event)
        else:
            with _bar(self.err) as bar:
                view.bar = bar
                for event in run:
                    view.show(event)
        return view

    # -------------------------------------------------------------------------------------------- stdout

    def document(self, data: Any) -> None:
        """The result as JSON."""
        self._json(data)

    def _json(self, data: Any) -> None:
        self.out.file.write(json.dumps(data, indent=2, ensure_ascii=False, default=str) + "\n")
        self.out.file.flush()

    def facts(self, facts: Iterable[tuple[str, str]]) -> None:
        for name, value in facts:
            self.out.print(f"{name:<12}{value}", soft_wrap=True)

    def plan(
        self, resolved: ResolvedRecipe, plan: "Plan", servers: Sequence[tuple[str, Sequence["Verdict"]]] = ()
    ) -> None:
        """What would be done, by `--dry-run`; `servers` are exports, with what each server does with them."""
        if self.as_json:
            self._json(_document(resolved, plan, None))
            return
        self.facts(
            [
                ("model", f"{resolved.recipe.model} ({plan.model_type}, {plan.layers} layers)"),
                ("method", f"{plan.method}, {plan.label}"),
                *([("cache", f"scales for {plan.kv_cache.label()}")] if plan.kv_cache is not None else []),
                ("formats", ", ".join(plan.formats)),
                ("size", _planned_size(resolved, plan)),
                ("output", f"{plan.output} (not written: this is a dry run)"),
            ]
        )
        self.table(*outlookview.site_table(plan))
        self.kept(plan.kept)
        outlookview.show_servers(self, servers)
        for note in (*resolved.notes, *plan.notes):
            self.facts([("note", note)])

    def outlook(self, recipe: Recipe, notes: Iterable[str], outlook: "Outlook") -> None:
        """What would come of a recipe, by `plan`."""
        if self.as_json:
            document = {"recipe": recipe.model_dump(mode="json"), "notes": [*notes, *outlook.plan.notes]}
            self._json(document | outlook.to_json())
            return
        outlookview.show(self, recipe, notes, outlook)

    def report(self, resolved: ResolvedRecipe, plan: "Plan", report: events.RunReport) -> None:
        """What was done."""
        if self.as_json:
            self._json(_document(resolved, plan, report))
            return
        bits, ratio = _bits_per_weight(report), _loss_ratio(report)
        self.facts([("method", f"{report.method}, {report.spec_label}")])
        if ratio is not None:
            self.facts([("loss", f"{ratio:.3f} x round to nearest (mean over layers)")])
        if cached := [one for layer in report.layers for one in layer.cache]:
            assert plan.kv_cache is not None, "there are no scales without a plan for them"
            tokens = max(one.tokens for one in cached)
            self.facts([("cache", f"{plan.kv_cache.label()}: {len(cached)} layers, calibrated on {tokens:,} tokens")])
        if folds := [fold for layer in report.layers for fold in layer.transforms]:
            self.facts([("folds", f"{folded(folds)} pairs kept")])
        if (tuned := report.tuning) is not None:
            said = "" if tuned.kept else ", so the scales were left as they were"
            values = f"KL {tuned.kl_before:.4f} -> {tuned.kl_after:.4f} on {tuned.held_out} held-out sequences{said}"
            self.facts([("tuning", values)])
        if report.allocation is not None:
            self.facts([("bits", f"{report.allocation.budget}: {chosen(report.allocation)}")])
            self.table(*_bits_table(report.allocation))
        for output in report.outputs:
            size = _sizes(report.source_bytes, output.tensor_bytes, bits)
            verified = ", read back and verified" if output.format in self._verified else ""
            self.facts(
                [("output", f"{output.path} ({output.format}, {output.tensors} tensors{verified})"), ("size", size)]
            )
        self.kept(report.kept)
        self.facts([("note", note) for note in report.notes])
        for remark in gathered(report.warnings):  # fallbacks are among them
            self.warn(remark)

    def variants(self, done: Sequence[tuple[ResolvedRecipe, "Plan", events.RunReport | None]]) -> None:
        """What was done for each of several variants; without reports, what would be done, by `--dry-run`."""
        if self.as_json:
            self._json({"variants": [_document(*variant) for variant in done]})
            return
        rows: list[tuple[str, ...]] = []
        for resolved, plan, report in done:
            name = variant_name(resolved.recipe, plan.spec.group_size)
            if report is None:
                size = (megabytes(plan.estimated_bytes), f"{plan.bits_per_weight:.3f}") if plan.settled else ("-", "-")
                rows.append((name, *size, "-", str(plan.output)))
                continue
            ratio = _loss_ratio(report)
            loss = "-" if ratio is None else f"{ratio:.3f} x RTN"
            for output in report.outputs:
                bits = f"{_bits_per_weight(report):.3f}"
                rows.append((name, megabytes(output.tensor_bytes), bits, loss, output.path))
        self.table(("variant", "size", "bits/weight", "loss", "output"), rows)
        self.kept({name: reason for _, plan, _ in done for name, reason in plan.kept.items()})
        planned = [(resolved, plan) for resolved, plan, report in done if report is None]
        notes = (note for resolved, plan in planned for note in (*resolved.notes, *plan.notes))
        self.facts([("note", note) for note in dict.fromkeys(notes)])
        for resolved, plan, report in done:
            if report is None:
                continue
            name = variant_name(resolved.recipe, plan.spec.group_size)
            self.facts([("note", f"{name}: {note}") for note in report.notes])
            for remark in gathered(report.warnings):
                self.warn(f"{name}: {remark.removeprefix('warning: ')}")

    def evaluation(self, result: "EvalResult") -> None:
        """Perplexity, and the distance to the reference; the protocol's short name stands beside every number."""
        if self.as_json:
            self._json(result.to_json())
        else:
            checkpointview.evaluation(self, result)

    def description(self, found: "CheckpointDescription") -> None:
        """What a checkpoint holds."""
        if self.as_json:
            self._json(found.to_json())
        else:
            checkpointview.description(self, found)

    def conversion(self, done: "Conversion") -> None:
        """What was written in another format."""
        if self.as_json:
            self._json(done.to_json())
        else:
            checkpointview.conversion(self, done)

    def examination(self, found: "Examination", done: "Repaired | None" = None) -> None:
        """What was found in a checkpoint; with a repair, what was done about it, and what is left."""
        if self.as_json:
            self._json(found.to_json() if done is None else {"before": found.to_json(), **done.to_json()})
        else:
            examined.show(self, found, done)

    def recipes(self, shipped: Sequence[tuple[str, str, Recipe]]) -> None:
        """The recipes that come with the package: name, text, what it says."""
        if self.as_json:
            self._json([_shipped(*one) for one in shipped])
            return
        rows: list[tuple[str, ...]] = [
            (name, recipe.budget_label or str(recipe.bits), recipe.method, summary_of(text))
            for name, text, recipe in shipped
        ]
        self.table(("name", "bits", "method", "what it is for"), rows)

    def recipe(self, name: str, text: str, recipe: Recipe) -> None:
        """One recipe, as it is written."""
        if self.as_json:
            self._json(_shipped(name, text, recipe) | {"text": text})
        else:
            self.out.file.write(text)

    def copied(self, name: str, path: Path) -> None:
        """Where a copy of a recipe is."""
        self.facts([("copied", f"{name} -> {path}")])

    def kept(self, kept: dict[str, str]) -> None:
        """Parameters left in floating point, by reason, a few names each."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in kept.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            self.facts([("kept", f"{', '.join(names[:3])}{more}: {reason}")])

    def table(self, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
        if not rows:
            return
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        for row in (header, *rows):
            line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self.out.print(line.rstrip(), soft_wrap=True)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[remark]}", markup=False),
        console=console,
        transient=True,
    )


def _document(resolved: ResolvedRecipe, plan: "Plan", report: events.RunReport | None) -> dict[str, Any]:
    """The JSON of `quantize`; `report` is null for a dry run."""
    return {
        "recipe": resolved.recipe.model_dump(mode="json"),
        "notes": [*resolved.notes, *plan.notes],
        "plan": plan.to_json(),
        "report": None if report is None else report.to_json(),
    }


def _shipped(name: str, text: str, recipe: Recipe) -> dict[str, Any]:
    settings = recipe.model_dump(mode="json", exclude={"model", "output"} | ({"bits"} if recipe.budget else set()))
    return {"name": name, "summary": summary_of(text), "recipe": settings}


def _bits_per_weight(report: events.RunReport) -> float:
    sites = [site for layer in report.layers for site in layer.sites]
    weights = sum(site.out_features * site.in_features for site in sites)
    return sum(site.bits_per_weight * site.out_features * site.in_features for site in sites) / max(weights, 1)


def _loss_ratio(report: events.RunReport) -> float | None:
    """Mean over layers; None when nothing was measured."""
    ratios = [layer.loss_ratio for layer in report.layers if layer.loss_ratio is not None]
    return sum(ratios) / len(ratios) if ratios else None


def _planned_size(resolved: ResolvedRecipe, plan: "Plan") -> str:
    if plan.settled:
        return _sizes(plan.source_bytes, plan.estimated_bytes, plan.bits_per_weight) + " (estimated)"
    return (
        f"{megabytes(plan.source_bytes)} -> depends on the bits, which are chosen for {len(plan.units)} units by what "
        f"the weights say ({resolved.recipe.budget_label})"
    )


def _sizes(before_bytes: int, after_bytes: int, bits_per_weight: float) -> str:
    return f"{megabytes(before_bytes)} -> {megabytes(after_bytes)}, {bits_per_weight:.3f} bits per quantized weight"


def _bits_table(allocation: events.Allocation) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows: for each kind of unit, in how many layers it got how many bits."""
    bits = sorted({unit.bits for unit in allocation.units})
    counted: dict[str, Counter[int]] = {}
    for unit in allocation.units:
        counted.setdefault(leaf(unit.unit), Counter())[unit.bits] += 1
    rows = [(leaf, *(str(counts[width] or "-") for width in bits)) for leaf, counts in counted.items()]
    return ("units", *(f"{width} bits" for width in bits)), rows
