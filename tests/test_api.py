"""The Python interface: the names of the command line, importable from the package itself."""

from pathlib import Path

import pytest

import quantforge


def test_every_public_name_is_the_one_of_its_module() -> None:
    from quantforge.pipeline.run import quantize
    from quantforge.recipe import Recipe

    assert quantforge.Recipe is Recipe
    assert quantforge.quantize is quantize
    for name in quantforge.__all__:
        assert getattr(quantforge, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        quantforge.quantise  # type: ignore[attr-defined]  # noqa: B018


def test_the_example_of_the_package_runs(tiny_llama: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("every group shares one scale and every layer is read back " * 200)
    recipe = quantforge.Recipe(model=str(tiny_llama), bits=4, group_size=64, output=str(tmp_path / "out"), method="rtn")
    events = list(quantforge.quantize(recipe, quantforge.make_plan(recipe)))
    assert type(events[-1]).__name__ == "RunFinished"
    result = quantforge.evaluate_checkpoint(
        str(tmp_path / "out"), reference=recipe.model, text=str(text), window=64, windows=2
    )
    assert result.divergence is not None
    assert 0 < result.divergence.kl < 1 and result.ppl > 1
    found = quantforge.describe_checkpoint(str(tmp_path / "out"))
    assert (len(found.quantized), found.scheme) == (14, "4 bits, group 64, symmetric (pack-quantized): 14 sites")
