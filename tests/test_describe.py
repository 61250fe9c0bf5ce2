"""What `inspect` says about a checkpoint, against bytes counted by hand."""

from pathlib import Path

import pytest

from quantforge.pipeline.describe import describe_checkpoint
from quantforge.pipeline.plan import make_plan
from quantforge.pipeline.run import quantize
from quantforge.recipe import Recipe


@pytest.mark.parametrize(
    ("name", "extra_bits"),
    [
        ("gptq", 4 * 2 / 128 + 32 / 128),  # a zero for each of 2 groups in a row, g_idx once for all 128 rows
        ("compressed-tensors", 2 * 64 / (128 * 128)),  # weight_shape
    ],
)
def test_bits_per_weight_of_a_checkpoint_count_what_the_format_adds_to_the_grid(
    tiny_llama: Path, tmp_path: Path, name: str, extra_bits: float
) -> None:
    recipe = Recipe(model=str(tiny_llama), output=str(tmp_path / "out"), group_size=64, method="rtn", formats=(name,))
    plan = make_plan(recipe)
    assert list(quantize(recipe, plan))
    row = next(
        row for row in describe_checkpoint(str(tmp_path / "out")).quantized if row.name.endswith("0.self_attn.q_proj")
    )
    grid = plan.spec.bits_per_weight(128)
    assert (row.shape, grid) == ((128, 128), 4.25)
    assert row.bits_per_weight == pytest.approx(grid + extra_bits, abs=1e-12)
