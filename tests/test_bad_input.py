"""Requests and files that cannot work, a disk that fills up, a run that is stopped: a clear error, and nothing lost."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge.errors import (
    CalibrationError,
    NumericsError,
    PlanError,
    QuantforgeError,
    SourceError,
    UsageError,
    WorkspaceError,
)
from quantforge.model import backward as backward_module
from quantforge.model.packed import PackedCheckpoint, open_any
from quantforge.pipeline import files as files_module
from quantforge.pipeline.plan import Plan, make_plan
from quantforge.pipeline.run import quantize
from quantforge.pipeline.workspace import Workspace
from quantforge.recipe import CalibrationRecipe, Recipe
from quantforge.report import Event, LayerDone, RunFinished, RunReport, RunStarted

WEIGHTS = "model.safetensors"
DEEP_LAYERS = 12
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def recipe(tiny_llama: Path, text: Path, tmp_path: Path) -> Recipe:
    """A small job that works; 64 x 64 tokens are just enough for no warning."""
    return Recipe(
        model=str(tiny_llama),
        output=str(tmp_path / "out"),
        group_size=64,
        calibration=CalibrationRecipe(dataset=str(text), nsamples=64, seqlen=64),
    )


def but(recipe: Recipe, **changes: Any) -> Recipe:
    return Recipe(**(recipe.model_dump() | {"calibration": recipe.calibration} | changes))


def start(recipe: Recipe) -> Iterator[Event]:
    return quantize(recipe, make_plan(recipe))


def finish(recipe: Recipe) -> RunReport:
    *_, last = start(recipe)
    assert isinstance(last, RunFinished)
    return last.report


def stop_after_first_layer(recipe: Recipe) -> Path:
    """Run until one layer is committed; returns the work directory."""
    events = start(recipe)
    next(event for event in events if isinstance(event, LayerDone))
    events.close()  # type: ignore[attr-defined]
    return work_of(recipe)


def work_of(recipe: Recipe) -> Path:
    return Path(f"{recipe.output}.partial")


def contents(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}


def copy_of(model: Path, tmp_path: Path, name: str = "model") -> Path:
    return Path(shutil.copytree(model, tmp_path / name))


def edit_weights(model: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(model / WEIGHTS)
    change(tensors)
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})


def edit_config(model: Path, **changes: Any) -> None:
    config = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps(config))


def error_of(kind: type[QuantforgeError], action: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        action()
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.fixture(scope="session")
def undisturbed(tiny_llama: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files that the job of `recipe` gives when nothing goes wrong."""
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    calibration = CalibrationRecipe(dataset=str(text), nsamples=64, seqlen=64)
    finish(Recipe(model=str(tiny_llama), output=str(output), group_size=64, calibration=calibration))
    return contents(output)


# ------------------------------------------------------------------------------------------------ requests


def test_a_group_size_that_does_not_divide_lists_every_site_and_what_fits(recipe: Recipe) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(but(recipe, group_size=96))
    (problem,) = caught.value.problems
    assert "group size 96 does not divide the input width of 12 sites" in problem
    offered = " --group-size 128, --group-size 64, --group-size 32, --group-size 16, or --group-size -1"
    assert f"These fit all sites:{offered} (one scale per output channel)" in problem
    listed = [line.strip() for line in problem.splitlines()[1:]]
    kinds = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    assert listed == [f"model.layers.*.{kind} (2 layers, 0 to 1): 128 inputs" for kind in kinds]


def test_a_group_size_wider_than_every_site_is_refused(recipe: Recipe) -> None:
    assert "group size 256 does not divide the input width of 14 sites" in error_of(
        PlanError, lambda: make_plan(but(recipe, group_size=256))
    )


def test_every_problem_of_a_plan_is_told_at_once(recipe: Recipe, tiny_llama: Path, tmp_path: Path) -> None:
    model = copy_of(tiny_llama, tmp_path)
    edit_weights(model, lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}))
    with pytest.raises(PlanError) as caught:
        make_plan(but(recipe, model=str(model), group_size=96, ignore=("nothing.like.this",)))
    assert len(caught.value.problems) == 3
    for said in ("1 tensors do not fit config.json", "group size 96", "--ignore nothing.like.this matches no linear"):
        assert said in str(caught.value)


def test_an_ignore_pattern_that_matches_nothing_shows_what_names_look_like(recipe: Recipe) -> None:
    message = error_of(PlanError, lambda: make_plan(but(recipe, ignore=("re:block_\\d+",))))
    assert message == "--ignore re:block_\\d+ matches no linear layer; names look like model.layers.0.self_attn.q_proj"


def test_an_ignore_pattern_that_is_no_regular_expression_is_refused(recipe: Recipe) -> None:
    assert "--ignore re:[: not a regular expression" in error_of(
        UsageError, lambda: make_plan(but(recipe, ignore=("re:[",)))
    )


@pytest.mark.parametrize("group_size", ["auto", 64, 96, -1])
def test_ignoring_everything_is_refused(recipe: Recipe, group_size: int | str) -> None:
    message = error_of(PlanError, lambda: make_plan(but(recipe, ignore=("*",), group_size=group_size)))
    assert message == "nothing to quantize: 14 linear layers found, all of them ignored"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": "magic"}, "unknown method 'magic'; known methods: gptq, rtn"),
        ({"formats": ("exl3",)}, "unknown format 'exl3'; known formats: awq, compressed-tensors, gguf, gptq, gptq-v2"),
        ({"formats": ("gptq", "gptq")}, "a format is given twice: gptq, gptq"),
        ({"options": {"dampening": 0.1}}, "method gptq has no option 'dampening'; its options are: act_order, "),
        ({"options": {"damping": 3.0}}, "gptq.damping must lie in [0, 1]; got 3.0"),
        ({"options": {"damping": "much"}}, "gptq.damping must be of type float; got 'much'"),
        ({"options": {"damping": True}}, "gptq.damping must be of type float; got True"),
        ({"options": {"block_size": 0}}, "gptq.block_size must lie in [1, inf]; got 0"),
    ],
)
def test_unknown_names_and_impossible_options_are_usage_errors(
    recipe: Recipe, changes: dict[str, Any], says: str
) -> None:
    assert says in error_of(UsageError, lambda: make_plan(but(recipe, **changes)))


# ------------------------------------------------------------------------------------------------ models


def test_an_already_quantized_source_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    finish(but(recipe, method="rtn"))
    again = but(recipe, model=str(recipe.output), output=str(tmp_path / "again"))
    message = error_of(PlanError, lambda: make_plan(again))
    assert message == f"{recipe.output} is already quantized (compressed-tensors); start from the original checkpoint"
    assert not work_of(again).exists()


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({"quantization_config": "int4"}, SourceError, "quantization_config is a str, not an object"),
        ({"quantization_config": {}}, PlanError, "already quantized (unknown)"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, PlanError, "already quantized (awq)"),
        ({"hidden_size": "wide"}, SourceError, "transformers cannot build this model"),
        ({"hidden_size": -128}, SourceError, "transformers cannot build this model"),
        ({"num_attention_heads": 0}, SourceError, "transformers cannot build this model"),
        ({"num_hidden_layers": 0}, SourceError, "no module list of 0 decoder layers"),
        ({"vocab_size": None}, SourceError, "transformers cannot build this model"),
        ({"hidden_act": "no-such-function"}, SourceError, "transformers cannot build this model"),
        ({"architectures": 5}, SourceError, "transformers cannot build this model"),
        ({"model_type": "never-heard-of", "architectures": ["Never"]}, SourceError, "cannot build this model"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, SourceError, ""),
    ],
)
def test_a_config_no_model_can_be_built_from_is_refused(
    recipe: Recipe, tiny_llama: Path, tmp_path: Path, changes: dict[str, Any], kind: type[QuantforgeError], says: str
) -> None:
    model = copy_of(tiny_llama, tmp_path)
    edit_config(model, **changes)
    message = error_of(kind, lambda: make_plan(but(recipe, model=str(model))))
    assert says in message


def test_a_model_with_its_own_code_needs_the_flag(recipe: Recipe, tiny_llama: Path, tmp_path: Path) -> None:
    model = copy_of(tiny_llama, tmp_path)
    (model / "configuration_own.py").write_text("raise RuntimeError('this ran')")
    edit_config(
        model,
        model_type="own",
        architectures=["OwnForCausalLM"],
        auto_map={"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "configuration_own.Own"},
    )
    message = error_of(SourceError, lambda: make_plan(but(recipe, model=str(model))))
    assert str(model) in message and "a model with its own code needs --trust-remote-code" in message
    assert "this ran" not in message


def test_shapes_that_do_not_fit_the_config_are_listed_before_weights_are_read(
    recipe: Recipe, tiny_llama: Path, tmp_path: Path
) -> None:
    model = copy_of(tiny_llama, tmp_path)
    edit_config(model, intermediate_size=256)
    message = error_of(PlanError, lambda: make_plan(but(recipe, model=str(model))))
    assert f"{model}: 6 tensors do not fit config.json" in message
    assert "  model.layers.0.mlp.gate_proj.weight: [384, 128], needed [256, 128]" in message
    assert "  model.layers.1.mlp.down_proj.weight: [128, 384], needed [128, 256]" in message


def test_integers_in_place_of_weights_are_refused(recipe: Recipe, tiny_llama: Path, tmp_path: Path) -> None:
    model = copy_of(tiny_llama, tmp_path)
    edit_weights(model, lambda tensors: tensors.update({UP: torch.ones(384, 128, dtype=torch.int8)}))
    message = error_of(PlanError, lambda: make_plan(but(recipe, model=str(model))))
    assert f"{UP}: I8, needed a floating point dtype" in message


@pytest.mark.parametrize(
    ("key", "kind", "says"),
    [
        (UP, SourceError, "1 parameters of the decoder layers have no tensor in the checkpoint"),
        ("model.layers.0.input_layernorm.weight", SourceError, "1 parameters of the decoder layers have no tensor"),
        ("model.norm.weight", PlanError, "no tensor for 1 parameters"),
        ("model.embed_tokens.weight", PlanError, "no tensor for 1 parameters"),
        ("lm_head.weight", PlanError, "no tensor for 1 parameters"),
    ],
)
def test_a_parameter_without_a_tensor_is_named_by_the_plan(
    recipe: Recipe, tiny_llama: Path, tmp_path: Path, key: str, kind: type[QuantforgeError], says: str
) -> None:
    model = copy_of(tiny_llama, tmp_path)
    edit_weights(model, lambda tensors: tensors.pop(key))
    message = error_of(kind, lambda: make_plan(but(recipe, model=str(model))))
    assert says in message and key in message


def test_tensors_of_no_parameter_are_announced_and_copied(recipe: Recipe, tiny_llama: Path, tmp_path: Path) -> None:
    model = copy_of(tiny_llama, tmp_path)
    edit_weights(model, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.ones(384, 128)}))
    changed = but(recipe, model=str(model), method="rtn")
    assert any("1 tensors belong to no parameter" in note for note in make_plan(changed).notes)
    finish(changed)
    assert torch.equal(
        load_file(f"{recipe.output}/{WEIGHTS}")["model.layers.2.mlp.up_proj.weight"], torch.ones(384, 128)
    )


def test_the_plan_of_a_sound_model_has_no_remark_on_its_tensors(recipe: Recipe, tiny_llama_tied: Path) -> None:
    for model in (recipe.model, str(tiny_llama_tied)):
        assert make_plan(but(recipe, model=model, token_weights="none")).notes == ()
        (note,) = make_plan(but(recipe, model=model)).notes
        assert note.startswith("calibration tokens are weighted")


# ------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("token_weights", "kept"), [("gradient", 0), ("none", 1)])
def test_a_non_finite_weight_is_named_before_the_first_layer_by_the_weighing_and_else_when_its_layer_comes(
    recipe: Recipe, tiny_llama: Path, tmp_path: Path, value: float, token_weights: str, kept: int
) -> None:
    model = copy_of(tiny_llama, tmp_path)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[UP][3, 5] = value

    edit_weights(model, spoil)
    changed = but(recipe, model=str(model), token_weights=token_weights)
    message = error_of(NumericsError, lambda: finish(changed))
    assert message == f"{model}: {UP} has 1 NaN or infinite values of {384 * 128}"
    assert not Path(str(recipe.output)).exists()
    assert Workspace(work_of(recipe)).done() == kept and not (work_of(recipe) / "scratch").exists()


@pytest.mark.parametrize("method", ["gptq", "rtn"])
@pytest.mark.parametrize("key", ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"])
def test_a_non_finite_tensor_outside_the_layers_is_found_before_the_first(
    recipe: Recipe, tiny_llama: Path, tmp_path: Path, key: str, method: str
) -> None:
    model = copy_of(tiny_llama, tmp_path)
    edit_weights(model, lambda tensors: tensors[key].view(-1)[7:9].fill_(float("nan")))
    message = error_of(NumericsError, lambda: finish(but(recipe, model=str(model), method=method)))
    assert f"{key} has 2 NaN or infinite values" in message
    assert not Path(str(recipe.output)).exists() and not list(work_of(recipe).glob("layer-*"))


@pytest.mark.parametrize("method", ["gptq", "rtn"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_of_zeros_and_of_one_value_are_reproduced(
    recipe: Recipe, tiny_llama: Path, tmp_path: Path, method: str, symmetric: bool
) -> None:
    model = copy_of(tiny_llama, tmp_path)

    def flatten(tensors: dict[str, torch.Tensor]) -> None:
        tensors[UP][:8, :64] = 0  # a group of zeros
        tensors["model.layers.0.mlp.gate_proj.weight"].fill_(0.25)
        tensors["model.layers.0.self_attn.v_proj.weight"].zero_()
        tensors["model.layers.1.self_attn.o_proj.weight"].fill_(-3e-9)

    edit_weights(model, flatten)
    report = finish(but(recipe, model=str(model), method=method, symmetric=symmetric))
    assert not report.fallbacks
    written = open_any(str(recipe.output))
    assert not written.read(UP)[:8, :64].any() and written.read(UP)[8:].any()
    assert not written.read("model.layers.0.self_attn.v_proj.weight").any()
    constant = written.read("model.layers.0.mlp.gate_proj.weight")
    assert bool((constant > 0).all()) and float(constant.max()) <= 0.5
    if method == "rtn":
        assert float((constant - 0.25).abs().max()) <= 0.25 * 2 / 15  # one step of the grid
    assert float(written.read("model.layers.1.self_attn.o_proj.weight").abs().max()) <= 2.0**-24


def test_an_input_that_is_never_active_is_reported(recipe: Recipe, tiny_llama: Path, tmp_path: Path) -> None:
    model = copy_of(tiny_llama, tmp_path)

    def silence(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][:, [9, 70]] = 0

    edit_weights(model, silence)
    report = finish(but(recipe, model=str(model)))
    dead = {site.name: site.dead_inputs for layer in report.layers for site in layer.sites if site.dead_inputs}
    assert dead == {f"model.layers.0.self_attn.{name}_proj": 2 for name in "qkv"}
    assert "model.layers.0.self_attn.q_proj: 2 of 128 inputs were never active" in report.warnings
    written = open_any(str(recipe.output))
    assert isinstance(written, PackedCheckpoint)
    solved = written.decode("model.layers.0.self_attn.q_proj")
    weight = load_file(model / WEIGHTS)["model.layers.0.self_attn.q_proj.weight"]
    for column in (9, 70):  # nothing is known about it, so it is rounded to nearest
        scale, zero = solved.scale[:, column // 64].float(), solved.zero[:, column // 64].float()
        nearest = (weight[:, column] / scale).round().add(zero).clamp(0, 15)
        assert torch.equal(solved.codes[:, column].float(), nearest)


# ------------------------------------------------------------------------------------------------ calibration


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no text at all (1 empty documents)"),
        (" \n\t\n", "no text at all"),
        ("a fox", "too short for one sequence"),
    ],
)
def test_calibration_text_that_is_empty_or_too_short_is_refused(
    recipe: Recipe, tmp_path: Path, content: str, says: str
) -> None:
    (tmp_path / "short.txt").write_text(content)
    calibration = CalibrationRecipe(dataset=str(tmp_path / "short.txt"), nsamples=4, seqlen=64)
    message = error_of(CalibrationError, lambda: finish(but(recipe, calibration=calibration)))
    assert "short.txt" in message and says in message and "--dataset" in message
    assert not work_of(recipe).exists()


def test_a_calibration_file_that_is_not_there_is_named(recipe: Recipe) -> None:
    calibration = CalibrationRecipe(dataset="./no-such-file.txt")
    message = error_of(CalibrationError, lambda: finish(but(recipe, calibration=calibration)))
    assert message == "no such file or folder: ./no-such-file.txt"


@pytest.mark.parametrize(
    "damage",
    [
        lambda model: (model / "tokenizer.json").unlink(),
        lambda model: (model / "tokenizer.json").write_text("{"),
        lambda model: (model / "tokenizer.json").write_text("{}"),
        lambda model: (model / "tokenizer.json").write_text('{"added_tokens": [], "model": {"type": "Riddle"}}'),
        lambda model: (model / "tokenizer_config.json").write_text("["),
    ],
)
def test_a_model_without_a_readable_tokenizer_is_refused(
    recipe: Recipe, tiny_llama: Path, tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    model = copy_of(tiny_llama, tmp_path)
    damage(model)
    message = error_of(SourceError, lambda: finish(but(recipe, model=str(model))))
    assert f"{model} has no tokenizer that can be read" in message
    assert not work_of(recipe).exists()


def test_round_to_nearest_needs_no_tokenizer(recipe: Recipe, tiny_llama: Path, tmp_path: Path) -> None:
    model = copy_of(tiny_llama, tmp_path)
    (model / "tokenizer.json").unlink()
    assert finish(but(recipe, model=str(model), method="rtn")).outputs[0].tensors > 0


def test_a_tokenizer_of_another_vocabulary_is_refused(recipe: Recipe, tiny_llama: Path, tmp_path: Path) -> None:
    model = copy_of(tiny_llama, tmp_path)
    edit_config(model, vocab_size=100)

    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        for key in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[key] = tensors[key][:100].clone()

    edit_weights(model, shrink)
    message = error_of(QuantforgeError, lambda: finish(but(recipe, model=str(model))))
    assert "the model has 100 embeddings; tokenizer and weights do not belong together" in message
    assert not work_of(recipe).exists()


def test_strict_refuses_a_warning_known_in_advance_before_any_work(recipe: Recipe, text: Path) -> None:
    calibration = CalibrationRecipe(dataset=str(text), nsamples=4, seqlen=32)
    message = error_of(QuantforgeError, lambda: finish(but(recipe, strict=True, calibration=calibration)))
    assert "--strict: 1 warnings, nothing was published" in message and "128 calibration tokens are few" in message
    assert not work_of(recipe).exists()


def test_strict_refuses_a_warning_of_the_solver_and_keeps_the_layers(
    recipe: Recipe, tiny_llama: Path, tmp_path: Path
) -> None:
    model = copy_of(tiny_llama, tmp_path)

    def silence(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][:, 9] = 0

    edit_weights(model, silence)
    strict = but(recipe, model=str(model), strict=True)
    message = error_of(QuantforgeError, lambda: finish(strict))
    assert "--strict: 3 warnings, nothing was published" in message and "were never active" in message
    assert not Path(str(recipe.output)).exists()
    started = next(event for event in start(but(strict, strict=False)) if isinstance(event, RunStarted))
    assert started.done == 2


def test_strict_lets_a_clean_run_pass(recipe: Recipe) -> None:
    assert finish(but(recipe, strict=True)).warnings == ()


# ------------------------------------------------------------------------------------------------ output


def existing_directory(path: Path) -> None:
    path.mkdir()
    (path / "precious.txt").write_text("keep me")


def existing_file(path: Path) -> None:
    path.write_text("keep me")


def report_of_another_job(path: Path) -> None:
    path.mkdir()
    (path / "quantforge.json").write_text('{"fingerprint": {"bits": 4}, "layers": []}')


def damaged_report(path: Path) -> None:
    path.mkdir()
    (path / "quantforge.json").write_text("[")


def report_that_is_a_list(path: Path) -> None:
    path.mkdir()
    (path / "quantforge.json").write_text("[]")


@pytest.mark.parametrize(
    "make",
    [existing_directory, existing_file, report_of_another_job, damaged_report, report_that_is_a_list, Path.mkdir],
)
def test_an_output_that_exists_is_refused_and_left_as_it_is(recipe: Recipe, make: Callable[[Path], None]) -> None:
    output = Path(str(recipe.output))
    make(output)
    before = contents(output) if output.is_dir() else {"": output.read_bytes()}
    message = error_of(WorkspaceError, lambda: finish(recipe))
    assert message == f"{output} already exists; choose another --output or remove it"
    assert (contents(output) if output.is_dir() else {"": output.read_bytes()}) == before
    assert not work_of(recipe).exists()


def test_an_output_that_is_a_broken_link_is_refused_before_any_work(recipe: Recipe, tmp_path: Path) -> None:
    os.symlink(tmp_path / "nowhere", str(recipe.output))
    assert "already exists" in error_of(WorkspaceError, lambda: finish(recipe))
    assert not work_of(recipe).exists()


@pytest.mark.parametrize("output", [".", "..", "/"])
def test_an_output_that_has_no_name_of_its_own_is_refused(
    recipe: Recipe, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    assert "already exists" in error_of(WorkspaceError, lambda: finish(but(recipe, output=output)))
    assert not list((tmp_path / "inner").iterdir())


def test_a_work_directory_of_someone_else_is_refused_and_left_as_it_is(recipe: Recipe) -> None:
    work_of(recipe).mkdir()
    for name in ("precious.txt", "lock", "layer-00000.json"):
        (work_of(recipe) / name).write_text("keep me")
    before = contents(work_of(recipe))
    message = error_of(WorkspaceError, lambda: finish(recipe))
    assert f"{work_of(recipe)} is needed for unfinished work, but holds 2 other files" in message
    assert "precious.txt" in message and "--output" in message
    assert contents(work_of(recipe)) == before


def test_a_finished_job_leaves_a_foreign_directory_of_the_work_name_alone(recipe: Recipe) -> None:
    finish(recipe)
    existing_directory(work_of(recipe))
    finish(recipe)
    assert contents(work_of(recipe)) == {"precious.txt": b"keep me"}


def test_an_output_in_a_folder_that_is_not_there_yet_is_made(recipe: Recipe, tmp_path: Path) -> None:
    deep = but(recipe, output=str(tmp_path / "a" / "b" / "out"), method="rtn")
    assert Path(finish(deep).outputs[0].path, WEIGHTS).is_file()


def test_an_output_below_a_file_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("keep me")
    message = error_of(WorkspaceError, lambda: finish(but(recipe, output=str(tmp_path / "file" / "out"))))
    assert "Not a directory" in message and str(tmp_path / "file" / "out.partial") in message
    assert (tmp_path / "file").read_text() == "keep me"


def test_an_output_name_the_file_system_refuses_is_an_error_that_says_so(recipe: Recipe, tmp_path: Path) -> None:
    message = error_of(WorkspaceError, lambda: finish(but(recipe, output=str(tmp_path / ("x" * 250)))))
    assert message.startswith("File name too long: ") and "--output" in message


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EPERM])
def test_a_folder_that_may_not_be_written_is_an_error_that_says_so(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(self: Path, *rest: Any, **more: Any) -> None:
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    message = error_of(WorkspaceError, lambda: finish(recipe))
    assert message.startswith(f"{os.strerror(number)}: {work_of(recipe)} could not be written")


def test_an_output_that_appears_during_the_run_is_not_overwritten(recipe: Recipe) -> None:
    output = Path(str(recipe.output))
    events = start(recipe)
    next(event for event in events if isinstance(event, LayerDone))
    existing_directory(output)
    message = error_of(WorkspaceError, lambda: list(events))
    assert f"{output} appeared during the run; the finished output is in {work_of(recipe) / 'output'}" in message
    assert contents(output) == {"precious.txt": b"keep me"}
    assert (work_of(recipe) / "output" / WEIGHTS).is_file()


def test_contradictory_generation_settings_are_carried_over(recipe: Recipe, tiny_llama: Path, tmp_path: Path) -> None:
    model = copy_of(tiny_llama, tmp_path)
    odd = '{"do_sample": false, "temperature": 0.9,\n   "top_p": 0.5}'
    (model / "generation_config.json").write_text(odd)
    finish(but(recipe, model=str(model), method="rtn", formats=("compressed-tensors", "gptq")))
    for name in ("compressed-tensors", "gptq"):
        assert Path(str(recipe.output), name, "generation_config.json").read_text() == odd


# ------------------------------------------------------------------------------------------------ work directory


def test_a_second_process_in_one_work_directory_is_refused(recipe: Recipe) -> None:
    events = start(recipe)
    next(event for event in events if isinstance(event, LayerDone))
    before = contents(work_of(recipe))
    message = error_of(WorkspaceError, lambda: finish(recipe))
    assert message == f"{work_of(recipe)} is in use by another quantforge process"
    assert contents(work_of(recipe)) == before
    assert isinstance([*events][-1], RunFinished)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"bits": 3}, "  bits: was 4, now 3"),
        ({"group_size": 32}, "  group_size: was 64, now 32"),
        ({"symmetric": False}, "  symmetric: was True, now False"),
        ({"options": {"damping": 0.5}}, "  options.damping: was 0.01, now 0.5"),
        ({"ignore": ("*.o_proj",)}, "  ignore: was [], now ['*.o_proj']"),
        ({"sequential": "group"}, "  sequential: was 'layer', now 'group'"),
        ({"max_shard_size": "1MB"}, "  max_shard_bytes: was 5000000000, now 1000000"),
    ],
)
def test_other_settings_on_unfinished_work_are_named_with_both_values(
    recipe: Recipe, changes: dict[str, Any], line: str
) -> None:
    work = stop_after_first_layer(recipe)
    before = contents(work)
    message = error_of(WorkspaceError, lambda: finish(but(recipe, **changes)))
    assert f"{work} holds the unfinished layers of a different run" in message
    assert message.splitlines()[1:] == [line]
    assert contents(work) == before


def test_other_weights_on_unfinished_work_are_refused(recipe: Recipe, tiny_llama: Path, tmp_path: Path) -> None:
    work = stop_after_first_layer(recipe)
    model = copy_of(tiny_llama, tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][0] += 1

    edit_weights(model, change)
    message = error_of(WorkspaceError, lambda: finish(but(recipe, model=str(model))))
    assert [line.split(":")[0] for line in message.splitlines()[1:]] == ["  files.model.safetensors", "  model"]
    assert (work / "layer-00000.json").exists()


NOT_JSON = ["", "{", "[]"]


@pytest.mark.parametrize(
    ("name", "damage"),
    [("fingerprint.json", damage) for damage in NOT_JSON]
    + [("layer-00000.json", damage) for damage in [*NOT_JSON, "{}", '{"layer": 0, "sites": 7, "warnings": []}', "cut"]]
    + [
        (name, damage)
        for name in ("layer-00000.safetensors", "hidden-00001.safetensors")
        for damage in ("", "cut", "gone")
    ],
)
def test_damaged_work_is_named_and_not_built_upon(recipe: Recipe, name: str, damage: str) -> None:
    work = stop_after_first_layer(recipe)
    file = work / name
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-100] if damage == "cut" else damage.encode())
    message = error_of(WorkspaceError, lambda: finish(recipe))
    assert f"{file} is missing or damaged" in message and f"delete {work} to start again" in message
    assert not Path(str(recipe.output)).exists()


def test_work_without_a_fingerprint_is_not_built_upon(recipe: Recipe) -> None:
    work = stop_after_first_layer(recipe)
    (work / "fingerprint.json").unlink()
    before = contents(work)
    assert "no fingerprint.json" in error_of(WorkspaceError, lambda: finish(recipe))
    assert contents(work) == before


def test_a_committed_site_of_other_dimensions_is_damage(recipe: Recipe) -> None:
    work = stop_after_first_layer(recipe)
    plan: Plan = make_plan(recipe)
    name = plan.sites[0].name
    with pytest.raises(WorkspaceError, match=r"layer-00000\.safetensors is missing or damaged"):
        Workspace(work).weight(0, name, 4096)
    with pytest.raises(WorkspaceError, match=r"layer-00000\.safetensors is missing or damaged"):
        Workspace(work).weight(0, "no.such.site", 128)


# ------------------------------------------------------------------------------------------------ full disk


class FullDisk:
    """From the moment it is `arm`ed, files whose name begins with `name` meet a full disk, when written or flushed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, moment: str, number: int = errno.ENOSPC) -> None:
        self.name, self.moment, self.number = name, moment, number
        self.refused = 0
        self._watched: set[int] = set()
        self._open, self._fsync = open, os.fsync
        for module in (files_module, backward_module):
            monkeypatch.setattr(module, "open", self.open, raising=False)
        monkeypatch.setattr(os, "fsync", self.fsync)

    def open(self, file: Path, mode: str, **more: Any) -> Any:
        handle = self._open(file, mode, **more)
        if "w" in mode and Path(file).name.startswith(self.name):
            if self.moment == "write":
                return Full(handle, self)
            self._watched.add(handle.fileno())
        return handle

    def fsync(self, descriptor: int) -> None:
        if descriptor in self._watched:
            self._watched.discard(descriptor)
            self.refuse()
        self._fsync(descriptor)

    def refuse(self) -> None:
        self.refused += 1
        raise OSError(self.number, os.strerror(self.number))


class Full:
    """A file that takes the first half of a write."""

    def __init__(self, handle: Any, disk: FullDisk) -> None:
        self.handle, self.disk = handle, disk

    def __enter__(self) -> "Full":
        return self

    def __exit__(self, *raised: Any) -> None:
        self.handle.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name)

    def write(self, data: Any) -> None:
        self.handle.write(bytes(data)[: len(data) // 2])
        self.disk.refuse()


KEPT = {
    "fingerprint.json": 0, "token-weights.safetensors": 0, "layer-00000.safetensors": 0, "hidden-00001": 0,
    "layer-00000.json": 0, "layer-00001.safetensors": 1, "model.safetensors": 2, "tokenizer.json": 2, "config.json": 2,
    "quantforge.json": 2, "input-00001.bin": 0,
}  # fmt: skip
"""Layers that are kept when there is no room for a file."""

NOT_FLUSHED = "input-00001.bin"


@pytest.mark.parametrize(
    ("name", "moment"),
    [(name, moment) for name in KEPT for moment in ("write", "flush") if (name, moment) != (NOT_FLUSHED, "flush")],
)
def test_a_full_disk_is_told_and_the_rerun_gives_the_undisturbed_bytes(
    recipe: Recipe, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, name: str, moment: str
) -> None:
    with monkeypatch.context() as patch:
        disk = FullDisk(patch, name, moment)
        with pytest.raises(WorkspaceError) as caught:
            finish(recipe)
        assert disk.refused == 1
    message = str(caught.value)
    refused = f"/{name}" if name != NOT_FLUSHED else f"{work_of(recipe)} could not be written"
    assert message.startswith("the disk is full: ") and refused in message
    assert f"finished layers are kept in {work_of(recipe)}" in message and "free some space" in message
    assert caught.value.exit_code == 1
    assert not list(work_of(recipe).rglob("*.tmp"))
    assert not (work_of(recipe) / "output").exists() and not Path(str(recipe.output)).exists()
    assert not (work_of(recipe) / "scratch").exists()
    kept = len(list(work_of(recipe).glob("layer-*.json")))
    assert kept == KEPT[name]
    started = next(event for event in start(recipe) if isinstance(event, RunStarted))
    assert started.done == kept
    finish(recipe)
    assert contents(Path(str(recipe.output))) == undisturbed
    assert not work_of(recipe).exists()


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EIO, errno.EFBIG])
def test_other_refusals_of_the_disk_are_told_too(recipe: Recipe, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    FullDisk(monkeypatch, "model.safetensors", "write", number)
    message = error_of(WorkspaceError, lambda: finish(but(recipe, method="rtn")))
    reason = "the disk is full" if number == errno.EDQUOT else os.strerror(number)
    assert message.startswith(f"{reason}: {work_of(recipe) / 'output' / WEIGHTS} could not be written")


# ------------------------------------------------------------------------------------------------ signals


@pytest.fixture(scope="session")
def deep_llama(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of many small layers, so that a signal finds it at work."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("deep") / "deep-llama"
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=DEEP_LAYERS, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    for file in tiny_llama.glob("tokenizer*"):
        shutil.copy(file, path)
    return path


def deep_job(model: Path, text: Path, output: Path) -> Recipe:
    calibration = CalibrationRecipe(dataset=str(text), nsamples=64, seqlen=64)
    return Recipe(model=str(model), output=str(output), group_size=32, calibration=calibration)


@pytest.fixture(scope="session")
def deep_undisturbed(deep_llama: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    output = tmp_path_factory.mktemp("deep-undisturbed") / "out"
    finish(deep_job(deep_llama, text, output))
    return contents(output)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_command_with_130_and_the_rerun_finishes(
    deep_llama: Path, deep_undisturbed: dict[str, bytes], text: Path, tmp_path: Path, number: signal.Signals
) -> None:
    output = tmp_path / "out"
    arguments = ["--group-size", "32", "--dataset", str(text), "--nsamples", "64", "--seqlen", "64", "-o", str(output)]
    command = [sys.executable, "-m", "quantforge", "quantize", str(deep_llama), *arguments]
    heard = partial(signal.signal, number, signal.SIG_DFL)  # a shell's background jobs are deaf to SIGINT
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    try:
        deadline = time.monotonic() + 300  # a busy machine takes long to start
        while not list(tmp_path.glob("out.partial/layer-*.json")) and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert out == "" and "Traceback" not in err and "run the same command again" in err
    assert not output.exists() and not list(tmp_path.rglob("*.tmp"))
    done = len(list(tmp_path.glob("out.partial/layer-*.json")))
    assert 1 <= done < DEEP_LAYERS
    events = list(start(deep_job(deep_llama, text, output)))
    assert isinstance(events[0], RunStarted) and events[0].done == done
    assert isinstance(events[-1], RunFinished)
    assert contents(output) == deep_undisturbed
