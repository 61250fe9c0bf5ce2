"""`generate` streams what the model says, and `bench` measures, from the command line."""

import json
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import quantforge
from quantforge.cli import main
from quantforge.cli.runtimeview import show_benchmark
from quantforge.cli.ui import Ui
from quantforge.model.tokenizer import load_tokenizer
from quantforge.runtime.bench import Benchmark, LayerTime, memory_speed


@pytest.fixture(scope="module")
def packed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small Llama with its tokenizer, 4 bits in groups of 32."""
    from quantforge.pipeline.plan import make_plan
    from quantforge.pipeline.run import quantize

    path = tmp_path_factory.mktemp("packed") / "packed"
    settings = {"model": str(tiny_llama), "output": str(path), "method": "rtn", "group_size": 32, "formats": ("gptq",)}
    recipe = quantforge.Recipe.model_validate(settings)
    assert list(quantize(recipe, make_plan(recipe)))
    return path


def test_generate_streams_greedy_text_and_tells_its_speed(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(packed), "every group", "--raw", "--max-new-tokens", "6", "--dtype", "float32"]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    model, tokenizer = quantforge.load(packed, dtype="float32", device="cpu"), load_tokenizer(packed)
    tokens = torch.tensor([tokenizer("every group")["input_ids"]])
    asked = tokens.shape[1]
    for _ in range(6):
        with torch.no_grad():
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
        if int(tokens[0, -1]) == tokenizer.eos_token_id:
            break
    text = tokenizer.decode(tokens[0, asked:], skip_special_tokens=True)
    assert shown.out == f"{text}\n"
    assert f"{asked} prompt tokens in" in shown.err and "tokens/s" in shown.err
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["text"], found["prompt_tokens"]) == (text, asked)
    assert found["prefill_seconds"] > 0 and found["new_tokens"] == tokens.shape[1] - asked


def test_drawn_text_depends_on_the_seed_alone(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        arguments = ["generate", str(packed), "a", "--raw", "--max-new-tokens", "12", "--temperature", "1.5", "-q"]
        assert main([*arguments, "--seed", seed, "--json"]) == 0
        shown = capsys.readouterr()
        texts.append(json.loads(shown.out)["text"])
        assert shown.err == ""
    assert texts[0] == texts[1] != texts[2]


def test_bench_measures_models_and_layers(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", str(packed), "--prompt-tokens", "4", "--new-tokens", "2", "--repeats", "1", "-q"]
    assert main([*arguments, "--json", "--trust-remote-code"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    found = json.loads(shown.out)
    names = [model["name"] for model in found["models"]]
    assert names == ["packed, bfloat16", "packed, float32", "dense, bfloat16", "dense, float32"]
    assert all(model["decode_tokens_per_second"] > 0 for model in found["models"])
    bytes_of = {model["name"]: model["weight_bytes"] for model in found["models"]}
    assert bytes_of["packed, bfloat16"] < bytes_of["dense, bfloat16"] < bytes_of["dense, float32"]
    shapes = {(t["out_features"], t["in_features"], t["tokens"]): t for t in found["layers"]}
    assert set(shapes) == {(o, i, t) for o, i in ((128, 128), (64, 128), (384, 128), (128, 384)) for t in (1, 4)}
    assert shapes[384, 128, 1]["layers"] == 4 and shapes[384, 128, 1]["packed_bytes"] == 384 * 128 // 2 + 384 * 4 * 2
    assert found["machine"]["threads"] == torch.get_num_threads() and found["machine"]["kernel"]
    assert main([*arguments, "--no-dense"]) == 0
    table = capsys.readouterr().out
    assert "[384, 128]" in table and f"cpu capability  {torch.backends.cpu.get_cpu_capability()}" in table
    assert "4 bits, group 32" in table and "read ms" in table


def test_a_gpu_is_judged_by_its_memory() -> None:
    """An H100 SXM: 2619 MHz, 5120 bits, 3.35 TB/s by its data sheet."""
    said = SimpleNamespace(memory_clock_rate=2_619_000, memory_bus_width=5120)
    assert memory_speed(said) == pytest.approx(3.352e12, rel=1e-3)
    assert memory_speed(SimpleNamespace()) is None
    layer = LayerTime(64, 128, 4, 128, 1, 1, 1e-3, {}, 4096, None, 0.754)
    out = Console(file=StringIO(), width=120)
    show_benchmark(Ui(out=out, quiet=True), Benchmark("x", {"load": 0.123}, 1, 2, layers=[layer]))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "75%" in text and "share of peak" in text and "a scale a row" in text and "0.12" in text


def test_bench_needs_something_packed(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tiny_llama), "-q"]) == 2
    assert "nothing is packed" in capsys.readouterr().err
