"""What `generate` and `bench` show."""

from typing import TYPE_CHECKING

from quantforge.cli.runview import megabytes

if TYPE_CHECKING:
    from quantforge.cli.ui import Ui
    from quantforge.runtime.bench import Benchmark
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
    ui.facts((name, str(value)) for name, value in found.machine.items())
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
    header = ("layer [out, in]", "grid", "count", "tokens", "packed ms", *(f"{name} ms" for name in names), "read ms")
    ui.table(
        header,
        [
            (
                f"[{t.out_features}, {t.in_features}]",
                f"{t.bits} bits, group {t.group_size}",
                str(t.layers),
                str(t.tokens),
                f"{t.packed_seconds * 1e3:.3f}",
                *(f"{t.dense_seconds[name] * 1e3:.3f}" for name in names),
                "-" if t.read_seconds is None else f"{t.read_seconds * 1e3:.3f}",
            )
            for t in found.layers
        ],
    )
