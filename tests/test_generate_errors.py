"""What `generate` says to a bad checkpoint, an empty prompt and Ctrl-C, and the codes that it exits with."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantforge.cli import main
from quantforge.model.tokenizer import load_tokenizer
from quantforge.runtime import generate as module

Take = Callable[[str], Path]


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["generate", *arguments])
    shown = capsys.readouterr()
    assert not shown.out and "Traceback" not in shown.err and "defect" not in shown.err, shown.err
    return code, shown.err


def with_tokenizer(path: Path, tiny_llama: Path) -> Path:
    load_tokenizer(tiny_llama).save_pretrained(path)
    return path


def test_a_directory_that_is_none_or_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = fails(capsys, str(tmp_path), "a")
    assert code == 1 and str(tmp_path) in said and "config.json" in said
    code, said = fails(capsys, str(tmp_path / "none"), "a")
    assert code == 1 and "none" in said


def test_a_missing_and_a_truncated_shard(take: Take, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = with_tokenizer(take("sharded"), tiny_llama)
    first, second, *_ = sorted(path.glob("*.safetensors"))
    data = second.read_bytes()
    second.write_bytes(data[: len(data) // 2])
    code, said = fails(capsys, str(path), "a")
    assert code == 1 and second.name in said
    second.write_bytes(data)
    first.unlink()
    code, said = fails(capsys, str(path), "a")
    assert code == 1 and first.name in said


def test_a_site_without_one_of_its_tensors(take: Take, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    path = with_tokenizer(take("gptq"), tiny_llama)
    tensors = load_file(path / "model.safetensors")
    del tensors[next(key for key in tensors if key.endswith("up_proj.scales"))]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    code, said = fails(capsys, str(path), "a")
    assert code == 1 and "up_proj" in said and "scales" in said


def test_a_directory_without_a_tokenizer(take: Take, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = fails(capsys, str(take("gptq")), "a")
    assert code == 1 and "has no tokenizer that can be read" in said


def test_an_empty_prompt(take: Take, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = fails(capsys, str(with_tokenizer(take("gptq"), tiny_llama)), "", "--raw")
    assert code == 2 and "the prompt is empty" in said


def test_code_of_a_checkpoint_is_not_run(take: Take, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = with_tokenizer(take("gptq"), tiny_llama)
    witness = path / "ran"
    (path / "own.py").write_text(f"open({str(witness)!r}, 'w').close()\n")
    config = json.loads((path / "config.json").read_text())
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (path / "config.json").write_text(json.dumps(config | {"auto_map": own, "model_type": "own"}))
    code, said = fails(capsys, str(path), "a")
    assert code == 1 and "trust" in said and not witness.exists()


def test_a_token_that_the_model_has_no_place_for(
    take: Take, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = with_tokenizer(take("gptq"), tiny_llama)  # 32 tokens; the tokenizer knows more
    code, said = fails(capsys, str(path), "every group", "--raw")
    assert code == 1 and "token" in said and "32" in said


def test_ctrl_c_while_it_writes(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: module._Stream, value: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(module._Stream, "put", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are deaf to it
    try:
        assert main(["generate", str(tiny_llama), "a", "--raw"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.strip().endswith("interrupted")


def test_a_reader_that_goes_away(tiny_llama: Path) -> None:
    """``generate ... | head -c 1``: no traceback."""
    code = (
        "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1); from quantforge.cli import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "generate", str(tiny_llama), "every group", "--raw", "--max-new-tokens", "3"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 1 and "Traceback" not in ran.stderr, ran.stderr
