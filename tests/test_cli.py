"""The command line: what it prints where, and the exit code of every way a run can end. The pipeline is a fake."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from fake_pipeline import PROTOCOL, FakePlan, Pipeline, raising, run_of

from quantforge import report as events
from quantforge.cli import main
from quantforge.errors import PlanError, VerifyError
from quantforge.evaluate.divergence import Divergence
from quantforge.recipe import Recipe
from quantforge.rules import Rule
from quantforge.spec import QuantSpec

ROOT = Path(__file__).parent.parent


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    fake = Pipeline()
    verbs = {"plan": "make_plan", "run": "quantize", "score": "evaluate_checkpoint", "describe": "describe_checkpoint"}
    verbs["outlook"] = "verdicts"
    for name, function in verbs.items():
        module = ModuleType(f"quantforge.pipeline.{name}")
        setattr(module, function, getattr(fake, function))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return fake


# ------------------------------------------------------------------------------------------------ the whole command


def test_help_takes_little_more_than_python_and_the_command_line_library_themselves() -> None:
    """By processor time of the quickest of several, in turn: other work on the machine must not decide."""

    def seconds(*arguments: str) -> float:
        before = os.times()
        ran = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT)
        assert ran.returncode == 0
        if "--help" in arguments:
            assert all(verb in ran.stdout for verb in ("quantize", "plan", "eval", "inspect", "convert"))
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    pairs = [(seconds("-m", "quantforge", "--help"), seconds("-c", "import typer, rich.table")) for _ in range(4)]
    assert min(own for own, _ in pairs) < 0.3 + 2 * min(bare for _, bare in pairs)


@pytest.mark.parametrize("verb", ["quantize", "plan", "eval", "inspect", "convert"])
def test_every_verb_shows_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    assert f"quantforge {verb} ./" in capsys.readouterr().out


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    from quantforge import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"quantforge {__version__}\n"


@pytest.mark.parametrize(
    "argv", [["quantise", "m"], ["quantize", "m", "--bit", "x"], ["eval"], ["quantize", "m", "-b", "x"]]
)
def test_a_wrong_command_line_exits_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Error" in captured.err


# ------------------------------------------------------------------------------------------------ quantize


def test_flags_reach_the_recipe_and_only_those_given(pipeline: Pipeline, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("bits: 3\nsymmetric: false\nstrict: true\nignore: [a]\n")
    argv = "quantize m --groupsize -1 --format gptq,compressed-tensors --format x --damp 0.02 --act-order --nsamples 5"
    argv += f" --option block=64 --option name=abc --ignore lm_head --ignore re:x -o dir --recipe {path} --bos never"
    assert main(argv.split()) == 0
    recipe = pipeline.recipe
    assert recipe is not None
    assert (recipe.model, recipe.bits, recipe.group_size, recipe.symmetric, recipe.output) == ("m", 3, -1, False, "dir")
    assert recipe.formats == ("gptq", "compressed-tensors", "x")
    assert recipe.options == {"damping": 0.02, "act_order": True, "block": 64, "name": "abc"}
    assert (recipe.ignore, recipe.strict) == (("lm_head", "re:x"), True)
    assert (recipe.calibration.nsamples, recipe.calibration.seqlen, recipe.calibration.bos) == (5, 512, "never")


def test_flags_of_other_tools_are_read_as_ours_and_announced(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = "quantize m --wbits=3 --q_group_size 64 --dampening-frac 0.02 --desc-act --true-sequential --zero_point"
    argv += " --num_calibration_samples 5 --max-seq-length 33 --export_format gptq --exclude-modules a --act_bits 8"
    assert main(argv.split()) == 0
    recipe = pipeline.recipe
    assert recipe is not None
    assert (recipe.bits, recipe.group_size, recipe.symmetric, recipe.sequential) == (3, 64, False, "group")
    assert recipe.options == {"damping": 0.02, "act_order": True}
    assert (recipe.calibration.nsamples, recipe.calibration.seqlen) == (5, 33)
    assert (recipe.formats, recipe.ignore, recipe.activation_bits) == (("gptq",), ("a",), 8)
    notes = [line for line in capsys.readouterr().err.splitlines() if "command line" in line]
    assert notes[:2] == [
        "note: command line: --wbits is read as --bits",
        "note: command line: --q_group_size is read as --group-size",
    ]
    assert "note: command line: --true-sequential is read as --sequential group" in notes
    assert len(notes) == 11


def test_underscores_in_our_own_flags_need_no_remark(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("quantize m --group_size -1 --token_weights none --no_act_order --avg_bits=3.5".split()) == 0
    recipe = pipeline.recipe
    assert recipe is not None
    assert (recipe.group_size, recipe.token_weights, recipe.avg_bits) == (-1, "none", 3.5)
    assert recipe.options == {"act_order": False}
    assert "command line" not in capsys.readouterr().err


def test_what_follows_two_dashes_is_no_flag(pipeline: Pipeline) -> None:
    assert main(["quantize", "--bits", "3", "--", "--wbits"]) == 0
    assert pipeline.recipe is not None and (pipeline.recipe.model, pipeline.recipe.bits) == ("--wbits", 3)


def test_presets_schemes_and_shipped_recipes_reach_the_recipe(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("quantize m --preset fast --scheme W4A16_ASYM --tune-epochs 3 --recipe w3a16".split()) == 0
    recipe = pipeline.recipe
    assert recipe is not None
    assert (recipe.bits, recipe.symmetric, recipe.formats, recipe.tune_epochs) == (4, False, ("gptq",), 3)
    assert (recipe.token_weights, recipe.calibration.nsamples) == ("none", 32)
    assert "note: command line: scheme W4A16_ASYM is read as bits 4, asymmetric\n" in capsys.readouterr().err


def test_help_has_a_section_for_each_kind_of_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "--help"]) == 0
    shown = capsys.readouterr().out
    titles = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == [
        "Arguments:",
        "What to make:",
        "Bits by site, or from a budget:",
        "Calibration:",
        "Advanced:",
        "Other options:",
    ]
    assert shown.index("What to make:") < shown.index("--scheme <") < shown.index("Calibration:")
    assert "--wbits" not in shown


def test_rules_and_activations_reach_the_recipe_in_order(pipeline: Pipeline) -> None:
    argv = ["--rule", "*.down_proj=bits:8,group_size:-1", "--rule", "re:a=b=skip", "--rule", "x=symmetric:false"]
    assert main(["quantize", "m", *argv, "--activation-bits", "8"]) == 0
    assert pipeline.recipe is not None and pipeline.recipe.activation_bits == 8
    assert pipeline.recipe.rules == (
        Rule(match="*.down_proj", bits=8, group_size=-1),
        Rule(match="re:a=b", skip=True),
        Rule(match="x", symmetric=False),
    )


def test_a_dry_run_tells_the_grid_of_each_kind_of_site_when_they_differ(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", "m", "--dry-run"]) == 0
    assert "site    count  out x in\nq_proj  2      8 x 16\n" in capsys.readouterr().out
    names = [site.name for site in FakePlan().sites]
    specs = {names[0]: QuantSpec(8, None), names[1]: QuantSpec(4, 64)}
    monkeypatch.setattr(sys.modules["quantforge.pipeline.plan"], "make_plan", lambda recipe: FakePlan(specs=specs))
    assert main(["quantize", "m", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[5:8] == [
        "site    count  out x in  grid",
        "q_proj  1      8 x 16    8 bits, per channel, symmetric",
        "q_proj  1      8 x 16    4 bits, group 64, symmetric",
    ]


def test_no_flags_is_the_default_recipe(pipeline: Pipeline) -> None:
    assert main(["quantize", "m"]) == 0
    assert pipeline.recipe == Recipe(model="m")


@pytest.mark.parametrize(("flag", "value"), [("--sym", True), ("--asym", False)])
def test_symmetry_flags(pipeline: Pipeline, flag: str, value: bool) -> None:
    assert main(["quantize", "m", flag]) == 0
    assert pipeline.recipe is not None and pipeline.recipe.symmetric is value


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--bits", "5"], "command line: bits must be one of 2, 3, 4, 8; got 5"),
        (["--group-size", "many"], "group_size must be auto, a positive integer"),
        (["--option", "damping"], "--option takes KEY=VALUE"),
        (["--rule", "*.down_proj"], "--rule takes PATTERN=bits:8,group_size:64 or PATTERN=skip; got '*.down_proj'"),
        (["--rule", "a=bit:8"], "command line: unknown key 'rules[0].bit'; did you mean 'bits'?"),
        (["--rule", "a=bits:5"], "command line: rules[0].bits must be one of 2, 3, 4, 8; got 5"),
        (["--activation-bits", "4"], "activation_bits must be 8, or null for floating point; got 4"),
        (
            ["--scheme", "W4A16", "--asym"],
            "scheme W4A16 has symmetric true, and symmetric false is given",
        ),
        (["--bits", "4", "--wbits", "3"], "command line: --bits and --wbits both set bits; keep one"),
        (["--damp_auto_increment", "1"], "there is no --damp_auto_increment: damping is raised without being asked"),
        (["--resume"], "there is no --resume: a run that was stopped is carried on by the same command"),
        (["--preset", "quick"], "command line: unknown preset 'quick'; presets: fast, balanced, best"),
        (["--recipe", "none.yaml"], "cannot read the recipe none.yaml"),
    ],
)
def test_a_wrong_request_exits_2_before_any_work(
    pipeline: Pipeline, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", "m", *argv]) == 2
    assert message in capsys.readouterr().err
    assert pipeline.recipe is None


def test_progress_goes_to_stderr_and_the_result_to_stdout(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", "m"]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "note: group size 64 was chosen",
        "output: out",
        "layer 1/2  loss 0.400 x RTN  4.250 bits/weight  3.0 s  ETA 0:03",
        "layer 2/2  loss 0.400 x RTN  4.250 bits/weight  3.0 s  ETA 0:00",
        "writing compressed-tensors",
        "verifying compressed-tensors: reading it back",
    ]
    assert captured.out.splitlines() == [
        "method      gptq, 4 bits, group 64, symmetric",
        "loss        0.400 x round to nearest (mean over layers)",
        "output      out (compressed-tensors, 423 tensors, read back and verified)",
        "size        269.0 MB -> 102.0 MB, 4.250 bits per quantized weight",
        "kept        lm_head.weight: the output head",
        "kept        model.embed_tokens.weight: an embedding",
    ]


def test_json_is_all_of_stdout(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "m", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"recipe", "notes", "plan", "report"}
    assert result["report"]["outputs"][0]["total_bytes"] == 106_000_000
    assert Recipe.model_validate_json(json.dumps(result["recipe"])) == pipeline.recipe


def test_quiet_keeps_stderr_empty(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "m", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_a_dry_run_prints_the_plan_and_starts_nothing(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "m", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert not pipeline.started
    for part in (
        "llama, 2 layers",
        "269.0 MB -> 102.0 MB",
        "q_proj",
        "8 x 16",
        "lm_head.weight: the output head",
        "64",
    ):
        assert part in out


def test_a_dry_run_tells_which_servers_refuse_and_where_that_is_written(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", "m", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "refused     tgi: it has no kernel for it [tgi 3, kernels.py]" in lines
    assert "remedy      tgi: add one" in lines
    assert "remark      vllm: slower than it could be" in lines
    assert any(line.startswith("tgi     refuses") for line in lines)


def test_a_dry_run_as_json_has_no_report(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "m", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"] is None


def test_a_resumed_run_says_so(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.run = lambda: run_of(layers=3, done=1)
    assert main(["quantize", "m"]) == 0
    err = capsys.readouterr().err
    assert "resuming: 1 of 3 layers were already done" in err
    assert "layer 2/3  loss 0.400 x RTN  4.250 bits/weight  3.0 s  ETA 0:03" in err


def test_a_fallback_is_shown_once_with_its_layer_and_once_at_the_end(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline.run = lambda: run_of(fallback="rounded to nearest: nothing reached it", loss=None)
    assert main(["quantize", "m"]) == 0
    lines = capsys.readouterr().err.splitlines()
    said = [line for line in lines if "rounded to nearest: nothing reached it" in line]
    assert any("loss not measured" in line for line in lines)
    assert said == [
        "  model.layers.0.self_attn.q_proj: rounded to nearest: nothing reached it",
        "  model.layers.1.self_attn.q_proj: rounded to nearest: nothing reached it",
        "warning: model.layers.0.self_attn.q_proj and 1 more sites: rounded to nearest: nothing reached it",
    ]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (VerifyError(["site a differs", "site b differs"]), 1, "error: site a differs\nsite b differs\n"),
        (KeyboardInterrupt(), 130, "what is finished is kept: layers, and sampled tokens once all are; run the same"),
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), 1, "the disk is full while writing /data/x"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 1, "the disk is full; free some space"),
        (PermissionError(errno.EACCES, "Permission denied", "/data/x"), 1, "error: Permission denied: /data/x"),
        (ZeroDivisionError("oh"), 1, "unexpected ZeroDivisionError: oh"),
    ],
    ids=["refused", "interrupted", "disk full", "disk full in a library", "not permitted", "defect"],
)
def test_how_a_run_ends_is_its_exit_code_and_a_message(
    pipeline: Pipeline, error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline.run = raising(error)
    assert main(["quantize", "m"]) == code
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
    assert ("Traceback" in captured.err) == isinstance(error, ZeroDivisionError)


def test_every_problem_of_a_plan_is_shown(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.plan_error = PlanError(["down_proj: 576 is no multiple of 128", "out exists"])
    assert main(["quantize", "m"]) == 1
    assert capsys.readouterr().err == "error: down_proj: 576 is no multiple of 128\nout exists\n"


def test_sigterm_ends_a_run_like_ctrl_c(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> Iterator[events.Event]:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        yield events.RunStarted(2, 0, ())

    before = signal.getsignal(signal.SIGTERM)
    pipeline.run = run
    assert main(["quantize", "m"]) == 130
    assert "run the same command again" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


# ------------------------------------------------------------------------------------------------ eval


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "t.txt"
    path.write_text("text")
    return str(path)


@pytest.mark.parametrize(
    ("extra", "found"), [([], "neither is given"), (["--text", "a", "--dataset", "b"], "both are")]
)
def test_eval_wants_exactly_one_text(extra: list[str], found: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "m", *extra]) == 2
    err = capsys.readouterr().err
    assert "exactly one of --text FILE and --dataset ID is needed" in err and found in err


def test_eval_names_a_missing_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "m", "--text", "no/such.txt"]) == 2
    assert "no/such.txt: no such file" in capsys.readouterr().err


def test_every_number_of_an_evaluation_carries_its_protocols_short_name_and_the_whole_is_said_once(
    pipeline: Pipeline, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline.divergence = Divergence(
        kl=0.125,
        kl_se=0.002,
        kl_se_window=None,
        kl_p99=1.0,
        kl_max=2.0,
        top1=0.81,
        top1_se=0.004,
        reference_nll=2.85,
        reference_ppl=17.25,
        ppl_ratio=1.13,
        ppl_ratio_se=None,
    )
    assert main(["eval", "q", "--reference", "m", "--text", text, "--windows", "4"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "perplexity  19.5000 +- 0.2500  [classic-ppl/2048]",
        "reference   17.2500  [classic-ppl/2048]",
        "KL          0.12500 +- 0.00200 nats a token  [classic-ppl/2048]",
        "top-1       81.00% +- 0.40 agreement  [classic-ppl/2048]",
        "on          wiki.test.raw: 8,188 predictions in 4 windows",
        "+-          one standard error",
        f"protocol    {PROTOCOL}",
    ]
    assert "checkpoint 4/4" in captured.err
    assert (pipeline.asked["windows"], pipeline.asked["window"], pipeline.asked["text"]) == (4, 2048, text)


def test_the_parts_of_a_data_set_reach_the_evaluation(pipeline: Pipeline) -> None:
    argv = "eval q --dataset org/data --subset en --split validation --column page".split()
    assert main(argv) == 0
    asked = {name: pipeline.asked[name] for name in ("text", "dataset", "subset", "split", "column")}
    assert asked == {"text": None, "dataset": "org/data", "subset": "en", "split": "validation", "column": "page"}


def test_the_data_set_of_the_help_is_one_the_evaluation_understands(capsys: pytest.CaptureFixture[str]) -> None:
    from quantforge.evaluate.protocol import parse_dataset

    assert main(["eval", "--help"]) == 0
    words = capsys.readouterr().out.split()
    given = [word for word in words if "wikitext" in word]
    assert [parse_dataset(word) for word in given] == [("Salesforce/wikitext", "wikitext-2-raw-v1", "test")]


def test_an_evaluation_with_quantized_activations_says_so_in_the_table_and_in_json(
    pipeline: Pipeline, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = replace(pipeline.evaluate_checkpoint("q", progress=lambda *_: None), activations="8-bit, at 3 sites")
    monkeypatch.setattr(sys.modules["quantforge.pipeline.score"], "evaluate_checkpoint", lambda *_, **__: result)
    assert main(["eval", "q", "--text", text]) == 0
    assert "activations quantized: 8-bit, at 3 sites\n" in capsys.readouterr().out
    assert main(["eval", "q", "--text", text, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["activations"] == "8-bit, at 3 sites"


def test_an_evaluation_without_a_reference_prints_no_distance(
    pipeline: Pipeline, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "q", "--text", text]) == 0
    out = capsys.readouterr().out
    assert "perplexity" in out and "KL" not in out and "reference" not in out


def test_an_evaluation_as_json_is_all_of_stdout(
    pipeline: Pipeline, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "q", "--text", text, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ppl"] == 19.5


# ------------------------------------------------------------------------------------------------ inspect


def test_inspect_says_what_is_in_a_checkpoint(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "./q"]) == 0
    out = capsys.readouterr().out
    for part in ("4 bits, group 16", "pack-quantized", "2.5 MB", "5.000 per", "down_proj", "8 x 16", "1,234"):
        assert part in out
    assert "lm_head.weight: the output head" in out


def test_inspect_as_json_is_all_of_stdout(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "./q", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == "./q"


@pytest.mark.parametrize(("flags", "expected"), [([], False), (["--trust-remote-code"], True)])
def test_inspect_runs_a_checkpoints_code_only_when_told_to(
    pipeline: Pipeline, flags: list[str], expected: bool
) -> None:
    assert main(["inspect", "./q", *flags]) == 0
    assert pipeline.asked == {"path": "./q", "allow_pickle": False, "trust_remote_code": expected}
