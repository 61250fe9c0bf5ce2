"""What the writer copies, what it leaves behind and says so, and the order in which it makes things durable."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quantforge.model.shards import read_json
from quantforge.pipeline import run as run_module
from quantforge.pipeline import writer
from quantforge.pipeline.plan import make_plan
from quantforge.pipeline.run import quantize
from quantforge.recipe import Recipe


def skipped_of(model: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """What `write_checkpoint` returns in a run that writes `output`."""
    found: list[tuple[str, ...]] = []
    original = writer.write_checkpoint

    def watched(*args: Any) -> tuple[str, ...]:
        found.append(original(*args))
        return found[-1]

    monkeypatch.setattr(run_module, "write_checkpoint", watched)
    recipe = Recipe(model=str(model), output=str(output), group_size=64, method="rtn")
    assert list(quantize(recipe, make_plan(recipe)))
    return found[0]


def names(directory: Path) -> set[str]:
    return {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()}


def test_weights_outside_the_checkpoint_and_oversized_files_are_left_behind_by_name(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    shutil.copy(model / "model.safetensors", model / "consolidated.safetensors")
    (model / "pytorch_model.bin").write_bytes(b"x")
    (model / "lexicon.dat").write_bytes(bytes(100_001))
    (model / "small.dat").write_bytes(bytes(99_999))
    (model / "original").mkdir()
    (model / "original" / "params.json").write_text("{}")
    monkeypatch.setattr(writer, "SIDE_FILE_LIMIT_BYTES", 100_000)
    assert skipped_of(model, tmp_path / "out", monkeypatch) == (
        "consolidated.safetensors", "lexicon.dat", "original/", "pytorch_model.bin",
    )  # fmt: skip
    out = names(tmp_path / "out")
    assert "small.dat" in out and not out & {"consolidated.safetensors", "lexicon.dat", "pytorch_model.bin"}


def test_side_files_are_carried_over_and_the_sources_own_are_not(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    carried = ["chat_template.jinja", "modeling_tiny.py", "LICENSE", "additional_chat_templates/tools.jinja"]
    own = [".cache/huggingface/model.lock", ".gitattributes", "README.md", "__pycache__/a.pyc"]
    for name in carried + own:
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(name)
    assert skipped_of(model, tmp_path / "out", monkeypatch) == ()
    out = names(tmp_path / "out")
    assert {*carried, "tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= out
    assert not out & set(own)
    assert all((tmp_path / "out" / name).read_text() == name for name in carried)


def test_every_shard_of_the_index_is_written_and_none_is_called_left_behind(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    parts = [dict(list(tensors.items())[start::2]) for start in (0, 1)]
    for number, part in enumerate(parts):
        save_file(part, model / f"part-{number}.safetensors", {"format": "pt"})
    weight_map = {key: f"part-{number}.safetensors" for number, part in enumerate(parts) for key in part}
    writer.write_json(model / "model.safetensors.index.json", {"weight_map": weight_map})
    assert skipped_of(model, tmp_path / "out", monkeypatch) == ()
    assert "model.safetensors.index.json" not in names(tmp_path / "out")


def test_a_shard_that_only_repeats_a_tied_tensor_is_not_called_left_behind(
    tiny_llama_tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(tiny_llama_tied, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").rename(model / "part-0.safetensors")
    save_file({"lm_head.weight": tensors["model.embed_tokens.weight"]}, model / "part-1.safetensors", {"format": "pt"})
    weight_map = dict.fromkeys(tensors, "part-0.safetensors") | {"lm_head.weight": "part-1.safetensors"}
    writer.write_json(model / "model.safetensors.index.json", {"weight_map": weight_map})
    assert skipped_of(model, tmp_path / "out", monkeypatch) == ()


def test_output_inside_the_sources_directory_is_not_called_left_behind(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    assert skipped_of(model, model / "out", monkeypatch) == ()
    assert read_json(model / "out" / "config.json")["quantization_config"]["quant_method"] == "compressed-tensors"


def test_sync_tree_flushes_every_directory_below_before_the_one_that_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/x", "b"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "a" / "file").write_text("")
    flushed: list[str] = []
    monkeypatch.setattr(writer, "sync_directory", lambda path: flushed.append(str(path.relative_to(tmp_path))))
    writer.sync_tree(tmp_path)
    assert sorted(flushed) == [".", "a", "a/x", "b"]
    assert flushed[-1] == "." and flushed.index("a/x") < flushed.index("a")
