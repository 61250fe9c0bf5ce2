"""The quickstart's closing table, from the JSON that `quantforge quantize` and `quantforge eval` printed.

python scripts/quickstart_table.py quantize.json eval.json
"""

import json
import sys
from pathlib import Path
from typing import Any


def megabytes(folder: str) -> str:
    """All files of a checkpoint, tokenizer included, in 10^6 bytes."""
    return f"{sum(file.stat().st_size for file in Path(folder).iterdir()) / 1e6:.1f}"


def rows(run: dict[str, Any], score: dict[str, Any]) -> list[tuple[str, ...]]:
    original, quantized = megabytes(run["recipe"]["model"]), megabytes(run["report"]["outputs"][0]["path"])
    bits = f"{run['plan']['bits_per_weight']:.3f}"
    distance = score["divergence"]
    kl = f"{distance['kl']:.4f} ({distance['kl_se']:.4f})"
    top1 = f"{distance['top1']:.4f} ({distance['top1_se']:.4f})"
    return [
        ("", "MB", "bits/weight", "perplexity", "KL (SE)", "top-1 (SE)"),
        ("original", original, "16", f"{distance['reference_ppl']:.3f}", "0", "1"),
        ("quantized", quantized, bits, f"{score['ppl']:.3f}", kl, top1),
    ]


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python scripts/quickstart_table.py quantize.json eval.json")
    run, score = (json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:])
    table = rows(run, score)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"protocol: {score['protocol']}; bits/weight counts quantized weights only; embeddings stay in 16 bits")


if __name__ == "__main__":
    main()
