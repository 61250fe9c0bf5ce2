"""Tuning: what it changes, what it keeps, and that it can be carried on."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantforge.errors import PlanError
from quantforge.model.packed import PackedCheckpoint, open_any
from quantforge.pipeline import obstacles as obstacles_module
from quantforge.pipeline import tune
from quantforge.pipeline.plan import make_plan
from quantforge.pipeline.run import quantize
from quantforge.recipe import CalibrationRecipe
from quantforge.report import Event, RunFinished, Tuning
from tests.test_mixed import build_gpt2
from tests.test_pipeline import finish, recipe_for


def packed(path: Path) -> PackedCheckpoint:
    opened = open_any(path)
    assert isinstance(opened, PackedCheckpoint)
    return opened


def packed_keys(checkpoint: PackedCheckpoint) -> set[str]:
    return {key for parts in checkpoint.sites.values() for key in parts.values()}


def directory_bytes(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.suffix == ".safetensors"}


def test_tuning_keeps_the_codes_changes_scales_and_gains_and_lowers_the_held_out_kl(
    tiny_llama: Path, text: Path, tmp_path: Path
) -> None:
    finish(recipe_for(tiny_llama, tmp_path / "plain", text, bits=3))
    report = finish(recipe_for(tiny_llama, tmp_path / "tuned", text, bits=3, tune_epochs=3))
    tuned = report.tuning
    assert tuned is not None and tuned.kept and tuned.held_out == 2 and tuned.steps == 3
    assert tuned.kl_after < tuned.kl_before
    before, after = packed(tmp_path / "plain"), packed(tmp_path / "tuned")
    changed = 0
    for site in before.sites:
        old, new = before.decode(site), after.decode(site)
        assert torch.equal(old.codes, new.codes)
        assert torch.equal(old.scale.sign(), new.scale.sign())
        changed += int((old.scale != new.scale).sum())
    assert changed > 0
    gains = {key for key in before.checkpoint.tensors if key.endswith("norm.weight")}
    assert len(gains) == 5  # two norms a layer, and the last
    for key in before.checkpoint.tensors.keys() & after.checkpoint.tensors.keys() - packed_keys(before):
        old_tensor, new_tensor = before.checkpoint.read(key), after.checkpoint.read(key)
        assert old_tensor.dtype == new_tensor.dtype
        assert torch.equal(old_tensor, new_tensor) == (key not in gains), key


def test_what_does_not_help_on_held_out_text_is_not_kept(
    tiny_llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(recipe_for(tiny_llama, tmp_path / "plain", text, bits=3))
    monkeypatch.setattr(tune, "LEARNING_RATE", 3.0)
    report = finish(recipe_for(tiny_llama, tmp_path / "tuned", text, bits=3, tune_epochs=1))
    assert report.tuning is not None and not report.tuning.kept
    assert report.tuning.kl_after >= report.tuning.kl_before
    assert directory_bytes(tmp_path / "plain") == directory_bytes(tmp_path / "tuned")


@pytest.mark.parametrize("conv1d", [False, True], ids=["llama", "gpt2"])
def test_the_gradient_of_a_factor_is_that_of_the_kl(conv1d: bool, tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    path = build_gpt2(tmp_path / "gpt2") if conv1d else tiny_llama
    formats = ("gptq",) if conv1d else ("compressed-tensors",)
    settings: dict[str, Any] = {"formats": formats, "group_size": 32, "tune_epochs": 1}
    own = CalibrationRecipe(dataset="self", nsamples=16, seqlen=64)
    recipe = recipe_for(path, tmp_path / "out", text, calibration=own, **settings)
    plan = make_plan(recipe)
    seen: dict[str, Any] = {}
    original = tune._Student

    class Spy(original):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            seen["student"] = self

    def stop_at_first_step() -> None:
        for event in quantize(recipe, plan):
            if isinstance(event, Tuning):
                return

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "_Student", Spy)
        patch.setattr(tune, "LEARNING_RATE", 0.0)
        stop_at_first_step()
    student = seen["student"]
    reference = plan.streamed.begin(torch.randint(3, 200, (1, 24), generator=torch.Generator().manual_seed(1)))
    reference.run_all()
    generator = torch.Generator().manual_seed(2)
    for factor in student.factors.values():  # away from the minimum, where differences are not lost in rounding
        factor.grad = None
        factor.data += 0.3 * torch.randn(factor.shape, generator=generator)
    said = tune._gradient(student, reference, 0, 24)
    original_logits = reference.head(0, reference.hidden).detach()
    logits = student.logits(reference.tokens)
    kl = torch.nn.functional.kl_div(
        logits.log_softmax(-1), original_logits.log_softmax(-1), log_target=True, reduction="sum"
    )
    assert said == pytest.approx(float(kl) / 24, rel=1e-4)
    expected = torch.autograd.grad(kl / 24, list(student.factors.values()))
    for (name, factor), wanted in zip(student.factors.items(), expected, strict=True):
        assert factor.grad is not None and float(wanted.abs().max()) > 0
        assert float((factor.grad - wanted).abs().max()) < 1e-3 * float(wanted.abs().max()), name


def test_a_tuning_that_was_interrupted_goes_on_and_gives_the_same_bytes(
    tiny_llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "SECONDS_BETWEEN_SAVES", -1.0)
    monkeypatch.setattr(tune, "TOKENS_PER_STEP", 256)
    finish(recipe_for(tiny_llama, tmp_path / "whole", text, bits=3, tune_epochs=1))
    recipe = recipe_for(tiny_llama, tmp_path / "cut", text, bits=3, tune_epochs=1)

    def until(step: int) -> Iterator[Event]:
        for event in quantize(recipe, make_plan(recipe)):
            yield event
            if isinstance(event, Tuning) and event.step == step:
                return

    assert sum(isinstance(event, Tuning) for event in until(2)) == 2
    events = list(quantize(recipe, make_plan(recipe)))
    assert [event.step for event in events if isinstance(event, Tuning)] == [3, 4]
    assert isinstance(events[-1], RunFinished)
    assert directory_bytes(tmp_path / "whole") == directory_bytes(tmp_path / "cut")


def test_tuning_twice_gives_the_same_bytes_and_leaves_global_random_states_alone(
    tiny_llama: Path, text: Path, tmp_path: Path
) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    for name in ("first", "second"):
        finish(recipe_for(tiny_llama, tmp_path / name, text, bits=4, tune_epochs=1))
    assert directory_bytes(tmp_path / "first") == directory_bytes(tmp_path / "second")
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])


def test_a_model_too_large_to_tune_and_rounded_activations_are_refused_before_the_work(
    tiny_llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstacles_module, "memory_bytes", lambda device: 1000)
    with pytest.raises(PlanError, match=r"tokens in memory, about 0\.\d GB of 0\.0 GB"):
        make_plan(recipe_for(tiny_llama, tmp_path / "out", text, tune_epochs=1))
    monkeypatch.undo()
    settings: dict[str, Any] = {"bits": 8, "group_size": -1, "activation_bits": 8, "tune_epochs": 1}
    with pytest.raises(PlanError, match="rounded activations have none"):
        make_plan(recipe_for(tiny_llama, tmp_path / "out", text, **settings))
