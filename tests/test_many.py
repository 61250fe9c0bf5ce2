"""Several outputs in one run: what is shared is done once, and every output is the one a run of its own gives."""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from test_pipeline import contents, finish, recipe_for

from quantforge.cli import main
from quantforge.errors import PlanError, UsageError, WorkspaceError
from quantforge.model.streamed import StreamedModel
from quantforge.pipeline import calibrate as calibrate_module
from quantforge.pipeline import influence, layers, together
from quantforge.pipeline.many import plan_many, quantize_many
from quantforge.recipe import CalibrationRecipe, Recipe
from quantforge.report import Event, LayerDone, RunFinished, RunReport, RunStarted, VariantEvent, VariantsStarted

METHODS = ("gptq", "awq+gptq", "rtn")


@pytest.fixture
def recipe(tiny_llama: Path, text: Path, tmp_path: Path) -> Recipe:
    few = CalibrationRecipe(dataset=str(text), nsamples=8, seqlen=64)
    return recipe_for(tiny_llama, tmp_path / "out", text, sequential="none", calibration=few)


def but(recipe: Recipe, **changes: Any) -> Recipe:
    return Recipe(**recipe.model_dump(exclude_unset=True) | changes)


def several(recipe: Recipe, bits: tuple[int, ...] = (4,), methods: tuple[str, ...] = ("gptq",)) -> list[Recipe]:
    return [but(recipe, bits=width, method=method) for width, method in product(bits, methods)]


def finish_many(recipes: list[Recipe]) -> dict[str, RunReport]:
    happened = [event for event in quantize_many(plan_many(recipes)) if isinstance(event, VariantEvent)]
    return {event.variant: event.event.report for event in happened if isinstance(event.event, RunFinished)}


def alone(recipe: Recipe, output: Path) -> dict[str, bytes]:
    finish(but(recipe, output=str(output)))
    return contents(output)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the expensive things were done."""
    counts: Counter[str] = Counter()

    def watch(owner: Any, name: str, what: Any) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **named: Any) -> Any:
            counts[what(*args)] += 1
            return original(*args, **named)

        monkeypatch.setattr(owner, name, watched)

    watch(together, "observe", lambda run, index, *_: f"observe {index}")
    watch(layers, "observe", lambda run, index, *_: f"observe {index}")
    watch(StreamedModel, "load_layer", lambda self, index: f"load {index}")
    watch(influence, "backward", lambda *_: "weigh")
    watch(calibrate_module, "sample_sequences", lambda *_: "sample")
    watch(together, "solve_sites", lambda *_: "solve")
    return counts


# ------------------------------------------------------------------------------------------------ the same bytes


def test_with_sequential_none_every_variant_has_the_bytes_of_a_run_of_its_own(recipe: Recipe, tmp_path: Path) -> None:
    recipes = [*several(recipe, (4,), METHODS), *several(recipe, (3,))]
    finish_many(recipes)
    found = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert found == sorted(["w4g64-gptq", "w4g64-awq-gptq", "w4g64-rtn", "w3g64-gptq"])
    for number, one in enumerate(recipes):
        name = f"w{one.bits}g64-{one.method.replace('+', '-')}"
        assert contents(tmp_path / "out" / name) == alone(one, tmp_path / f"alone{number}"), name


@pytest.mark.parametrize("sequential", ["layer", "group"])
def test_by_layer_and_by_group_every_variant_has_the_bytes_of_a_run_of_its_own(
    recipe: Recipe, tmp_path: Path, sequential: str
) -> None:
    recipes = several(but(recipe, sequential=sequential), (4, 3))
    finish_many(recipes)
    for one in recipes:
        single = alone(one, tmp_path / f"alone{one.bits}")
        assert contents(tmp_path / "out" / f"w{one.bits}g64-gptq") == single


def test_variants_may_differ_in_their_sites_and_in_how_activations_are_rounded(recipe: Recipe, tmp_path: Path) -> None:
    wide = but(recipe, bits=8, group_size=-1)
    recipes = [
        wide,
        but(wide, activation_bits=8),
        but(wide, activation_bits=8, method="smoothquant+gptq"),
        but(wide, ignore=("*.k_proj",), bits=4),
        but(wide, rules=({"match": "re:layers.0", "skip": True},), bits=3),
    ]
    finish_many(recipes)
    for number, one in enumerate(recipes):
        name = plan_many([but(one, output=None)])[0][1].output.name.removeprefix("tiny-llama-")
        assert contents(tmp_path / "out" / name) == alone(one, tmp_path / f"alone{number}"), name


def test_variants_with_a_budget_choose_their_own_bits(recipe: Recipe, tmp_path: Path) -> None:
    recipes = [but(recipe, avg_bits=3.5, method=method) for method in ("gptq", "rtn")]
    reports = finish_many(recipes)
    assert list(reports) == ["w3.5g64-gptq", "w3.5g64-rtn"]
    assert all(report.allocation is not None for report in reports.values())
    assert contents(tmp_path / "out" / "w3.5g64-rtn") == alone(recipes[1], tmp_path / "alone")


# ------------------------------------------------------------------------------------------------ done once


def test_three_bit_widths_of_one_method_load_and_observe_each_layer_once(
    recipe: Recipe, counted: Counter[str], tmp_path: Path
) -> None:
    finish(but(recipe, output=str(tmp_path / "alone")))
    single = Counter(counted)
    counted.clear()
    finish_many(several(recipe, (4, 3, 8)))
    assert counted["observe 0"] == counted["observe 1"] == single["observe 0"] == 1
    assert (counted["load 0"], counted["load 1"]) == (single["load 0"], single["load 1"])
    assert counted["weigh"] == 1
    assert counted["solve"] == 3 * single["solve"] == 3 * 8


def test_transforms_share_the_observation_and_have_the_layer_read_again(recipe: Recipe, counted: Counter[str]) -> None:
    reports = finish_many(several(recipe, (4, 3), ("awq+gptq", "gptq")))
    assert counted["observe 0"] == counted["observe 1"] == counted["weigh"] == 1
    kept = [any(fold.kept for fold in reports["w4g64-awq-gptq"].layers[index].transforms) for index in (0, 1)]
    assert any(kept), "or there would be nothing to be read again"
    # layer 0 is also loaded when the pass begins (and with it each transform's), and every layer twice to be weighed
    assert counted["load 1"] == 2 + 1 + sum(
        any(fold.kept for fold in report.layers[1].transforms) for name, report in reports.items() if "awq" in name
    )


@pytest.mark.parametrize("sequential", ["layer", "none"])
def test_tokens_are_sampled_once_for_all_and_what_is_repeated_is_announced(
    recipe: Recipe, counted: Counter[str], sequential: str
) -> None:
    sampled = CalibrationRecipe(dataset="self", nsamples=4, seqlen=32)
    recipes = several(but(recipe, calibration=sampled, sequential=sequential), (4, 3))
    (started,) = [e for e in quantize_many(plan_many(recipes)) if isinstance(e, VariantsStarted)]
    assert (counted["sample"], counted["weigh"]) == (1, 1)
    assert started.variants == ("w4g64-gptq", "w3g64-gptq")
    assert counted["observe 0"] == (2 if sequential == "layer" else 1)
    repeated = (
        "calibrated again for each of 2 variants, because sequential: layer feeds each its own quantized inputs; "
        "--sequential none shares the pass"
    )
    assert started.notes == ((repeated,) if sequential == "layer" else ())


# ------------------------------------------------------------------------------------------------ stopped and resumed


def stop_at(recipes: list[Recipe], last: Any, variant: str) -> list[Event]:
    """The events up to the first of a kind of one variant, after which the run ends."""
    events: Iterator[Event] = quantize_many(plan_many(recipes))
    seen: list[Event] = []
    for event in events:
        seen.append(event)
        if isinstance(event, VariantEvent) and event.variant == variant and isinstance(event.event, last):
            break
    events.close()  # type: ignore[attr-defined]
    return seen


@pytest.mark.parametrize("sequential", ["none", "layer"])
def test_finished_variants_are_not_redone_and_unfinished_layers_are_carried_on(
    recipe: Recipe, counted: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sequential: str
) -> None:
    sampled = CalibrationRecipe(dataset="self", nsamples=4, seqlen=32)
    recipes = several(but(recipe, calibration=sampled, sequential=sequential), (4, 3))
    out = tmp_path / "out"
    if sequential == "none":  # after layer 0 of the first, before that of the second
        stop_at(recipes, LayerDone, "w4g64-gptq")
        assert [(out / f"w{bits}g64-gptq.partial" / "layer-00000.json").exists() for bits in (4, 3)] == [True, False]
        counted.clear()
    stop_at(recipes, RunFinished, "w4g64-gptq")
    before = contents(out / "w4g64-gptq")
    assert (counted["sample"], counted["weigh"]) == ((0, 0) if sequential == "none" else (1, 1))
    counted.clear()
    events = list(quantize_many(plan_many(recipes)))
    assert (counted["sample"], counted["weigh"]) == (0, 0)
    assert (counted["observe 0"], counted["observe 1"]) == ((0, 0) if sequential == "none" else (1, 1))
    started = {e.variant: e.event for e in events if isinstance(e, VariantEvent) and isinstance(e.event, RunStarted)}
    assert [started[f"w{bits}g64-gptq"].done for bits in (4, 3)] == [2, 2 if sequential == "none" else 0]
    assert contents(out / "w4g64-gptq") == before
    for one in recipes:
        assert contents(out / f"w{one.bits}g64-gptq") == alone(one, tmp_path / f"alone{one.bits}")
    assert not list(out.glob("*.partial"))


def test_a_variant_of_a_stopped_run_can_be_carried_on_alone_and_the_others_after_it(
    recipe: Recipe, counted: Counter[str], tmp_path: Path
) -> None:
    sampled = CalibrationRecipe(dataset="self", nsamples=4, seqlen=32)
    first = several(but(recipe, calibration=sampled), (4,), ("gptq", "awq+gptq"))
    recipes = [*first, *several(but(recipe, calibration=sampled), (3,))]
    stop_at(recipes, LayerDone, "w4g64-awq-gptq")
    counted.clear()
    out = tmp_path / "out"
    finish(but(recipes[2], output=str(out / "w3g64-gptq")))
    assert (counted["sample"], counted["weigh"], counted["observe 0"]) == (0, 0, 1)
    finish_many(recipes)
    for number, one in enumerate(recipes):
        name = f"w{one.bits}g64-{one.method.replace('+', '-')}"
        assert contents(out / name) == alone(one, tmp_path / f"alone{number}"), name


# ------------------------------------------------------------------------------------------------ refusals


def test_problems_of_all_plans_come_before_any_work_with_the_names_of_their_variants(
    recipe: Recipe, counted: Counter[str], tmp_path: Path
) -> None:
    recipes = [but(recipe, group_size=group, bits=bits) for bits, group in ((4, 64), (3, 48), (8, 48))]
    with pytest.raises(PlanError) as refused:
        plan_many(recipes)
    (first, *_) = str(refused.value).splitlines()
    assert first.startswith("w3g48-gptq, w8g48-gptq: ") and "48" in first
    with pytest.raises(UsageError, match=r"w4g64-gtpq: .*unknown method 'gtpq'"):
        plan_many(several(recipe, (4,), ("gptq", "gtpq")))
    assert not counted["observe 0"] and not (tmp_path / "out").exists()


def test_variants_that_do_not_go_together_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"would be written to .*w4g64-gptq; give each once"):
        plan_many(several(recipe, (4, 4)))
    with pytest.raises(UsageError, match=r"must agree in sequential \(sequential: 'none', 'layer'\)"):
        plan_many([recipe, but(recipe, sequential="layer", bits=3)])
    finish(recipe)
    with pytest.raises(UsageError, match="out is a checkpoint itself"):
        plan_many(several(recipe, (4, 3)))


def test_a_foreign_output_of_one_variant_is_found_before_any_work(
    recipe: Recipe, counted: Counter[str], tmp_path: Path
) -> None:
    (tmp_path / "out" / "w3g64-gptq").mkdir(parents=True)
    with pytest.raises(WorkspaceError, match="w3g64-gptq already exists"):
        finish_many(several(recipe, (4, 3)))
    finish(but(recipe, bits=8, output=str(tmp_path / "out" / "w2g64-gptq")))
    counted.clear()
    with pytest.raises(WorkspaceError, match=r"^w2g64-gptq: .*w2g64-gptq already exists"):
        finish_many(several(recipe, (4, 2)))
    assert not counted


# ------------------------------------------------------------------------------------------------ the command line


def test_the_command_ends_in_a_table_or_one_document_with_a_list(
    tiny_llama: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["quantize", str(tiny_llama), "--bits", "4,3", "--method", "rtn,gptq", "--sequential", "none"]
    argv += [
        "--group-size",
        "64",
        "--dataset",
        str(text),
        "--nsamples",
        "4",
        "--seqlen",
        "64",
        "-o",
        str(tmp_path / "out"),
    ]
    assert main([*argv, "--dry-run"]) == 0
    planned = capsys.readouterr().out.splitlines()
    assert planned[0].split() == ["variant", "size", "bits/weight", "loss", "output"]
    assert [line.split()[0] for line in planned[1:5]] == ["w4g64-rtn", "w4g64-gptq", "w3g64-rtn", "w3g64-gptq"]
    assert main(argv) == 0
    shown = capsys.readouterr()
    assert "w3g64-gptq: layer 2/2  loss 0." in shown.err and "w4g64-rtn: verifying compressed-tensors" in shown.err
    rows = shown.out.splitlines()
    assert rows[2].split()[3:] == ["4.250", *rows[2].split()[4:7], str(tmp_path / "out" / "w4g64-gptq")]
    assert rows[2].split()[5:7] == ["x", "RTN"] and rows[1].split()[4] == "-"
    assert main([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["variants"]
    assert [one["plan"]["bits"] for one in document["variants"]] == [4, 4, 3, 3]
    assert [one["recipe"]["method"] for one in document["variants"]] == ["rtn", "gptq"] * 2
    outputs = [one["report"]["outputs"][0]["path"] for one in document["variants"]]
    assert outputs == [one["recipe"]["output"] for one in document["variants"]]
    assert outputs[3] == str(tmp_path / "out" / "w3g64-gptq")


def test_without_an_output_each_variant_has_its_default_name(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["quantize", str(tiny_llama), "--bits", "4,8", "--group-size", "64", "--method", "rtn"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny-llama-w4g64-rtn", "tiny-llama-w8g64-rtn"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--bits", "4,3,4"], "error: --bits 4,3,4: 4 is given twice"),
        (["--bits", "4,,3"], "error: --bits 4,,3: a value is missing between commas"),
        (["--bits", "4,5"], "error: command line: bits must be one of 2, 3, 4, 8; got 5"),
        (["--method", "rtn,gptq, rtn"], "error: --method rtn,gptq, rtn: rtn is given twice"),
        (["--avg-bits", "3.5", "--bits", "4,3"], "error: avg_bits has the bits chosen, so bits cannot be given too"),
    ],
)
def test_lists_that_make_no_sense_are_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", "no-such-model", *argv]) == 2
    assert capsys.readouterr().err.startswith(message)
