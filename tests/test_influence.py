"""Weights of calibration tokens: what they are, what they do to grams, and runs with them, stopped and carried on."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_architectures import CONFIGS, build
from test_pipeline import contents, finish, recipe_for
from torch import Tensor, nn

from quantforge.cli import main
from quantforge.errors import NumericsError, PlanError, WorkspaceError
from quantforge.model import backward as backward_module
from quantforge.model import streamed as streamed_module
from quantforge.model.observe import observe
from quantforge.model.source import open_checkpoint
from quantforge.model.streamed import StreamedModel
from quantforge.pipeline import disk as disk_module
from quantforge.pipeline import influence as influence_module
from quantforge.pipeline import layers as layers_module
from quantforge.pipeline.influence import SEED, TokenWeights, shared_weights, token_weights
from quantforge.pipeline.plan import Plan, make_plan
from quantforge.pipeline.run import quantize
from quantforge.pipeline.workspace import Workspace
from quantforge.recipe import CalibrationRecipe, Recipe
from quantforge.report import Event, LayerDone, LayerStarted, RunFinished, RunReport, RunStarted, Weighing
from quantforge.sizes import size_label

TOKENS = torch.randint(3, 128, (3, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def ragged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches of TOKENS, the last one smaller."""
    monkeypatch.setattr(streamed_module, "TOKENS_PER_BATCH", 48)


def plan_of(name: str, path: Path) -> Plan:
    """A plan for a tiny model of some architecture."""
    build(name).save_pretrained(path)
    return make_plan(Recipe(model=str(path), formats=("gptq",), group_size=-1))


def weights_of(plan: Plan, directory: Path | None = None) -> TokenWeights:
    steps = token_weights(plan.streamed, {site.module for site in plan.sites}, TOKENS, directory)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def whole_model_weights(model: nn.Module, names: list[str]) -> TokenWeights:
    """The same from one backward pass of the whole model: labels drawn from it, squared gradients of each output."""
    generator = torch.Generator().manual_seed(SEED)
    outputs: dict[str, list[Tensor]] = {name: [] for name in names}
    for name in names:

        def keep(_m: nn.Module, _a: Any, out: Tensor, name: str = name) -> None:
            out.retain_grad()
            outputs[name].append(out)

        model.get_submodule(name).weight.requires_grad_()
        model.get_submodule(name).register_forward_hook(keep)
    logits = torch.cat([model(sequence[None], use_cache=False).logits for sequence in TOKENS])
    log_chances = logits.log_softmax(-1)
    labels = torch.stack([torch.multinomial(rows.detach().exp(), 1, generator=generator) for rows in log_chances])
    (-log_chances.gather(-1, labels).sum()).backward()
    return {
        name: torch.cat([out.grad.reshape(-1, out.shape[-1]).square().mean(1) for out in outs])
        for name, outs in outputs.items()
    }


# ------------------------------------------------------------------------------------------------ what they are


@pytest.mark.usefixtures("ragged")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_weights_are_the_mean_square_gradients_of_the_whole_model(name: str, tmp_path: Path) -> None:
    plan = plan_of(name, tmp_path / "model")
    found = weights_of(plan)
    expected = whole_model_weights(build(name), [site.module for site in plan.sites])
    assert found.keys() == expected.keys()
    for site, own in found.items():
        assert own.dtype == torch.float32 and own.shape == (TOKENS.numel(),)
        assert float((own - expected[site]).norm() / expected[site].norm()) < 1e-4, site
        assert float((own - own.mean()).norm() / own.norm()) > 0.05, "so that constants would not do"


def test_weights_do_not_depend_on_where_the_inputs_are_kept_and_no_random_state_is_used(tmp_path: Path) -> None:
    plan = plan_of("llama", tmp_path / "model")
    (tmp_path / "scratch").mkdir()
    torch.manual_seed(3)
    first = weights_of(plan)
    torch.manual_seed(4)
    again = weights_of(plan, tmp_path / "scratch")
    assert all(torch.equal(first[site], again[site]) for site in first)
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.usefixtures("ragged")
def test_sites_that_share_an_input_get_the_weights_of_the_matrix_they_stack_to(tmp_path: Path) -> None:
    plan = plan_of("llama", tmp_path / "model")
    sites = {site.module: site for site in plan.sites if site.layer == 0}
    generator = torch.Generator().manual_seed(2)
    gradients = {
        name: torch.randn(TOKENS.numel(), site.out_features, generator=generator) * (number + 1)
        for number, (name, site) in enumerate(sites.items())
    }
    weights = {name: gradient.square().mean(1) for name, gradient in gradients.items()}
    run = plan.streamed.begin(TOKENS)
    plan.streamed.load_layer(0)
    modules = {name: plan.streamed.model.get_submodule(name) for name in sites}
    shared = shared_weights(weights, run, 0, sites, modules)
    assert shared.keys() == sites.keys()
    prefix = f"{plan.streamed.layout.stack}.0."
    for members in (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",),
    ):  # fmt: skip
        names = [prefix + name for name in members]
        stacked = torch.cat([gradients[name] for name in names], dim=1).square().mean(1)
        for name in names:
            assert torch.allclose(shared[name], stacked, rtol=1e-5), name
    del weights[f"{prefix}self_attn.k_proj"]
    left = shared_weights(weights, run, 0, sites, modules)
    assert {name.removeprefix(prefix) for name in shared.keys() - left.keys()} == {
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ grams


def inputs_of(model: nn.Module, names: list[str]) -> dict[str, Tensor]:
    """The rows [tokens, in] of each module, float64, from the plain model."""
    seen: dict[str, Tensor] = {}
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _m, args, name=name: seen.update({name: args[0].flatten(0, 1).double()})
        )
    with torch.no_grad():
        model(TOKENS, use_cache=False)
    return seen


@pytest.mark.usefixtures("ragged")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_an_observed_gram_is_the_weighted_mean_outer_product_of_the_plain_models_inputs(
    name: str, tmp_path: Path
) -> None:
    plan = plan_of(name, tmp_path / "model")
    sites = {site.module: site for site in plan.sites if site.layer == 0}
    run = plan.streamed.begin(TOKENS)
    plan.streamed.load_layer(0)
    modules = {name: plan.streamed.model.get_submodule(name) for name in sites}
    generator = torch.Generator().manual_seed(2)
    weights = shared_weights(
        {name: torch.rand(TOKENS.numel(), generator=generator).pow(3) for name in sites}, run, 0, sites, modules
    )
    rows = inputs_of(build(name), list(sites))
    groups = observe(run, 0, modules, weights=weights)
    assert sum(len(group.names) for group in groups) == len(sites)
    for group in groups:
        own, x = weights[group.names[0]].double(), rows[group.names[0]]
        expected = (own.unsqueeze(1) * x).t() @ x / len(x)
        assert group.tokens == len(x) == TOKENS.numel()
        assert torch.allclose(group.gram.double(), expected, rtol=1e-4, atol=1e-6 * float(expected.diagonal().max()))
        plain = x.t() @ x / len(x) * own.mean()
        assert float((expected - plain).norm() / plain.norm()) > 0.02, "weights would hardly be seen"


@pytest.mark.usefixtures("ragged")
@pytest.mark.parametrize("count", [TOKENS.numel() - 1, 24])
def test_weights_for_another_number_of_tokens_are_refused_by_site(tmp_path: Path, count: int) -> None:
    plan = plan_of("llama", tmp_path / "model")
    run = plan.streamed.begin(TOKENS)
    plan.streamed.load_layer(0)
    name = f"{plan.streamed.layout.stack}.0.mlp.down_proj"
    modules = {name: plan.streamed.model.get_submodule(name)}
    with pytest.raises(NumericsError, match=rf"{name}: \d+ input rows .* --token-weights none"):
        observe(run, 0, modules, weights={name: torch.ones(count)})


def route(plan: Plan, layer: int) -> None:
    """Have `down_proj` of a layer see about half of the tokens, as the matrices of a routed expert do."""
    mlp: Any = plan.streamed.layers[layer].mlp

    def forward(x: Tensor) -> Tensor:
        hidden = mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)
        chosen = x[..., 0] > 0
        return torch.zeros_like(x).masked_scatter(chosen.unsqueeze(-1), mlp.down_proj(hidden[chosen]))

    mlp.forward = forward


@pytest.mark.usefixtures("ragged")
def test_a_site_that_not_every_token_reaches_has_no_weights(tmp_path: Path) -> None:
    plan = plan_of("llama", tmp_path / "model")
    route(plan, 1)
    routed = f"{plan.streamed.layout.stack}.1.mlp.down_proj"
    assert {site.module for site in plan.sites} - weights_of(plan).keys() == {routed}


def test_tokens_of_a_site_that_not_every_token_reaches_count_alike(
    tiny_llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solve = layers_module.solve_sites
    grams: dict[str, dict[str, tuple[Tensor, int]]] = {"gradient": {}, "none": {}}
    reports: dict[str, RunReport] = {}
    for label, seen in grams.items():

        def watched(plan: Plan, sites: Any, modules: Any, group: Any, seen: Any = seen) -> Any:
            seen.update({site.name: (group.gram.clone(), group.tokens) for site in sites})
            return solve(plan, sites, modules, group)

        monkeypatch.setattr(layers_module, "solve_sites", watched)
        recipe = recipe_for(tiny_llama, tmp_path / label, text, token_weights=label)
        plan = make_plan(recipe)
        route(plan, 0)
        *_, last = quantize(recipe, plan)
        assert isinstance(last, RunFinished)
        reports[label] = last.report
    for leaf, same in (("mlp.down_proj", True), ("mlp.up_proj", False), ("self_attn.o_proj", False)):
        (weighted, tokens), (plain, _) = (grams[label][f"model.layers.0.{leaf}"] for label in grams)
        assert torch.equal(weighted, plain) == same, leaf
        assert (tokens < 16 * 64) == same
    assert reports["gradient"].fallbacks == []


# ------------------------------------------------------------------------------------------------ whole runs


@pytest.mark.usefixtures("ragged")
@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_is_quantized_with_weighted_tokens_and_never_worse_than_rounding(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[TokenWeights] = []
    monkeypatch.setattr(Workspace, "keep_token_weights", lambda _self, weights: kept.append(weights), raising=True)
    build(name).save_pretrained(tmp_path / "model")
    calibration = CalibrationRecipe(dataset="self", nsamples=3, seqlen=24)
    recipe = Recipe(
        model=str(tmp_path / "model"), output=str(tmp_path / "out"), formats=("gptq",), group_size=-1,
        calibration=calibration,
    )  # fmt: skip
    assert recipe.token_weights == "gradient"
    plan = make_plan(recipe)
    assert plan.scratch_bytes == plan.streamed.begin(TOKENS).hidden.nbytes * plan.layers
    events = list(quantize(recipe, plan))
    last = events[-1]
    assert isinstance(last, RunFinished) and last.report.fallbacks == []
    steps = 2 * plan.layers + 1
    assert [(e.done, e.steps) for e in events if isinstance(e, Weighing)] == [(n, steps) for n in range(1, steps + 1)]
    (weights,) = kept
    assert weights.keys() == {site.module for site in plan.sites}
    for own in weights.values():
        assert own.shape == (72,) and bool((own >= 0).all()) and float(own.max()) > 0
    sites = [site for layer in last.report.layers for site in layer.sites]
    assert len(sites) == len(plan.sites) and (tmp_path / "out" / "model.safetensors").is_file()
    assert all(site.loss <= site.rtn_loss and site.tokens == 72 for site in sites)


def start(recipe: Recipe) -> Iterator[Event]:
    return quantize(recipe, make_plan(recipe))


def stop_at(recipe: Recipe, kind: type[Event]) -> Path:
    """Run until the first event of a kind; returns the work directory."""
    running = start(recipe)
    assert any(isinstance(event, kind) for event in running)  # stops there
    running.close()  # type: ignore[attr-defined]
    return Path(f"{recipe.output}.partial")


@pytest.fixture(scope="module")
def whole(tiny_llama: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The output of an undisturbed run."""
    output = tmp_path_factory.mktemp("whole") / "out"
    finish(recipe_for(tiny_llama, output, text))
    return contents(output)


@pytest.mark.parametrize("stop", [LayerStarted, LayerDone])
def test_tokens_are_weighed_once_and_a_resumed_run_gives_the_same_bytes(
    tiny_llama: Path, text: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch,
    stop: type[Event],
) -> None:  # fmt: skip
    recipe = recipe_for(tiny_llama, tmp_path / "out", text)
    work = stop_at(recipe, stop)
    assert (work / "token-weights.safetensors").is_file() and not (work / "scratch").exists()

    def never(*_: Any) -> Any:
        raise AssertionError("the tokens were weighed again")

    monkeypatch.setattr(influence_module, "token_weights", never)
    events = list(start(recipe))
    assert not any(isinstance(event, Weighing) for event in events)
    started = next(event for event in events if isinstance(event, RunStarted))
    assert started.done == (1 if stop is LayerDone else 0)
    assert contents(tmp_path / "out") == whole and not work.exists()


def test_a_run_stopped_while_weighing_weighs_again_to_the_same_bytes(
    tiny_llama: Path, text: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    recipe = recipe_for(tiny_llama, tmp_path / "out", text)
    work = stop_at(recipe, Weighing)
    assert {entry.name for entry in work.iterdir()} == {"fingerprint.json", "lock"}
    (work / "scratch").mkdir()
    (work / "scratch" / "input-00000.bin").write_bytes(b"left by a kill")
    events = list(start(recipe))
    assert [event.done for event in events if isinstance(event, Weighing)] == [1, 2, 3, 4, 5]
    assert contents(tmp_path / "out") == whole


def test_ctrl_c_while_weighing_leaves_a_work_directory_that_can_be_carried_on(
    tiny_llama: Path, text: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_for(tiny_llama, tmp_path / "out", text)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(backward_module, "_head_gradient", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(start(recipe))
    assert {entry.name for entry in Path(f"{recipe.output}.partial").iterdir()} == {"fingerprint.json", "lock"}
    finish(recipe)
    assert contents(tmp_path / "out") == whole


def test_damaged_weights_are_named_and_weights_that_are_gone_are_found_again(
    tiny_llama: Path, text: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    recipe = recipe_for(tiny_llama, tmp_path / "out", text)
    work = stop_at(recipe, LayerDone)
    file = work / "token-weights.safetensors"
    good = file.read_bytes()
    for damage in (b"", good[:-100]):
        file.write_bytes(damage)
        with pytest.raises(WorkspaceError, match=f"{file} is missing or damaged .* delete {work} to start again"):
            list(start(recipe))
    file.unlink()
    finish(recipe)
    assert contents(tmp_path / "out") == whole


def test_a_repeated_run_gives_the_same_bytes_and_leaves_every_random_state_alone(
    tiny_llama: Path, text: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    torch.manual_seed(11)
    np.random.seed(11)
    random.seed(11)
    before = (torch.get_rng_state(), np.random.get_state(), random.getstate())
    finish(recipe_for(tiny_llama, tmp_path / "out", text))
    assert contents(tmp_path / "out") == whole
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), before[1], strict=True))
    assert random.getstate() == before[2]


def test_weights_change_the_codes_and_other_weights_are_another_run(
    tiny_llama: Path, text: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    finish(recipe_for(tiny_llama, tmp_path / "plain", text, token_weights="none"))
    assert (tmp_path / "plain" / "model.safetensors").read_bytes() != whole["model.safetensors"]
    stop_at(recipe_for(tiny_llama, tmp_path / "out", text), LayerDone)
    with pytest.raises(WorkspaceError, match="token_weights: was 'gradient', now 'none'"):
        finish(recipe_for(tiny_llama, tmp_path / "out", text, token_weights="none"))


def test_rounding_to_nearest_weighs_nothing_and_does_not_mind_the_flag(
    tiny_llama: Path, text: Path, tmp_path: Path
) -> None:
    for label in ("gradient", "none"):
        recipe = recipe_for(tiny_llama, tmp_path / label, text, method="rtn", token_weights=label)
        assert not any(isinstance(event, Weighing) for event in start(recipe))
    one, other = (contents(tmp_path / label) for label in ("gradient", "none"))
    assert one["model.safetensors"] == other["model.safetensors"]


def test_the_inputs_of_all_layers_can_be_kept_on_disk_where_nothing_can_be_reserved(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some systems have no posix_fallocate."""
    monkeypatch.delattr("os.posix_fallocate", raising=False)
    model = StreamedModel(open_checkpoint(tiny_llama))
    modules = [site.module for site in model.layout.sites]
    steps = backward_module.backward(
        model, TOKENS, lambda seen: None, generator=torch.Generator(), modules=modules, directory=tmp_path
    )
    for done, _ in steps:
        kept = {entry.name: entry.stat().st_size for entry in tmp_path.iterdir()}
        count = {1: 1, 2: 2, 3: 2, 4: 1, 5: 0}[done]
        assert kept == {f"input-{layer:05d}.bin": TOKENS.numel() * 128 * 4 for layer in range(count)}


# ------------------------------------------------------------------------------------------------ disk


def disk_of(monkeypatch: pytest.MonkeyPatch, free: int) -> list[Path]:
    """A disk with so many free bytes; returns the places that were asked about."""
    asked: list[Path] = []

    def usage(place: Path) -> Any:
        asked.append(Path(place))
        return SimpleNamespace(free=free)

    monkeypatch.setattr(disk_module.shutil, "disk_usage", usage)
    return asked


NEEDED = 2 * 16 * 64 * 128 * 4
"""Layers, sequences, tokens, hidden size, bytes."""


def test_the_plan_says_that_tokens_are_weighed_and_how_much_disk_that_takes(
    tiny_llama: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = (
        "calibration tokens are weighted by the gradient of the model's loss: a pass forward and backward, up to 1.0 MB"
    )
    argv = ["quantize", str(tiny_llama), "--group-size", "64", "--dataset", str(text), "--nsamples", "16", "--dry-run"]
    argv += ["--seqlen", "64", "-o", str(tmp_path / "out")]
    assert main(argv) == 0
    assert f"{said} of temporary disk (--token-weights none does without)" in capsys.readouterr().out
    assert main([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plan"]["scratch_bytes"] == NEEDED
    assert any(said in note for note in document["plan"]["notes"]) and not (tmp_path / "out.partial").exists()
    for flags in (["--token-weights", "none"], ["--method", "rtn"]):
        assert main([*argv, *flags, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)["plan"]
        assert plan["scratch_bytes"] == 0 and not any("weighted" in note for note in plan["notes"])
    assert main([*argv, "--method", "awq", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["scratch_bytes"] == NEEDED


def test_a_disk_that_is_too_small_is_a_problem_of_the_plan_with_the_numbers_and_the_flag(
    tiny_llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_for(tiny_llama, tmp_path / "not" / "there" / "out", text)
    asked = disk_of(monkeypatch, NEEDED - 1)
    with pytest.raises(PlanError) as caught:
        make_plan(recipe.model_copy(update={"group_size": 96}))
    size, disk = caught.value.problems
    assert "group size 96" in size and asked == [tmp_path]
    assert disk == (
        "weighing the calibration tokens takes up to 1.0 MB of temporary disk (2 layers x 16 x 64 tokens x 128 x 4 "
        f"bytes), and beside {recipe.output} 1.0 MB are free; --token-weights none does without, fewer --nsamples with "
        "less"
    )
    assert make_plan(recipe.model_copy(update={"token_weights": "none"})).scratch_bytes == 0
    disk_of(monkeypatch, NEEDED)
    assert make_plan(recipe).scratch_bytes == NEEDED


def test_a_run_that_has_weighed_its_tokens_or_is_finished_needs_no_disk_for_that(
    tiny_llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_for(tiny_llama, tmp_path / "out", text)
    work = stop_at(recipe, Weighing)
    (work / "scratch").mkdir()
    (work / "scratch" / "input-00000.bin").write_bytes(bytes(NEEDED // 2))  # left by a kill, removed before the next
    disk_of(monkeypatch, NEEDED // 2)
    assert make_plan(recipe).scratch_bytes == NEEDED
    stop_at(recipe, LayerStarted)
    disk_of(monkeypatch, 0)
    assert make_plan(recipe).scratch_bytes == 0
    finish(recipe)
    assert make_plan(recipe).scratch_bytes == 0


def test_sequences_longer_than_the_model_takes_need_no_disk_for_what_is_cut(tiny_llama: Path, tmp_path: Path) -> None:
    calibration = CalibrationRecipe(nsamples=8, seqlen=2048)
    recipe = Recipe(model=str(tiny_llama), output=str(tmp_path / "out"), calibration=calibration)
    assert make_plan(recipe).scratch_bytes == 2 * 8 * 512 * 128 * 4


@pytest.mark.parametrize(
    ("size_bytes", "label"), [(0, "0.0 MB"), (33_554_432, "33.6 MB"), (171_798_691_840, "171.8 GB"), (10**12, "1.0 TB")]
)
def test_a_size_is_told_in_the_largest_unit_of_which_there_is_one(size_bytes: int, label: str) -> None:
    assert size_label(size_bytes) == label
