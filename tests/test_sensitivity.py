"""Predicted KL of a site's quantization against the measured one, on a model with sharp predictions."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quantforge.methods import WeightProblem, load_method
from quantforge.model.backward import SiteGradient, backward
from quantforge.model.source import open_checkpoint
from quantforge.model.streamed import StreamedModel
from quantforge.pipeline.plan import make_plan
from quantforge.pipeline.sensitivity import Predictions, predict_kl
from quantforge.recipe import Recipe

TOKENS = torch.randint(3, 256, (12, 48), generator=torch.Generator().manual_seed(3))
BITS = (3, 4, 8)


@pytest.fixture(scope="module")
def sharp(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with larger weights: its logits have a standard deviation of about 2, and its layers matter."""
    path = tmp_path_factory.mktemp("sharp") / "model"
    shutil.copytree(tiny_llama, path)
    tensors = load_file(path / "model.safetensors")
    scaled = {key: value * (9 if "lm_head" in key else 3 if "proj" in key else 1) for key, value in tensors.items()}
    save_file(scaled, path / "model.safetensors", {"format": "pt"})
    return path


def whole(path: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def measured_kl(model: nn.Module, changes: dict[str, torch.Tensor]) -> float:
    """Mean KL(model || changed model) in nats a token, with `changes` [out, in] added to weights."""
    reference = model(TOKENS).logits.double().log_softmax(-1)
    for name, change in changes.items():
        model.get_submodule(name).weight += change
    changed = model(TOKENS).logits.double().log_softmax(-1)
    for name, change in changes.items():
        model.get_submodule(name).weight -= change
    return float((reference.exp() * (reference - changed)).sum(-1).mean())


def predictions(path: Path, **changes: object) -> tuple[Predictions, list[tuple[int, int]]]:
    plan = make_plan(Recipe(model=str(path), group_size=64, **changes))
    candidates = {name: {bits: replace(spec, bits=bits) for bits in BITS} for name, spec in plan.specs.items()}
    steps = []
    running = predict_kl(plan, TOKENS, candidates, None)
    while True:
        try:
            steps.append(next(running))
        except StopIteration as stop:
            return stop.value, steps


def test_the_second_order_term_of_a_small_error_is_the_measured_kl(sharp: Path) -> None:
    """Averaged over drawn labels, within a fifth; half the error is a quarter of both."""
    site = "model.layers.1.mlp.down_proj"
    model = whole(sharp)
    weight = model.get_submodule(site).weight
    error = 0.02 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    sums = {1.0: 0.0, 0.5: 0.0}

    def on_site(seen: SiteGradient) -> None:
        for share in sums:
            changes = ((seen.inputs @ (share * error).t()) * seen.gradient).sum(1)
            sums[share] += float(changes.square().sum()) / (2 * TOKENS.numel() * draws)

    draws = 8
    for seed in range(draws):
        streamed = StreamedModel(open_checkpoint(sharp))
        generator = torch.Generator().manual_seed(seed)
        list(backward(streamed, TOKENS, on_site, generator=generator, modules=[site]))
    full, half = measured_kl(model, {site: error}), measured_kl(model, {site: 0.5 * error})
    assert full / half == pytest.approx(4, rel=0.05)
    assert sums[1.0] / sums[0.5] == pytest.approx(4, rel=1e-4)
    assert sums[1.0] == pytest.approx(full, rel=0.2)


def test_predictions_rank_sites_and_bits_as_measured(sharp: Path) -> None:
    """Each site alone, 4 and 8 bits: the median is off by less than a factor of 1.4, the logarithms correlate."""
    predicted, _ = predictions(sharp, method="rtn")
    model = whole(sharp)
    plan = make_plan(Recipe(model=str(sharp), group_size=64, method="rtn"))
    pairs = []
    for name, spec in plan.specs.items():
        for bits in (4, 8):
            weight = model.get_submodule(name).weight.detach()
            problem = WeightProblem(name, weight, replace(spec, bits=bits), None, 0, {})
            error = load_method("rtn").solve(problem).quantized.dequantize() - weight
            pairs.append((predicted[name][bits], measured_kl(model, {name: error})))
    found, truth = torch.tensor(pairs).log().unbind(1)
    assert (found - truth).abs().median() < 0.35
    assert torch.corrcoef(torch.stack([found, truth]))[0, 1] > 0.98


def test_more_bits_are_predicted_to_lose_less_and_the_methods_own_error_counts(sharp: Path) -> None:
    gptq, steps = predictions(sharp)
    rtn, _ = predictions(sharp, method="rtn")
    assert steps == [(done, 5) for done in range(1, 6)]
    assert gptq.keys() == rtn.keys() and len(gptq) == 14
    for name, by_bits in gptq.items():
        assert by_bits[3] > by_bits[4] > by_bits[8] > 0, name
        assert by_bits[8] == rtn[name][8]
    total = {bits: sum(by_bits[bits] for by_bits in gptq.values()) for bits in BITS}
    assert total[4] < sum(by_bits[4] for by_bits in rtn.values())
    assert 2.5 < total[3] / total[4] < 8
