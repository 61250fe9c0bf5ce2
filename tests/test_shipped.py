"""The recipes that come with the package, and the verb that shows them."""

import json
from pathlib import Path

import pytest

from quantforge.cli import main
from quantforge.pipeline.plan import make_plan
from quantforge.reading import load_recipe, read_recipe, recipe_of
from quantforge.shipped import shipped_recipes, summary_of

NAMES = ["w3.5a16", "w3a16", "w4a16", "w4a16-asym", "w4a16-awq", "w4a16-mixed", "w8a16", "w8a8"]


def test_the_shipped_recipes_are_those() -> None:
    assert list(shipped_recipes()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_what_the_recipe_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    resolved = read_recipe(name, {"model": "m"})
    assert resolved.notes == ()
    recipe = resolved.recipe
    variants = ("" if recipe.symmetric else "-asym") + ("-awq" if "awq" in recipe.method else "")
    variants += "-mixed" if recipe.rules else ""
    assert f"w{recipe.avg_bits or recipe.bits}a{recipe.activation_bits or 16}{variants}" == name


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_names_no_model_and_says_what_it_is_for(name: str) -> None:
    text = shipped_recipes()[name]
    assert "model:" not in text and "output:" not in text
    comments = [line for line in text.splitlines()[:3] if line.startswith("# ")]
    assert 2 <= len(comments) <= 3 and len(summary_of(text)) > 40
    assert recipe_of(name, text).output is None


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_has_a_plan_for_a_model_of_any_size(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    plan = make_plan(load_recipe(name, {"model": str(tiny_llama), "output": str(tmp_path / "out")}))
    assert plan.sites
    assert (len(set(plan.specs.values())) > 1) == (name == "w4a16-mixed")


def test_the_default_recipe_is_the_defaults_spelled_out() -> None:
    recipe = load_recipe("w4a16", {"model": "m"})
    assert recipe.model_copy(update={"options": {}}) == load_recipe(None, {"model": "m"})


def test_a_file_wins_over_a_shipped_recipe_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("w8a16").mkdir()  # no file
    assert load_recipe("w8a16", {"model": "m"}).bits == 8
    Path("w8a16").rmdir()
    Path("w8a16").write_text("bits: 3\n")
    assert load_recipe("w8a16", {"model": "m"}).bits == 3


def test_flags_win_over_a_shipped_recipe_and_errors_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_recipe("w8a16", {"model": "m", "bits": 4}).bits == 4
    assert main(["quantize", "m", "--recipe", "w4a61"]) == 2
    assert "cannot read the recipe w4a61: No such file or directory" in (said := capsys.readouterr().err)
    assert f"did you mean w4a16? shipped recipes: {', '.join(NAMES)}" in said


def test_list_shows_every_recipe_with_bits_and_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "list"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["name", "bits", "method"]
    assert [row.split()[0] for row in rows] == NAMES
    assert rows[0].startswith("w3.5a16      avg_bits 3.5  gptq              Bits chosen for each matrix")
    assert rows[-1].startswith("w8a8         8             smoothquant+gptq  8-bit weights and 8-bit activations")


def test_list_and_show_as_json_hold_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed] == NAMES
    assert main(["recipes", "show", "w8a8", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == listed[-1] | {"text": shipped_recipes()["w8a8"]}
    assert (shown["recipe"]["activation_bits"], shown["recipe"]["method"]) == (8, "smoothquant+gptq")
    assert "model" not in shown["recipe"] and "bits" not in listed[0]["recipe"]


def test_show_prints_the_yaml_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", "w4a16-mixed"]) == 0
    assert capsys.readouterr().out == shipped_recipes()["w4a16-mixed"]


def test_copy_writes_the_yaml_and_never_overwrites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for argv, path in ([], "w4a16.yaml"), (["mine.yaml"], "mine.yaml"), (["folder"], "folder/w4a16.yaml"):
        assert main(["recipes", "copy", "w4a16", *argv]) == 0
        assert capsys.readouterr().out == f"copied      w4a16 -> {path}\n"
        assert Path(path).read_text() == shipped_recipes()["w4a16"]
        Path(path).write_text("bits: 3\n")
        assert main(["recipes", "copy", "w4a16", *argv]) == 2
        assert f"{path} exists, and nothing is overwritten" in capsys.readouterr().err
        assert Path(path).read_text() == "bits: 3\n"
    assert main(["recipes", "copy", "w4a16", "none/a.yaml"]) == 2
    assert "none is no directory" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["show", "w4a61"], ["copy", "w4a61"]])
def test_a_recipe_that_is_none_is_refused_with_the_nearest(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", *argv]) == 2
    assert "there is no recipe w4a61; did you mean w4a16? shipped recipes: w3.5a16" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["list", "show", "copy"])
def test_every_verb_of_recipes_shows_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", verb, "--help"]) == 0
    assert f"quantforge recipes {verb}" in capsys.readouterr().out.partition("Examples:")[2]
