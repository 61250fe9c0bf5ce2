"""Runs with transforms: only folds that help are kept, and what is changed is written, verified, resumed and loaded."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_pipeline import TOKENS, contents, finish, flip_one_bit, hidden_of, recipe_for, tamper

from quantforge.errors import UsageError, VerifyError
from quantforge.model.observe import observe
from quantforge.model.source import open_checkpoint
from quantforge.model.streamed import StreamedModel
from quantforge.pipeline import run as run_module
from quantforge.pipeline import transform as transform_module
from quantforge.pipeline.method import choose_method
from quantforge.pipeline.plan import Plan, make_plan
from quantforge.pipeline.run import quantize
from quantforge.pipeline.transform import LayerTransforms, rows_per_batch, token_counts
from quantforge.recipe import CalibrationRecipe, Recipe, default_output
from quantforge.report import Event, LayerDone, LayerReport, LayerTransformed, RunFinished, RunReport
from quantforge.spec import ActivationSpec
from quantforge.transforms import FoldProblem, FoldSolution, Transform, load_transform
from tests.conftest import SENTENCES, _build_tokenizer

LAST_NORM = "model.layers.1.post_attention_layernorm.weight"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("words") / "calibration.txt"
    known = " ".join(SENTENCES).split()
    picks = torch.randint(0, len(known), (6000,), generator=torch.Generator().manual_seed(5)).tolist()
    file.write_text(" ".join(known[pick] for pick in picks))
    return file


@pytest.fixture(scope="module")
def outliers(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama in bfloat16, with a few channels of every norm 10 times as large."""
    path = tmp_path_factory.mktemp("outliers") / "model"
    path.mkdir()
    for file in tiny_llama.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tiny_llama / "model.safetensors")
    for key in tensors:
        if key.endswith("layernorm.weight"):
            tensors[key][[3, 40, 77]] *= 10
        tensors[key] = tensors[key].bfloat16()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def run_plan(recipe: Recipe, plan: Plan) -> RunReport:
    *_, last = quantize(recipe, plan)
    assert isinstance(last, RunFinished)
    return last.report


def kept(report: RunReport) -> list[tuple[int, str]]:
    return [
        (fold.layer, fold.producer.rpartition(".")[2])
        for layer in report.layers
        for fold in layer.transforms
        if fold.kept
    ]


# ------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("method", "transforms", "label", "grid"),
    [
        ("rtn", (), "rtn", "minmax"),
        ("awq", (), "awq+rtn", "search"),
        ("awq+rtn", (), "awq+rtn", "minmax"),
        ("awq+gptq", (), "awq+gptq", "search"),
        ("smoothquant", (), "smoothquant+rtn", "minmax"),
        ("smoothquant + gptq", (), "smoothquant+gptq", "search"),
        ("gptq", ("smoothquant", "awq"), "smoothquant+awq+gptq", "search"),
        ("awq", ("smoothquant",), "smoothquant+awq+rtn", "search"),
    ],
)
def test_a_method_names_transforms_and_a_solver(method: str, transforms: Any, label: str, grid: str) -> None:
    chosen = choose_method(Recipe(model="m", method=method, transforms=transforms))
    assert chosen.label == label
    assert chosen.options["grid"] == grid


def test_an_option_that_is_given_wins_over_the_one_a_transform_comes_with() -> None:
    assert choose_method(Recipe(model="m", method="awq", options={"grid": "minmax"})).options == {"grid": "minmax"}


@pytest.mark.parametrize(
    ("method", "transforms", "message"),
    [
        ("awk+gptq", (), "unknown method 'awk'; known methods: gptq, rtn; transforms .*: awq, smoothquant"),
        ("awq+", (), "unknown method ''"),
        ("gptq+awq", (), "gptq chooses the codes and can only be the last"),
        ("rtn+gptq", (), "rtn chooses the codes and can only be the last"),
        ("awq+gptq", ("awq",), "a transform is given twice: awq, awq"),
        ("gptq", ("rtn",), "rtn chooses the codes"),
    ],
)
def test_a_method_that_means_nothing_is_refused(method: str, transforms: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_method(Recipe(model="m", method=method, transforms=transforms))


def test_the_default_output_names_transforms_with_dashes() -> None:
    assert default_output(Recipe(model="a/b", method="awq+gptq"), 64) == "b-w4g64-awq-gptq"
    assert default_output(Recipe(model="a/b", method="gptq", transforms=("awq",)), None) == "b-w4pc-awq-gptq"


def test_smoothquant_is_refused_where_activations_stay_in_floating_point(outliers: Path) -> None:
    with pytest.raises(UsageError, match="smoothquant makes activations easier to round, and here they stay"):
        make_plan(Recipe(model=str(outliers), method="smoothquant+gptq"))


# ------------------------------------------------------------------------------------------------ exports


@pytest.mark.parametrize("sequential", ["layer", "group"])
def test_folds_that_help_are_kept_and_change_norms_only_where_they_were(
    outliers: Path,
    words: Path,
    tmp_path: Path,
    sequential: str,
) -> None:
    report = finish(recipe_for(outliers, tmp_path / "out", words, method="awq+rtn", sequential=sequential))
    assert report.method == "awq+rtn"
    for layer in report.layers:
        assert len(layer.transforms) == 4
        for fold in layer.transforms:
            if fold.kept:
                assert fold.reason is None
                assert fold.error_before is not None and fold.error_after is not None
                assert fold.output_before is not None and fold.output_after is not None
                assert fold.error_after < fold.error_before and fold.output_after < fold.output_before
                assert 0 < fold.alpha <= 1
            else:
                assert fold.reason is not None
        folds = [fold for fold in layer.transforms if fold.kept]  # each starts from where the last one left the layer
        assert [fold.output_before for fold in folds[1:]] == [fold.output_after for fold in folds[:-1]]
        assert folds[-1].output_after < 0.95 * folds[0].output_before  # type: ignore[operator]
        assert LayerReport.from_json(layer.to_json()) == layer
    assert any("norm" in name for _, name in kept(report))
    source, written = (load_file(path / "model.safetensors") for path in (outliers, tmp_path / "out"))
    changed = {key for key in source if key in written and not torch.equal(source[key], written[key])}
    assert changed == {f"model.layers.{layer}.{name}.weight" for layer, name in kept(report) if "norm" in name}
    assert all(written[key].dtype == torch.bfloat16 for key in changed)


def test_transformers_loads_folded_exports_with_our_logits(outliers: Path, words: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    report = finish(recipe_for(outliers, tmp_path / "out", words, method="awq+gptq"))
    assert kept(report)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        theirs = loaded(TOKENS, use_cache=False).logits
    ours = hidden_of(tmp_path / "out")
    assert torch.allclose(theirs, ours, rtol=0, atol=1e-4)
    assert (ours - hidden_of(outliers)).abs().max() > 1e-2  # so the comparison above can tell them apart


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2", "gpt2", "opt", "qwen2_moe"])
def test_a_folded_model_computes_what_it_did_with_everything_in_its_stored_dtype(name: str, tmp_path: Path) -> None:
    from test_architectures import build

    model = build(name).bfloat16()
    for key, parameter in model.named_parameters():
        if "norm" in key or "ln_" in key:
            parameter.data[:4] *= 20
    model.save_pretrained(tmp_path)
    plan = make_plan(Recipe(model=str(tmp_path), method="awq", group_size=16, formats=("gptq",)))
    tokens = torch.randint(3, 128, (8, 32), generator=torch.Generator().manual_seed(1))
    plain = StreamedModel(open_checkpoint(tmp_path)).begin(tokens)
    plain.run_all()
    run = plan.streamed.begin(tokens)
    transforms = LayerTransforms(plan, run)
    folded = 0
    for index in range(plan.layers):
        layer = plan.streamed.load_layer(index)
        modules = {s.module: plan.streamed.model.get_submodule(s.module) for s in plan.sites if s.layer == index}
        groups = observe(run, index, modules, rows_per_batch(plan, run, index))
        result = transforms.apply(index, modules, groups)
        folded += sum(report.kept for report in result.reports)
        keys = {key: target for target, key in plan.streamed.keys.plain.items()}
        for key, tensor in result.floats.items():
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(tensor.float(), plan.streamed.model.get_parameter(keys[key]))
        sites = {f"{module}.weight" for module in modules}
        for target, parameter in layer.named_parameters(prefix=f"{plan.streamed.layout.stack}.{index}"):
            if target not in sites:  # what stays in floating point can be stored without rounding
                assert torch.equal(parameter, parameter.bfloat16().float()), target
        run.advance(index)
        plan.streamed.drop_layer(index)
    assert folded >= 2
    for sample in range(2):
        expected = plain.logits(sample)
        assert float((run.logits(sample) - expected).norm() / expected.norm()) < 1e-5


def test_a_site_left_in_floating_point_is_scaled_by_powers_of_two(outliers: Path, words: Path, tmp_path: Path) -> None:
    recipe = recipe_for(outliers, tmp_path / "out", words, method="awq+rtn", ignore=("*k_proj",))
    (layer, _), *_ = [fold for fold in kept(finish(recipe)) if fold[1] == "input_layernorm"]
    source, written = (load_file(path / "model.safetensors") for path in (outliers, tmp_path / "out"))
    name = f"model.layers.{layer}.self_attn.k_proj.weight"
    ratios = (written[name].float() / source[name].float()).nan_to_num(1)
    assert not torch.equal(source[name], written[name])
    assert torch.equal(ratios.log2(), ratios.log2().round())
    norm = f"model.layers.{layer}.input_layernorm.weight"
    assert torch.equal(written[norm].float() * ratios.amax(0), source[norm].float())


def test_experts_and_routers_that_are_kept_are_not_folded_into(words: Path, tmp_path: Path) -> None:
    from test_architectures import build

    build("mixtral").save_pretrained(tmp_path / "moe")
    _build_tokenizer().save_pretrained(tmp_path / "moe")
    plan = make_plan(Recipe(model=str(tmp_path / "moe"), method="awq", group_size=16))
    run = plan.streamed.begin(TOKENS % 128)
    transforms = LayerTransforms(plan, run)
    plan.streamed.load_layer(0)
    modules = {s.module: plan.streamed.model.get_submodule(s.module) for s in plan.sites if s.layer == 0}
    folds = transforms.apply(0, modules, observe(run, 0, modules, rows_per_batch(plan, run, 0))).reports
    reports = {fold.producer.rpartition(".")[2]: fold for fold in folds}
    assert reports["post_attention_layernorm"].reason == "no site to be quantized reads it, or no token reaches them"
    assert set(reports) == {"input_layernorm", "v_proj", "post_attention_layernorm"}


# ------------------------------------------------------------------------------------------------ gate and proof


def harmful(problem: FoldProblem) -> FoldSolution:
    """Claims to help and does the opposite."""
    channel = torch.arange(int(problem.channels.max()) + 1)
    scale = torch.where(channel % 16 == 0, 1000.0, 1.0)[problem.channels]
    return FoldSolution(scale, 0.5, "harm", 1.0, 0.0)


def test_tokens_count_at_a_layer_as_they_do_at_its_sites_in_the_mean() -> None:
    hidden = torch.zeros(2, 2, 8)  # the first batch, 4 of 6 tokens
    weights = {"a": torch.tensor([1.0, 3, 2, 2, 9, 9]), "b": torch.tensor([8.0, 0, 4, 4, 0, 0]), "c": torch.zeros(6)}
    counts = token_counts(weights, hidden)
    assert counts is not None and counts.tolist() == [[1.25, 0.75], [1.0, 1.0]]
    assert token_counts({}, hidden) is None and token_counts({"c": torch.zeros(6)}, hidden) is None


def test_a_fold_that_raises_the_layers_error_is_not_kept(outliers: Path, words: Path, tmp_path: Path) -> None:
    recipe = recipe_for(outliers, tmp_path / "out", words, method="rtn")
    finish(recipe)
    again = recipe_for(outliers, tmp_path / "harmed", words, method="rtn")
    plan = dataclasses.replace(make_plan(again), transforms=(Transform("harm", "raises the error", harmful),))
    report = run_plan(again, plan)
    folds = [fold for layer in report.layers for fold in layer.transforms]
    assert {fold.reason for fold in folds} == {"the layer's output would not come closer"}
    assert all(fold.output_after > fold.output_before for fold in folds)  # type: ignore[operator]
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "harmed"))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_structure_is_found_once_and_proven_on_every_layer(
    outliers: Path,
    words: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, proven = [], []
    find, prove = transform_module.find_pairs, transform_module.prove

    def counted_find(*args: Any) -> Any:
        found.append(args)
        return find(*args)

    def counted_prove(layer: Any, call: Any, hidden: Any, pair: Any) -> str | None:
        proven.append(pair)
        assert hidden.shape[:2] == (2, 32)
        reason = prove(layer, call, hidden, pair)
        return "made up" if pair.producer.module == "mlp.up_proj" and len(proven) > 4 else reason

    monkeypatch.setattr(transform_module, "find_pairs", counted_find)
    monkeypatch.setattr(transform_module, "prove", counted_prove)
    report = finish(recipe_for(outliers, tmp_path / "out", words, method="awq+rtn"))
    assert len(found) == 1 and len(proven) == 8
    (unproven,) = [fold for fold in report.layers[1].transforms if fold.reason == "made up"]
    assert unproven.producer == "model.layers.1.mlp.up_proj" and not unproven.kept
    assert "layer 1: mlp.up_proj cannot be folded here: made up" in report.warnings


# ------------------------------------------------------------------------------------------------ workspace


def test_verify_refuses_a_changed_tensor_that_differs_in_one_bit(
    outliers: Path,
    words: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = run_module.write_checkpoint

    def damaged(directory: Path, *args: Any) -> Any:
        written = original(directory, *args)
        tamper(directory / "model.safetensors", LAST_NORM, flip_one_bit)
        return written

    monkeypatch.setattr(run_module, "write_checkpoint", damaged)
    with pytest.raises(VerifyError, match=f"{LAST_NORM}: differs from what the transform made of it"):
        finish(recipe_for(outliers, tmp_path / "out", words, method="awq+rtn"))


def test_stopped_and_rerun_the_folded_output_is_byte_identical(outliers: Path, words: Path, tmp_path: Path) -> None:
    finish(recipe_for(outliers, tmp_path / "a" / "out", words, method="awq+gptq"))
    recipe = recipe_for(outliers, tmp_path / "b" / "out", words, method="awq+gptq")
    events: Iterator[Event] = quantize(recipe, make_plan(recipe))
    seen = []
    for event in events:
        seen.append(type(event))
        if isinstance(event, LayerDone):
            break
    events.close()  # type: ignore[attr-defined]
    assert LayerTransformed in seen
    finish(recipe)
    assert contents(tmp_path / "a" / "out") == contents(tmp_path / "b" / "out")


def test_a_run_is_not_carried_on_with_other_transforms(outliers: Path, words: Path, tmp_path: Path) -> None:
    from quantforge.errors import WorkspaceError

    recipe = recipe_for(outliers, tmp_path / "out", words, method="awq+gptq")
    events = quantize(recipe, make_plan(recipe))
    next(event for event in events if isinstance(event, LayerDone))
    events.close()  # type: ignore[attr-defined]
    with pytest.raises(WorkspaceError, match=r"method: was 'awq\+gptq', now 'gptq'"):
        finish(recipe.model_copy(update={"method": "gptq"}))


# ------------------------------------------------------------------------------------------------ quantized activations


def test_smoothquant_lowers_the_error_with_rounded_inputs(outliers: Path, words: Path, tmp_path: Path) -> None:
    recipe = recipe_for(outliers, tmp_path / "out", words, method="rtn", bits=8, group_size=-1).model_copy(
        update={"calibration": CalibrationRecipe(dataset=str(words), nsamples=16, seqlen=64)}
    )
    plan = dataclasses.replace(
        make_plan(recipe), transforms=(load_transform("smoothquant"),), activations=ActivationSpec()
    )
    assert plan.method == "smoothquant+rtn"
    report = run_plan(recipe, plan)
    assert {(0, "input_layernorm"), (1, "post_attention_layernorm")} <= set(kept(report))
    for layer in report.layers:
        for fold in layer.transforms:
            if fold.kept and "norm" in fold.producer:
                assert fold.error_after < 0.5 * fold.error_before  # type: ignore[operator]
