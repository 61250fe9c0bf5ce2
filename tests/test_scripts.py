"""The measuring scripts: what they remove, and what they print for what was not measured."""

import importlib.util
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from quantforge.calibration import CalibrationSet
from quantforge.evaluate.divergence import evaluate_windows
from quantforge.evaluate.protocol import build_windows, load_rows
from quantforge.model.tokenizer import load_tokenizer
from quantforge.pipeline.score import evaluate_checkpoint
from tests.test_pipeline import finish, recipe_for

SCRIPTS = Path(__file__).parent.parent / "scripts"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_quality_job_scores_what_eval_scores_with_activations_rounded(
    tiny_llama: Path, text: Path, tmp_path: Path
) -> None:
    job, out = script("quality"), tmp_path / "out"
    finish(recipe_for(tiny_llama, out, text, method="rtn", bits=8, group_size=-1, activation_bits=8))
    tokenizer = load_tokenizer(tiny_llama)
    windows = build_windows(load_rows(text), tokenizer, source=text.name, window=64, windows=4)
    original = job.hidden_states(str(tiny_llama), windows.tokens)
    row = job.score(evaluate_windows(windows, job.hidden_states(str(out), windows.tokens), original))
    told = evaluate_checkpoint(str(out), reference=str(tiny_llama), text=str(text), window=64, windows=4)
    assert told.activations is not None and told.divergence is not None
    assert row["kl"] == told.divergence.kl and row["ppl"] == told.ppl


def test_the_quality_job_removes_the_checkpoints_it_made_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = script("quality")
    work = tmp_path / "work"
    given, made = work / "peer", work / "rtn-4-sym"
    given.mkdir(parents=True)

    def make(row: str, args: Namespace) -> tuple[str, dict[str, Any]]:
        assert row == made.name
        made.mkdir()
        return str(made), {}

    gap = SimpleNamespace(kl=0.1, kl_se=0.001, kl_se_window=0.01, top1=0.9)
    scores = SimpleNamespace(ppl=10.0, divergence=gap)
    seen = []
    monkeypatch.setattr(job, "make", make)
    monkeypatch.setattr(job, "load_tokenizer", lambda path: None)
    monkeypatch.setattr(job, "load_rows", lambda file: [])
    monkeypatch.setattr(job, "build_windows", lambda *args, **options: SimpleNamespace(tokens=None))
    monkeypatch.setattr(job, "hidden_states", lambda model, tokens: seen.append(model))
    monkeypatch.setattr(job, "evaluate_windows", lambda *args: scores)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    command = (
        f"job model --data {tmp_path} --out {tmp_path}/rows.json --work {work} --rows fp,{made.name},peer-4-sym={given}"
    )
    monkeypatch.setattr(sys, "argv", command.split())
    job.main()
    assert list(json.loads((tmp_path / "rows.json").read_text())) == ["fp", made.name, "peer-4-sym"]
    assert given.is_dir() and not made.exists()
    assert seen == ["model", "model", str(made), str(made), str(given), str(given)]
    score = "10.000 | 0.1000 (0.0100) | 0.9000"
    assert f"| peer (peer) | {score} | {score} | 1.00 | 1.00 |  |  |" in capsys.readouterr().out


@pytest.mark.parametrize("asym", [False, True])
def test_the_peer_table_has_numbers_only_for_what_was_measured_and_everyone_gets_the_same_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asym: bool
) -> None:
    bench = script("bench_peers")
    (tmp_path / "gptqmodel").mkdir()
    tokens = CalibrationSet(torch.zeros(1, 2, dtype=torch.int64), "x", 1, False)
    monkeypatch.setattr("quantforge.calibration.build_calibration", lambda *args, **options: tokens)
    monkeypatch.setattr("quantforge.model.tokenizer.load_tokenizer", lambda path: None)

    def process_cost(command: list[str], log: Path, threads: int) -> tuple[int, int, float, float]:
        output = Path(command[command.index("--output") + 1])
        output.mkdir()
        assert ("--asym" in command) == asym
        return (9 if output.name == "autoround" else 0), 1_500_000, 12.0, 7.0

    monkeypatch.setattr(bench, "process_cost", process_cost)
    peers = ["gptqmodel=python", "autoround=python"]
    asked = Namespace(model="m", text="t", work=tmp_path, nsamples=1, seqlen=2, threads=1, peer=peers, asym=asym)
    bench.measure(asked)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| quantforge | 12 | 1500 | 7 |",
        f"| gptqmodel | {tmp_path}/gptqmodel exists, skipped | | |",
        f"| autoround | failed with status 9, see {tmp_path}/autoround.log | | |",
    ]
    assert not (tmp_path / "autoround").exists(), "the next call would take it for finished"
    assert (tmp_path / "gptqmodel").is_dir()


def test_the_cost_of_a_process_comes_with_its_exit_status(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('why'); sys.exit(3)"]
    status, peak, cpu, wall = script("bench_peers").process_cost(command, tmp_path / "log", 1)
    assert status == 3 and peak > 0 and cpu > 0 and wall > 0
    assert (tmp_path / "log").read_text() == "why\n"


def test_the_tables_of_docs_quality_are_those_of_its_rows() -> None:
    job = script("quality")
    page = (SCRIPTS.parent / "docs" / "quality.md").read_text()
    rows = json.loads((SCRIPTS.parent / "docs" / "quality.json").read_text())
    before, _, rest = page.partition(job.MARKS[0])
    assert before and rest.partition(job.MARKS[1])[0].strip() == job.tables(rows)


def test_tables_show_each_grid_with_its_peers_first_and_shares_of_the_best_peer() -> None:
    def entry(kl: float, **more: object) -> dict[str, Any]:
        return {name: {"ppl": 10.0, "kl": kl, "kl_se": 0.01, "top1": 0.9} for name in ("wikitext", "c4")} | more

    rows = {"default-4-sym": entry(0.1), "a-4-sym": entry(0.4, peer=True), "b-4-sym": entry(0.2, peer=True)}
    rows |= {"default-3-sym": entry(0.3), "gptq-3-sym": entry(0.6, cpu_seconds=7.4), "rtn-4-sym": entry(0.8)}
    first, second = script("quality").tables(rows).split("\n\n")
    shares = [[cell.strip() for cell in line.split("|")[1:10:8]] for line in first.splitlines()[2:]]
    assert shares == [["a (peer)", "2.00"], ["b (peer)", "1.00"], ["rtn", "4.00"], ["default", "0.50"]]
    assert "KL / the best peer, C4" in first and "KL / gptq, C4" in second
    assert [line.split("|")[8].strip() for line in second.splitlines()[2:]] == ["1.00", "0.50"]
    assert second.splitlines()[2].endswith("| 7 |")
