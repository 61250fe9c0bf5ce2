"""INT8 activations: rounded as compressed-tensors does, bit for bit, in calibration and in evaluation."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from random_grids import shared_folder
from safetensors.torch import load_file, save_file
from test_pipeline import TOKENS, finish, recipe_for
from torch import nn

from quantforge.errors import PlanError, SourceError, UsageError
from quantforge.model.activations import activation_spec, quantized_inputs, stored_activations
from quantforge.model.packed import open_any
from quantforge.model.source import open_checkpoint
from quantforge.model.streamed import StreamedModel
from quantforge.numerics.activations import quantize_tokens
from quantforge.pipeline.describe import describe_checkpoint
from quantforge.pipeline.plan import make_plan
from quantforge.pipeline.score import evaluate_checkpoint
from quantforge.readers import ActivationScheme
from quantforge.spec import ActivationSpec

INT8 = ActivationSpec()


@pytest.fixture(scope="module")
def w8a8(tiny_llama: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("w8a8") / "out"
    finish(recipe_for(tiny_llama, out, text, bits=8, group_size=-1, activation_bits=8))
    return out


def logits_of(checkpoint: Path, *, rounded: bool = True) -> torch.Tensor:
    streamed = StreamedModel(open_any(checkpoint))
    run = streamed.begin(TOKENS)
    if not rounded:
        run.run_all()
        return torch.stack([run.logits(sample) for sample in range(len(TOKENS))])
    with stored_activations(streamed):
        run.run_all()
        return torch.stack([run.logits(sample) for sample in range(len(TOKENS))])


# ------------------------------------------------------------------------------------------------ the rounding


def library_args() -> Any:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    return quantization.QuantizationArgs(num_bits=8, type="int", strategy="token", dynamic=True, symmetric=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_are_rounded_as_compressed_tensors_does_bit_for_bit(dtype: torch.dtype) -> None:
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    args = library_args()
    values = (torch.randn(3, 50, 96) * torch.logspace(-4, 4, 50).reshape(1, 50, 1)).to(dtype)
    values[0, 0] = 0  # a token of zeros
    values[0, 1, 0] = 1e4  # an outlier
    values[1] = values[1].abs()
    values[2] = -values[2].abs()
    scale, zero = compute_dynamic_scales_and_zp(values, args, nn.Identity())
    expected = fake_quantize(values, scale, zero, args)
    rounded = quantize_tokens(values, INT8)
    assert rounded.dtype == dtype and torch.equal(rounded, expected)
    assert not torch.equal(rounded, values)


def test_every_token_has_its_own_scale_whatever_the_shape() -> None:
    values = torch.tensor([[127.5, 1.0, -0.4], [0.1275, 0.001, -0.0004]])
    expected = torch.tensor([[127.0, 1.0, 0.0], [0.127, 0.001, 0.0]])
    assert torch.allclose(quantize_tokens(values, INT8), expected, rtol=1e-6, atol=0)
    assert torch.equal(quantize_tokens(values.reshape(1, 2, 1, 3), INT8).reshape(2, 3), quantize_tokens(values, INT8))


def test_hooks_round_positional_and_keyword_inputs_once_for_all_who_read_them_and_go_away() -> None:
    first, second = nn.Linear(8, 4), nn.Linear(8, 4)
    seen: list[torch.Tensor] = []
    values = torch.randn(1, 5, 8)
    plain = first(values)
    with quantized_inputs([first, second], INT8):
        for module in (first, second):
            module.register_forward_pre_hook(
                lambda module, args, kwargs: seen.append((*args, *kwargs.values())[0]), with_kwargs=True
            )
        rounded = first(values)
        second(input=values)
        values.mul_(2)
        first(values)
    assert torch.equal(rounded, nn.functional.linear(quantize_tokens(values / 2, INT8), first.weight, first.bias))
    assert seen[0] is seen[1]
    assert torch.equal(seen[2], quantize_tokens(values, INT8)), "a tensor changed in place is rounded again"
    assert torch.equal(first(values / 2), plain)


@pytest.mark.parametrize(
    "changes", [{"bits": 4}, {"kind": "float"}, {"strategy": "tensor"}, {"dynamic": False}, {"symmetric": False}]
)
def test_other_activations_are_refused_rather_than_left_out(changes: dict[str, Any]) -> None:
    good = {"bits": 8, "kind": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    assert activation_spec(ActivationScheme(**good), "a.b") == INT8  # type: ignore[arg-type]
    with pytest.raises(SourceError, match=r"a\.b: .* cannot be run here"):
        activation_spec(ActivationScheme(**good | changes), "a.b")
    with pytest.raises(UsageError, match="8 bits only"):
        ActivationSpec(4)


# ------------------------------------------------------------------------------------------------ plan


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bits": 4}, ["needs 8-bit weights: --bits 8, not 4"]),
        ({"group_size": 64}, ["needs one scale per output channel: --group-size -1, not 64"]),
        ({"symmetric": False}, ["needs symmetric weights: --sym, not --asym"]),
        ({"formats": ("gptq",)}, ["--format gptq cannot hold quantized activations; use compressed-tensors"]),
        (
            {"rules": ({"match": "*.o_proj", "bits": 4, "group_size": 32},)},
            ["--bits 8, not 4 (--rule *.o_proj=bits:4,group_size:32)", "--group-size -1, not 32 (--rule *.o_proj"],
        ),
    ],
)
def test_what_integer_kernels_cannot_take_is_refused_naming_the_flags(
    tiny_llama: Path, tmp_path: Path, text: Path, changes: dict[str, Any], says: list[str]
) -> None:
    settings: dict[str, Any] = {"bits": 8, "group_size": -1, "activation_bits": 8} | changes
    with pytest.raises(PlanError) as caught:
        make_plan(recipe_for(tiny_llama, tmp_path / "out", text, **settings))
    assert len(caught.value.problems) == len(says)
    for said, problem in zip(says, caught.value.problems, strict=True):
        assert said in problem


def test_the_group_size_of_a_w8a8_run_is_chosen_and_announced(tiny_llama: Path, tmp_path: Path, text: Path) -> None:
    recipe = recipe_for(tiny_llama, tmp_path / "out", text, bits=8, group_size="auto", activation_bits=8)
    plan = make_plan(recipe.model_copy(update={"output": None}))
    assert {(spec.bits, spec.group_size, spec.symmetric) for spec in plan.specs.values()} == {(8, None, True)}
    assert any(note.startswith("group size -1: INT8 activations") for note in plan.notes)
    assert plan.label == "8 bits, per channel, symmetric, 8-bit activations per token"
    assert plan.output.name == "tiny-llama-w8a8-gptq"
    assert plan.to_json()["activation_bits"] == 8


# ------------------------------------------------------------------------------------------------ the whole way


def test_the_files_hold_int8_weights_and_a_config_that_asks_for_int8_activations(w8a8: Path) -> None:
    tensors = load_file(w8a8 / "model.safetensors")
    site = "model.layers.1.mlp.down_proj"
    assert (tensors[f"{site}.weight"].dtype, list(tensors[f"{site}.weight"].shape)) == (torch.int8, [128, 384])
    assert list(tensors[f"{site}.weight_scale"].shape) == [128, 1]
    assert {key.rpartition(".")[2] for key in tensors if key.startswith(site)} == {"weight", "weight_scale"}
    config = json.loads((w8a8 / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert config["format"] == group["format"] == "int-quantized" and group["targets"] == ["Linear"]
    assert group["weights"]["strategy"] == "channel" and group["weights"]["num_bits"] == 8
    assert group["input_activations"] == {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "group_size": None,
        "dynamic": True,
        "actorder": None,
        "block_structure": None,
        "observer": None,
        "observer_kwargs": {},
    }


def test_transformers_computes_our_logits_with_activations_quantized(w8a8: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(w8a8, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(TOKENS, use_cache=False).logits
    ours, unrounded = logits_of(w8a8), logits_of(w8a8, rounded=False)
    spread = float((ours - unrounded).abs().max())
    assert spread > 1e-3, "rounding the activations must be seen in the logits"
    assert float((theirs - ours).abs().max()) < 0.02 * spread


def test_a_score_says_that_activations_were_quantized_and_what_it_costs(
    w8a8: Path, tiny_llama: Path, text: Path
) -> None:
    asked: dict[str, Any] = dict(text=str(text), window=64, windows=2)
    result = evaluate_checkpoint(str(w8a8), reference=str(tiny_llama), **asked)
    assert result.activations == "8-bit activations per token, at 14 sites"
    assert result.to_json()["activations"] == result.activations
    assert result.divergence is not None and 0 < result.divergence.kl < 0.01
    original = evaluate_checkpoint(str(tiny_llama), reference=str(w8a8), **asked)
    assert original.activations is None
    assert "the reference has 8-bit activations per token, at 14 sites" in original.notes
    assert original.divergence is not None and original.divergence.reference_nll == result.nll


def test_inspect_tells_the_activations(w8a8: Path) -> None:
    found = describe_checkpoint(str(w8a8))
    inputs = "8-bit int activations, per token, dynamic, symmetric"
    assert found.scheme == f"8 bits, per channel, symmetric (int-quantized), {inputs}: 14 sites"
    assert {row.activations for row in found.quantized} == {inputs}
    row = next(row for row in found.quantized if row.name.endswith("down_proj"))
    assert (row.shape, row.bits_per_weight) == ((128, 384), 8 + 16 / 384)  # a 16-bit scale a row


@pytest.mark.parametrize("sequential", ["layer", "group"])
def test_sites_of_all_layers_are_calibrated_on_quantized_activations(
    tiny_llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sequential: str
) -> None:
    from quantforge.pipeline import layers as layers_module

    inputs: dict[str, list[torch.Tensor]] = {}
    solve = layers_module.solve_sites

    def watched(plan: Any, sites: Any, modules: Any, group: Any) -> Any:
        inputs.setdefault(label, []).append(group.gram)
        return solve(plan, sites, modules, group)

    monkeypatch.setattr(layers_module, "solve_sites", watched)
    settings: dict[str, Any] = dict(bits=8, group_size=-1, sequential=sequential)
    for label, bits in (("w8a16", None), ("w8a8", 8)):
        finish(recipe_for(tiny_llama, tmp_path / label, text, activation_bits=bits, **settings))
    assert len(inputs["w8a8"]) == len(inputs["w8a16"]) == 8, "sites that read one tensor still share a gram"
    for rounded, plain in zip(inputs["w8a8"], inputs["w8a16"], strict=True):
        apart = float((rounded - plain).norm() / plain.norm())
        assert 1e-6 < apart < 0.05


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (
            {"dynamic": False, "strategy": "tensor"},
            "8-bit int activations, per tensor, static, symmetric cannot be run",
        ),
        ({"num_bits": 4}, "4-bit int activations, per token, dynamic, symmetric cannot be run here"),
    ],
)
def test_a_checkpoint_whose_activations_cannot_be_simulated_is_inspected_but_not_scored(
    w8a8: Path, text: Path, tmp_path: Path, inputs: dict[str, Any], says: str
) -> None:
    other = tmp_path / "other"
    shutil.copytree(w8a8, other)
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] |= inputs
    (other / "config.json").write_text(json.dumps(config))
    assert says.partition(" cannot")[0] in describe_checkpoint(str(other)).scheme
    with pytest.raises(SourceError, match=says):
        evaluate_checkpoint(str(other), text=str(text), window=64, windows=1)


FOREIGN = shared_folder() / "foreign" / "llmcompressor-w8a8"


@pytest.mark.skipif(not FOREIGN.is_dir(), reason=f"no foreign checkpoint in {FOREIGN}; set QUANTFORGE_SHARED")
def test_a_checkpoint_of_llm_compressor_runs_as_transformers_runs_it() -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FOREIGN, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(TOKENS, use_cache=False).logits
    ours, unrounded = logits_of(FOREIGN), logits_of(FOREIGN, rounded=False)
    assert float((theirs - ours).abs().max()) < 0.05 * float((ours - unrounded).abs().max())


# ------------------------------------------------------------------------------------------------ a real model


def first_layers(model: Path, path: Path, count: int) -> Path:
    """A checkpoint of a model's first decoder layers."""
    source = open_checkpoint(model)
    layers = tuple(f"model.layers.{layer}." for layer in range(count))
    kept = [key for key in source.tensors if not key.startswith("model.layers.") or key.startswith(layers)]
    path.mkdir()
    save_file({key: source.read(key) for key in kept}, path / "model.safetensors", {"format": "pt"})
    config = {key: value for key, value in source.config.items() if key != "layer_types"} | {"num_hidden_layers": count}
    (path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((model / name).read_bytes())
    return path


@pytest.mark.skipif(
    "QUANTFORGE_SMOLLM2" not in os.environ, reason="QUANTFORGE_SMOLLM2 names no folder made by scripts/make_smollm2.py"
)
def test_w8a8_of_the_first_layers_of_a_real_model_is_close_to_it_and_costs_more_than_weights_alone(
    tmp_path: Path, text: Path
) -> None:
    model = first_layers(Path(os.environ["QUANTFORGE_SMOLLM2"]), tmp_path / "model", 3)
    results = {}
    for label, bits in (("w8a16", None), ("w8a8", 8)):
        recipe = recipe_for(model, tmp_path / label, text, bits=8, group_size=-1, activation_bits=bits, method="rtn")
        finish(recipe)
        asked: dict[str, Any] = dict(text=str(text), window=128, windows=4)
        results[label] = evaluate_checkpoint(str(tmp_path / label), reference=str(model), **asked)
    weights, both = results["w8a16"].divergence, results["w8a8"].divergence
    assert weights is not None and both is not None
    assert 0 < weights.kl < 0.002 and weights.kl < both.kl < 0.03
    assert both.top1 > 0.9
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "w8a8", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = theirs(TOKENS, use_cache=False).logits
    ours, unrounded = logits_of(tmp_path / "w8a8"), logits_of(tmp_path / "w8a8", rounded=False)
    apart = [float((other - ours).norm() / ours.norm()) for other in (logits, unrounded)]
    print(apart, float((logits - ours).abs().max()))
    assert apart[0] < 0.05 * apart[1], apart
