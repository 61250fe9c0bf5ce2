"""What `plan` shows, and what `quantize --dry-run` says about servers, as facts and tables."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from quantforge.cli.runview import duration, leaf
from quantforge.sizes import size_label

if TYPE_CHECKING:
    from quantforge.cli.ui import Ui
    from quantforge.contracts import Verdict
    from quantforge.pipeline.outlook import Outlook
    from quantforge.pipeline.plan import Plan
    from quantforge.recipe import Recipe

Facts = list[tuple[str, str]]
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def show(ui: "Ui", recipe: "Recipe", notes: Iterable[str], outlook: "Outlook") -> None:
    """Everything that `plan` tells."""
    ui.facts(heading(recipe, outlook))
    ui.table(*site_table(outlook.plan))
    ui.kept(outlook.plan.kept)
    ui.table(*serving_table(outlook))
    ui.facts(cache_facts(outlook))
    show_servers(ui, [(variant.name, variant.verdicts) for variant in outlook.variants if variant.verdicts])
    ui.facts([("note", note) for note in (*notes, *outlook.plan.notes)])


def show_servers(ui: "Ui", exports: Sequence[tuple[str, Sequence["Verdict"]]]) -> None:
    """What each server does with each export."""
    for name, verdicts in exports:
        if len(exports) > 1:
            ui.facts([("servers", f"for {name}")])
        ui.table(*server_table(verdicts))
        ui.facts(remarks(verdicts))


def heading(recipe: "Recipe", outlook: "Outlook") -> Facts:
    """The model, what is done to it, and what that takes."""
    from quantforge.pipeline.estimate import FAST, MEMORY_ASSUMES, SLOW, TIME_ASSUMES

    plan, estimate = outlook.plan, outlook.estimate
    stage, peak_bytes = estimate.peak
    seen = " (config only: shapes are the config's, no weights were looked at)" if outlook.outline else ""
    share = f"{plan.weights / 1e9:,.3f} of {outlook.parameters / 1e9:,.3f} billion"
    slow, fast = (duration(max(1, estimate.seconds(speed))) for speed in (SLOW, FAST))
    facts = [
        ("model", f"{recipe.model} ({plan.model_type}, {plan.layers} layers){seen}"),
        ("method", f"{plan.method}, {plan.label}"),
        ("quantized", f"{share} parameters, {len(plan.sites)} matrices"),
        ("memory", f"about {size_label(peak_bytes)} at the most, while {stage} ({MEMORY_ASSUMES})"),
        ("time", f"roughly {slow} or {fast} ({TIME_ASSUMES})"),
    ]
    return facts + ([("disk", f"{size_label(plan.scratch_bytes)} for a while")] if plan.scratch_bytes else [])


def site_table(plan: "Plan") -> Table:
    """Sites by shape, and by grid where there are several."""
    several = len(set(plan.specs.values())) > 1
    counted: dict[tuple[str, str, str], int] = {}
    for site in plan.sites:
        grid = plan.specs[site.name].label() if plan.settled else "chosen by the budget"
        row = (leaf(site.name), f"{site.out_features} x {site.in_features}", grid)
        counted[row] = counted.get(row, 0) + 1
    return (
        ("site", "count", "out x in", *(("grid",) if several else ())),
        [(name, str(count), shape, *((grid,) if several else ())) for (name, shape, grid), count in counted.items()],
    )


def serving_table(outlook: "Outlook") -> Table:
    """What each thing to serve takes."""
    devices = outlook.load.tensor_parallel
    each = "" if devices == 1 else f" on each of {devices}"
    rows: list[tuple[str, ...]] = [
        (
            variant.name,
            size_label(variant.total_bytes),
            "-" if variant.stored_bits is None else f"{variant.stored_bits:.3f}",
            size_label(variant.weight_bytes),
            size_label(variant.kv_bytes),
            size_label(variant.serving_bytes),
        )
        for variant in outlook.variants
    ]
    return (("serving", "size", "bits/weight", f"weights{each}", "cache", "together"), rows)


def cache_facts(outlook: "Outlook") -> Facts:
    """What the cache holds, and what was not counted."""
    load = outlook.load
    facts = [("cache", f"{cache.layers} layers: {cache.label}") for cache in outlook.caches if cache.counted]
    widths = dict.fromkeys(variant.kv_bits for variant in outlook.variants)
    bits = " or ".join(map(str, widths))
    facts.append(("cache", f"{load.batch} sequences of {load.context} tokens, {bits} bits a number"))
    if (spec := outlook.plan.kv_cache) is not None:
        facts.append(("cache", f"scales: {spec.label()}"))
    facts += [
        ("not counted", f"the state of {cache.layers} layers of {cache.label}: the config does not say how large it is")
        for cache in outlook.uncounted
    ]
    return [*facts, ("not counted", "activations, buffers and scales of a quantized cache while serving")]


def server_table(verdicts: Iterable["Verdict"]) -> Table:
    """Which servers take an export, by which kernel."""
    from quantforge.contracts import load_contract

    rows: list[tuple[str, ...]] = [
        (verdict.server, verdict.kernel or "refuses", load_contract(verdict.server).versions) for verdict in verdicts
    ]
    return (("server", "kernel", "rules of"), rows)


def remarks(verdicts: Iterable["Verdict"]) -> Facts:
    """Why servers refuse, with where the rule is written, and what works less well than it could."""
    facts: Facts = []
    for verdict in verdicts:
        facts += [("refused", f"{verdict.server}: {p.text} [{p.source}]") for p in verdict.problems]
        facts += [("remedy", f"{verdict.server}: {verdict.remedy}")] if verdict.remedy else []
        facts += [("remark", f"{verdict.server}: {note}") for note in verdict.notes if verdict.loads]
    return facts
