"""What is told of a checkpoint that exists: how it scores, what it holds, what it was converted into."""

from collections import Counter
from typing import TYPE_CHECKING

from quantforge.cli.runview import leaf, megabytes

if TYPE_CHECKING:
    from quantforge.cli.ui import Ui
    from quantforge.evaluate.divergence import EvalResult
    from quantforge.pipeline.convert import Conversion
    from quantforge.pipeline.describe import CheckpointDescription


def evaluation(ui: "Ui", result: "EvalResult") -> None:
    """Perplexity, and the distance to the reference; the protocol's short name stands beside every number."""
    protocol = f"[{result.protocol.partition(' ')[0]}]"
    ui.notes(result.notes)
    facts = [("perplexity", f"{result.ppl:.4f}{_error(result.ppl_se, 4)}  {protocol}")]
    if (distance := result.divergence) is not None:
        top1 = f"{100 * distance.top1:.2f}%{_error(100 * distance.top1_se, 2)}"
        facts += [
            ("reference", f"{distance.reference_ppl:.4f}  {protocol}"),
            ("KL", f"{distance.kl:.5f}{_error(distance.kl_se, 5)} nats a token  {protocol}"),
            ("top-1", f"{top1} agreement  {protocol}"),
        ]
    if result.activations is not None:
        facts.append(("activations", f"quantized: {result.activations}"))
    if result.kv_cache is not None:
        facts.append(("cache", f"rounded: {result.kv_cache}"))
    facts.append(("on", f"{result.source}: {result.predictions:,} predictions in {result.windows} windows"))
    ui.facts([*facts, ("+-", "one standard error"), ("protocol", result.protocol)])


def description(ui: "Ui", found: "CheckpointDescription") -> None:
    """What a checkpoint holds."""
    ui.facts(
        [
            ("checkpoint", f"{found.path} ({found.model_type}, {found.parameters:,} parameters)"),
            *(("scheme", part) for part in found.scheme.split("; ")),
            *([("cache", found.kv_cache)] if found.kv_cache is not None else []),
            ("format", found.format),
            ("size", megabytes(found.total_bytes)),
        ]
    )
    if found.quantized:
        ui.facts([("bits", f"{found.bits_per_weight:.3f} per quantized weight, every byte stored for it")])
    rows = Counter((leaf(s.name), tuple(s.shape), s.bits, s.group_size) for s in found.quantized)
    ui.table(
        ("site", "count", "shape", "bits", "group"),
        [
            (leaf, str(count), " x ".join(map(str, shape)), str(bits), "row" if group is None else str(group))
            for (leaf, shape, bits, group), count in rows.items()
        ],
    )
    ui.kept(found.kept)
    ui.table(("file", "size"), [(name, _file_size(size)) for name, size in found.files.items()])


def conversion(ui: "Ui", done: "Conversion") -> None:
    """What was written in another format."""
    ui.facts(
        [
            ("source", f"{done.source} ({done.source_format})"),
            ("grid", f"{done.spec_label}, {done.scale_dtype} scales, {done.sites} sites"),
            ("output", f"{done.output} ({done.format}, {done.tensors} tensors, equal to the source's)"),
            ("size", megabytes(done.total_bytes)),
        ]
    )
    for note in done.notes:
        if note.startswith("warning:"):
            ui.warn(note)
        else:
            ui.facts([("note", note)])


def _file_size(size_bytes: int) -> str:
    return megabytes(size_bytes) if size_bytes >= 100_000 else f"{size_bytes:,} bytes"


def _error(standard_error: float | None, digits: int) -> str:
    return "" if standard_error is None else f" +- {standard_error:.{digits}f}"
