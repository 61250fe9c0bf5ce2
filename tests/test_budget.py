"""Budgets end to end on tiny models: limits hold, fused sets stay alike, resumes and repeats give the same bytes."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_pipeline import FakePlan, run_of
from test_pipeline import contents, finish, recipe_for

from quantforge.cli import main, runview
from quantforge.cli.ui import Ui
from quantforge.errors import PlanError, UsageError
from quantforge.model.sites import LinearSite
from quantforge.pipeline import run as run_module
from quantforge.pipeline.allocate import choose, with_bits
from quantforge.pipeline.budget import group_sites
from quantforge.pipeline.describe import describe_checkpoint
from quantforge.pipeline.grids import unequal_fused
from quantforge.pipeline.plan import Plan, make_plan
from quantforge.pipeline.run import quantize
from quantforge.reading import ResolvedRecipe, load_recipe, read_recipe
from quantforge.recipe import Recipe
from quantforge.report import Allocated, Allocating, Allocation, Event, LayerDone, RunFinished, UnitBits
from quantforge.rules import Rule


def site(name: str, layer: int = 0) -> LinearSite:
    return LinearSite(name, name, layer, 8, 8, "linear")


def test_units_are_what_servers_fuse() -> None:
    names = [
        "m.0.self_attn.q_proj", "m.0.self_attn.k_proj", "m.0.self_attn.v_proj", "m.0.self_attn.o_proj",
        "m.0.mlp.gate_proj", "m.0.mlp.up_proj", "m.0.mlp.down_proj",
        "m.1.self_attn.q_proj",
        "m.1.mlp.experts.0.w1", "m.1.mlp.experts.0.w2", "m.1.mlp.experts.11.w1", "m.1.mlp.shared.up_proj",
    ]  # fmt: skip
    units = group_sites(map(site, names))
    assert {name: len(members) for name, members in units.items()} == {
        "m.0.self_attn.q_proj+k_proj+v_proj": 3,
        "m.0.self_attn.o_proj": 1,
        "m.0.mlp.gate_proj+up_proj": 2,
        "m.0.mlp.down_proj": 1,
        "m.1.self_attn.q_proj": 1,
        "m.1.mlp.experts": 3,
        "m.1.mlp.shared.up_proj": 1,
    }
    assert [member.name for members in units.values() for member in members] == names


# ------------------------------------------------------------------------------------------------ choices


def plan_of(model: Path, **changes: Any) -> tuple[Recipe, Plan]:
    recipe = Recipe(model=str(model), **({"group_size": 64} | changes))
    return recipe, make_plan(recipe)


def invented(plan: Plan) -> dict[str, dict[int, float]]:
    """Predictions in which a site's loss depends on its name only, fourfold a bit."""
    scales = {site.name: 1 + number % 5 * number for number, site in enumerate(plan.sites)}
    bits = sorted({bits for unit in plan.units for bits in unit.bits})
    return {name: {width: scale * 4.0**-width for width in bits} for name, scale in scales.items()}


def chosen(model: Path, **changes: Any) -> tuple[Plan, Allocation]:
    recipe, plan = plan_of(model, **changes)
    allocation = choose(recipe, plan, invented(plan), 100)
    return with_bits(plan, allocation), allocation


def mean_bits(plan: Plan) -> float:
    weights = {site.name: site.out_features * site.in_features for site in plan.sites}
    return sum(plan.specs[name].bits * weights[name] for name in weights) / sum(weights.values())


@pytest.mark.parametrize("budget", [3.0, 3.3, 3.5, 4.0, 5.2, 8.0])
def test_mean_bits_stay_within_the_budget_and_use_it(tiny_llama: Path, budget: float) -> None:
    plan, allocation = chosen(tiny_llama, avg_bits=budget)
    assert mean_bits(plan) == allocation.mean_bits <= budget
    largest = max(unit.weights for unit in plan.units) / plan.weights
    assert allocation.mean_bits > budget - 4 * largest  # the largest step is from 4 bits to 8
    assert unequal_fused(plan.sites, plan.specs) == []


def test_uniform_bits_are_their_own_budget(tiny_llama: Path) -> None:
    for bits in (3, 8):
        plan, _ = chosen(tiny_llama, avg_bits=bits)
        assert {spec.bits for spec in plan.specs.values()} == {bits}


def test_predicted_kl_stays_within_the_budget_at_the_least_size(tiny_llama: Path) -> None:
    previous = 0
    for limit in (3.0, 1.0, 0.3, 0.1, 0.01):
        plan, allocation = chosen(tiny_llama, max_kl=limit)
        assert allocation.predicted_kl <= limit and allocation.estimated_bytes >= previous
        previous = allocation.estimated_bytes
    assert {spec.bits for spec in plan.specs.values()} >= {8}


def test_candidates_can_be_restricted(tiny_llama: Path) -> None:
    plan, _ = chosen(tiny_llama, avg_bits=6, candidate_bits=(4, 8))
    assert {spec.bits for spec in plan.specs.values()} == {4, 8}


def test_two_bits_are_a_choice_only_where_nothing_else_fits(tiny_llama: Path) -> None:
    assert {bits for unit in plan_of(tiny_llama, avg_bits=3.0)[1].units for bits in unit.bits} == {3, 4, 8}
    assert {bits for unit in plan_of(tiny_llama, avg_bits=2.5)[1].units for bits in unit.bits} == {2, 3, 4, 8}


def test_bits_that_a_rule_names_are_not_changed_and_count(tiny_llama: Path) -> None:
    rules = (Rule(match="*down_proj", bits=8),)
    plan, allocation = chosen(tiny_llama, avg_bits=5.0, rules=rules)
    assert {spec.bits for name, spec in plan.specs.items() if "down_proj" in name} == {8}
    assert {spec.bits for name, spec in plan.specs.items() if "down_proj" not in name} <= {3, 4}
    assert mean_bits(plan) == allocation.mean_bits <= 5.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"avg_bits": 1.5}, "--avg-bits 1.5 cannot be met: with 2, 3, 4, 8 bits there is 2 to 8 bits a weight"),
        ({"avg_bits": 3.5, "candidate_bits": (4, 8)}, "with 4, 8 bits there is 4 to 8 bits a weight"),
        ({"fit": "100KB"}, "--fit 100KB cannot be met: with 2, 3, 4, 8 bits there is 0.3.. MB to 0.[5-9].. MB"),
        ({"avg_bits": 3.5, "activation_bits": 8}, "--activation-bits 8 needs 8-bit weights"),
    ],
)
def test_budgets_out_of_reach_are_refused_with_what_can_be_reached(
    tiny_llama: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of(tiny_llama, **changes)


def test_a_unit_about_which_nothing_is_known_is_a_warning(tiny_llama: Path) -> None:
    recipe, plan = plan_of(tiny_llama, avg_bits=3.5)
    name = "model.layers.1.mlp.down_proj"
    unknown = invented(plan) | {name: dict.fromkeys((3, 4, 8), 0.0)}
    (warning,) = choose(recipe, plan, unknown, 100).warnings
    assert warning.startswith(f"{name}: no calibration token reached it while bits were chosen")
    assert choose(recipe, plan, invented(plan), 100).warnings == ()


def test_a_kl_out_of_reach_is_refused_with_what_can_be_reached(tiny_llama: Path) -> None:
    with pytest.raises(PlanError, match=r"--max-kl 1e-05 cannot be met: the predicted KL lies between 0.00"):
        chosen(tiny_llama, max_kl=1e-5)


# ------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"avg_bits": 3.5, "bits": 4}, "avg_bits has the bits chosen, so bits cannot be given too"),
        ({"avg_bits": 3.5, "fit": "90MB"}, "avg_bits and fit are budgets, and there can be only one"),
        ({"candidate_bits": (3, 4)}, "candidate_bits needs a budget"),
        ({"avg_bits": 3.5, "candidate_bits": (5,)}, "candidate_bits must be a list of bits, each one of 2, 3, 4, 8"),
        ({"max_kl": 0}, "max_kl must be a positive number"),
        ({"fit": "small"}, "fit must be a size such as 90MB"),
    ],
)
def test_contradictions_are_told(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_recipe(None, {"model": "m", **settings})


def test_a_flag_takes_the_place_of_the_files_bits_or_budget(tmp_path: Path) -> None:
    (tmp_path / "bits.yaml").write_text("model: m\nbits: 3\n")
    (tmp_path / "budget.yaml").write_text("model: m\ntarget_bits: 3.5\n")
    assert load_recipe(tmp_path / "bits.yaml", {"fit": "90MB"}).budget_label == "fit 90MB"
    assert load_recipe(tmp_path / "budget.yaml", {}).budget_label == "avg_bits 3.5"
    assert load_recipe(tmp_path / "budget.yaml", {"max_kl": 0.05}).budget_label == "max_kl 0.05"
    flagged = load_recipe(tmp_path / "budget.yaml", {"bits": 3})
    assert flagged.budget is None and flagged.bits == 3


# ------------------------------------------------------------------------------------------------ end to end


@pytest.mark.parametrize("formats", [("compressed-tensors",), ("gptq", "compressed-tensors")])
def test_a_budget_gives_a_verified_checkpoint_of_several_grids(
    tiny_llama: Path, text: Path, tmp_path: Path, formats: tuple[str, ...]
) -> None:
    recipe = recipe_for(tiny_llama, tmp_path / "out", text, avg_bits=3.5, formats=formats)
    report = finish(recipe)
    allocation = report.allocation
    assert allocation is not None and 3.3 < allocation.mean_bits <= 3.5 and allocation.tokens == 16 * 64
    solved = {site.name: site.bits for layer in report.layers for site in layer.sites}
    assert solved == {name: unit.bits for unit in allocation.units for name in unit.sites}
    assert len(set(solved.values())) > 1
    for unit in allocation.units:
        assert unit.predicted_kl["3"] > unit.predicted_kl["4"] > unit.predicted_kl["8"] > 0
    for output in report.outputs:
        rows = describe_checkpoint(output.path).quantized
        assert {row.name: row.bits for row in rows} == solved
        kept = json.loads((Path(output.path) / "quantforge.json").read_text())
        assert Allocation.from_json(kept["allocation"]) == allocation
        assert output.tensor_bytes <= allocation.estimated_bytes
    assert max(output.tensor_bytes for output in report.outputs) == allocation.estimated_bytes


def test_a_size_is_kept(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    sizes = {}
    for bits in (3, 4):
        (output,) = finish(recipe_for(tiny_llama, tmp_path / f"u{bits}", text, bits=bits, formats=("gptq",))).outputs
        sizes[bits] = output.tensor_bytes
    between = (sizes[3] + sizes[4]) // 2
    (output,) = finish(recipe_for(tiny_llama, tmp_path / "fit", text, fit=between, formats=("gptq",))).outputs
    assert sizes[3] < output.tensor_bytes <= between


def test_a_method_without_calibration_is_calibrated_for_the_choice_alone(
    tiny_llama: Path, text: Path, tmp_path: Path
) -> None:
    report = finish(recipe_for(tiny_llama, tmp_path / "out", text, avg_bits=3.5, method="rtn"))
    assert report.allocation is not None and report.allocation.mean_bits <= 3.5
    assert all(site.loss is None for layer in report.layers for site in layer.sites)


def test_a_choice_is_made_once_and_a_resumed_run_gives_the_same_bytes(
    tiny_llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def events_of(recipe: Recipe) -> Iterator[Event]:
        return quantize(recipe, make_plan(recipe))

    finish(recipe_for(tiny_llama, tmp_path / "whole", text, avg_bits=3.5))
    recipe = recipe_for(tiny_llama, tmp_path / "out", text, avg_bits=3.5)
    seen: list[Event] = []
    running = events_of(recipe)
    for event in running:
        seen.append(event)
        if isinstance(event, LayerDone):
            break
    running.close()
    assert [event.done for event in seen if isinstance(event, Allocating)] == [1, 2, 3, 4, 5]
    work = tmp_path / "out.partial"
    assert (work / "allocation.json").is_file() and not (work / "scratch").exists()

    def never(*_: Any) -> Any:
        raise AssertionError("the choice was made again")

    monkeypatch.setattr(run_module, "allocate_plan", never)
    rest = list(events_of(recipe))
    assert [type(event) for event in rest[:1]] == [Allocated] and isinstance(rest[-1], RunFinished)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    *_, again = events_of(recipe)  # already published
    assert isinstance(again, RunFinished) and again.report.allocation == rest[-1].report.allocation
    assert again.report.spec_label == rest[-1].report.spec_label != "4 bits, group 64, symmetric"


def test_a_run_that_dies_while_choosing_chooses_again_to_the_same_bytes(
    tiny_llama: Path, text: Path, tmp_path: Path
) -> None:
    finish(recipe_for(tiny_llama, tmp_path / "whole", text, avg_bits=3.5))
    recipe = recipe_for(tiny_llama, tmp_path / "out", text, avg_bits=3.5)
    running = quantize(recipe, make_plan(recipe))
    assert any(isinstance(event, Allocating) and event.done == 4 for event in running)  # stops there
    assert {entry.name for entry in (tmp_path / "out.partial" / "scratch").iterdir()} == {"input-00000.bin"}
    del running
    (tmp_path / "out.partial" / "scratch").mkdir(exist_ok=True)
    (tmp_path / "out.partial" / "scratch" / "input-00000.bin").write_bytes(b"left by a kill")
    finish(recipe)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_the_global_random_state_is_left_alone(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    torch.manual_seed(11)
    state = torch.get_rng_state()
    finish(recipe_for(tiny_llama, tmp_path / "out", text, avg_bits=3.5))
    assert torch.equal(torch.get_rng_state(), state)


# ------------------------------------------------------------------------------------------------ command line


def test_flags_of_a_budget_reach_the_plan_and_a_dry_run_says_what_is_open(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["quantize", str(tiny_llama), "--group-size", "64", "--candidate-bits", "3,4", "--dry-run"]
    assert main([*argv, "--avg-bits", "3.5"]) == 0
    shown = capsys.readouterr().out
    assert "gptq, bits to be chosen from 3, 4, group 64, symmetric" in shown
    assert "depends on the bits, which are chosen for 8 units by what the weights say (avg_bits 3.5)" in shown
    assert "tiny-llama-w3.5g64-gptq" in shown
    assert main([*argv, "--max-kl", "0.1", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["estimated_bytes"] is None and len(plan["units"]) == 8
    assert plan["units"][0]["bits"] == [3, 4] and len(plan["units"][0]["sites"]) == 3
    assert main([*argv, "--fit", "1MB", "--avg-bits", "3.5"]) == 2
    assert "fit are budgets, and there can be only one" in capsys.readouterr().err
    assert main([*argv, "--avg-bits", "2.5"]) == 1
    assert "with 3, 4 bits there is 3 to 4 bits a weight" in capsys.readouterr().err
    assert main([*argv[:-2], "3;4", "--avg-bits", "3.5"]) == 2
    assert "--candidate-bits takes numbers such as 3,4,8; got '3;4'" in capsys.readouterr().err


def test_progress_and_the_table_of_bits_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0, 2)  # a step takes two seconds
    monkeypatch.setattr(runview, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    units = tuple(
        UnitBits(f"model.layers.{layer}.mlp.{leaf}", (f"model.layers.{layer}.mlp.{leaf}",), 100, bits, {})
        for leaf, widths in (("down_proj", (4, 4, 8)), ("gate_proj+up_proj", (3, 4, 3)))
        for layer, bits in enumerate(widths)
    )
    allocation = Allocation("avg_bits 4.5", 4.333, 1_500_000, 0.01234, 4096, units)

    def events() -> Iterator[Event]:
        for done in range(1, 11):
            yield Allocating(done, 10)
        yield Allocated(allocation)
        *first, last = run_of()
        yield from first
        yield RunFinished(replace(last.report, allocation=allocation))

    ui = Ui()
    report = ui.follow(events())
    shown = capsys.readouterr().err.splitlines()
    assert [line for line in shown if line.startswith("choosing bits: ")] == [
        f"choosing bits: {percent}% of a pass forward and backward{left}"
        for percent, left in zip(
            (10, 20, 40, 60, 80, 100), ("", *(f", ETA 0:{seconds:02}" for seconds in (16, 12, 8, 4, 0))), strict=True
        )
    ]
    summary = "4.333 bits a weight without scales, 1.5 MB, predicted KL 0.01234 nats a token"
    assert f"bits chosen for avg_bits 4.5: {summary}" in shown
    recipe = ResolvedRecipe(Recipe(model="m", avg_bits=4.5), ())
    ui.report(recipe, FakePlan(), report)  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert f"bits        avg_bits 4.5: {summary}" in out
    table = [line.split() for line in out.splitlines() if "proj" in line or line.startswith("units")]
    assert table[0] == ["units", "3", "bits", "4", "bits", "8", "bits"]
    assert ["down_proj", "-", "2", "1"] in table and ["gate_proj+up_proj", "2", "1", "-"] in table
