"""What `generate` and `bench` show."""

from typing import TYPE_CHECKING

from quantforge.cli.runview import megabytes

if TYPE_CHECKING:
    from quantforge.cli.ui import Ui
    from quantforge.runtime.bench import Benchmark, LayerTime
    from quantforge.runtime.generate import Generated


def show_generated(ui: "Ui", generated: "Generated") -> None:
    """The end of a text that was already written, and on stderr how fast it came; or everything as JSON."""
    if ui.as_json:
        ui.document(generated.to_json())
        return
    ui.out.file.write("\n")
    rate = generated.decode_tokens_per_second
    decoded = "" if rate is None else f", then {rate:.1f} tokens/s"
    ui.say(
        f"{generated.prompt_tokens} prompt tokens in {generated.prefill_seconds:.2f} s{decoded} "
        f"({generated.new_tokens} new tokens)"
    )


def show_benchmark(ui: "Ui", found: "Benchmark") -> None:
    """Two tables: models, and layers by shape."""
    if ui.as_json:
        ui.document(found.to_json())
        return
    ui.table(("machine", ""), [(name.replace("_", " "), _shown(value)) for name, value in found.machine.items()])
    rows: list[tuple[str, ...]] = [
        (
            speed.name,
            megabytes(speed.weight_bytes),
            f"{speed.prefill_tokens_per_second:.1f}",
            f"{speed.decode_tokens_per_second:.2f}",
        )
        for speed in found.models
    ]
    ui.table(("model", "weights", f"prefill of {found.prompt_tokens}, tokens/s", "decode, tokens/s"), rows)
    names = list(found.layers[0].dense_seconds) if found.layers else []
    limit = "read ms" if all(t.peak_share is None for t in found.layers) else "share of peak"
    header = ("layer [out, in]", "grid", "count", "tokens", "packed ms", *(f"{name} ms" for name in names), limit)
    ui.table(
        header,
        [
            (
                f"[{t.out_features}, {t.in_features}]",
                f"{t.bits} bits, {'a scale a row' if t.group_size >= t.in_features else f'group {t.group_size}'}",
                str(t.layers),
                str(t.tokens),
                f"{t.packed_seconds * 1e3:.3f}",
                *(f"{t.dense_seconds[name] * 1e3:.3f}" for name in names),
                _limit(t),
            )
            for t in found.layers
        ],
    )
    ui.say(
        f"Batch 1; dense models have random weights. Layers by shape: the least time of one, bfloat16 inputs"
        f"{'; read: torch adds up the bytes of its codes' if limit == 'read ms' else ''}."
    )


def _shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _limit(time: "LayerTime") -> str:
    """What memory allows, or how near a layer came to it."""
    if time.peak_share is not None:
        return f"{time.peak_share:.0%}"
    return "-" if time.read_seconds is None else f"{time.read_seconds * 1e3:.3f}"
