"""`sequential: none`: sites are solved on the inputs of the original model, each layer running once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_pipeline import contents, finish, recipe_for

from quantforge.model.observe import InputGroup
from quantforge.model.streamed import StreamedModel, StreamedPass
from quantforge.numerics.activations import quantize_tokens
from quantforge.pipeline import together
from quantforge.pipeline.plan import Plan, make_plan
from quantforge.pipeline.run import quantize
from quantforge.recipe import Recipe
from quantforge.report import Event, LayerDone
from quantforge.spec import ActivationSpec

SITES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")  # one of each input group


@pytest.fixture
def recipe(tiny_llama: Path, text: Path, tmp_path: Path) -> Recipe:
    return recipe_for(tiny_llama, tmp_path / "out", text, sequential="none", bits=3, token_weights="none")


def but(recipe: Recipe, output: Path, **changes: Any) -> Recipe:
    return Recipe(**recipe.model_dump(exclude={"output"}, exclude_unset=True) | {"output": str(output)} | changes)


@pytest.fixture
def grams(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Those that the solvers are given, in order."""
    seen: list[torch.Tensor] = []
    original = together.solve_sites

    def spy(plan: Plan, sites: Any, modules: Any, group: InputGroup) -> Any:
        seen.append(group.gram.double())
        return original(plan, sites, modules, group)

    monkeypatch.setattr(together, "solve_sites", spy)
    return seen


def plain_inputs(model_path: Path, tokens: torch.Tensor) -> list[torch.Tensor]:
    """[tokens, in] of each input group of each layer, in the model as transformers runs it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    inputs: list[torch.Tensor] = []
    for layer in model.model.layers:
        for name in SITES:
            layer.get_submodule(name).register_forward_pre_hook(lambda _m, args: inputs.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        model(tokens, use_cache=False)
    return inputs


def tokens_of(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    begun: list[torch.Tensor] = []
    original = StreamedModel.begin

    def spy(self: StreamedModel, tokens: torch.Tensor) -> StreamedPass:
        begun.append(tokens)
        return original(self, tokens)

    monkeypatch.setattr(StreamedModel, "begin", spy)
    return begun


@pytest.mark.parametrize("activation_bits", [None, 8])
def test_the_grams_of_every_layer_are_those_of_the_plain_models_inputs_rounded_where_they_will_be(
    recipe: Recipe,
    tmp_path: Path,
    grams: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    activation_bits: int | None,
) -> None:
    begun = tokens_of(recipe, monkeypatch)
    finish(but(recipe, tmp_path / "out", bits=8, group_size=-1, activation_bits=activation_bits))
    inputs = plain_inputs(Path(recipe.model), begun[0])
    assert len(grams) == len(inputs) == 8
    for gram, rows in zip(grams, inputs, strict=True):
        plain = rows.double().T @ rows.double() / len(rows)
        rounded = quantize_tokens(rows, ActivationSpec(8)).double()
        rounded = rounded.T @ rounded / len(rows)
        expected, other = (plain, rounded) if activation_bits is None else (rounded, plain)
        apart = float((gram - expected).norm() / expected.norm())
        # a last bit of an input that lies between two points of the grid can move it by a step
        assert apart < (1e-6 if activation_bits is None else 2e-5) < float((gram - other).norm() / other.norm())


def test_a_layer_runs_once_for_its_statistics_and_the_next_layers_inputs(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    original_observe, original_advance = together.observe, StreamedPass.advance

    def watched(*args: Any, **named: Any) -> Any:
        calls.append(f"observe {args[1]}")
        return original_observe(*args, **named)

    def advanced(self: StreamedPass, index: int) -> None:
        calls.append(f"advance {index}")
        original_advance(self, index)

    monkeypatch.setattr(together, "observe", watched)
    monkeypatch.setattr(StreamedPass, "advance", advanced)
    finish(recipe)
    assert calls == ["observe 0", "observe 1"]
    calls.clear()
    finish(but(recipe, tmp_path / "first", ignore=("model.layers.0.*",)))
    assert calls == ["advance 0", "observe 1"], "a layer without sites only gives the next one its inputs"


def test_only_the_first_layer_is_solved_as_it_is_layer_by_layer(recipe: Recipe, tmp_path: Path) -> None:
    none = finish(recipe)
    layer = finish(but(recipe, tmp_path / "layer", sequential="layer"))
    assert none.layers[0] == layer.layers[0]
    assert none.layers[1] != layer.layers[1]


@pytest.mark.parametrize("method", ["gptq", "awq+gptq", "rtn"])
def test_stopped_after_a_layer_and_rerun_the_output_is_byte_identical(
    recipe: Recipe, tmp_path: Path, method: str
) -> None:
    finish(but(recipe, tmp_path / "whole", method=method, token_weights="gradient"))
    stopped = but(recipe, tmp_path / "stopped", method=method, token_weights="gradient")
    events: Iterator[Event] = quantize(stopped, make_plan(stopped))
    next(event for event in events if isinstance(event, LayerDone))
    events.close()  # type: ignore[attr-defined]
    work = tmp_path / "stopped.partial"
    assert (work / "layer-00000.json").exists() and not (work / "layer-00001.json").exists()
    assert (work / "hidden-00001.safetensors").exists() == (method != "rtn")
    finish(stopped)
    assert contents(tmp_path / "whole") == contents(tmp_path / "stopped")
