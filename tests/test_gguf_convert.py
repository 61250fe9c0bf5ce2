"""GGUF files converted back: the bytes of the other format, or a refusal that names tensor, type and reason."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from quantforge.cli import main
from quantforge.errors import PlanError, SourceError, UsageError
from quantforge.model.gguf_file import GgufCheckpoint, open_gguf
from quantforge.model.gguf_header import GgufHeader, GgufTensor
from quantforge.model.gguf_sites import odd_blocks
from quantforge.pipeline.convert import convert_checkpoint
from quantforge.pipeline.plan import make_plan
from quantforge.pipeline.run import quantize
from quantforge.readers import Scheme
from quantforge.readers._blocks import boundaries, decode_blocks
from quantforge.recipe import Recipe

FORMATS = ("gptq", "compressed-tensors", "gguf")
GRIDS: dict[str, dict[str, Any]] = {
    "sym-64": {"group_size": 64},
    "asym-32": {"group_size": 32, "symmetric": False},
    "eight-rows": {"bits": 8, "group_size": -1},
    "mixed": {"group_size": 32, "rules": ({"match": "*.down_proj", "bits": 8, "group_size": 128},)},
}


@pytest.fixture(scope="module")
def model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 Llama of two layers with grouped heads, 256 inputs of down_proj, norms that are not all ones."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("gguf-back") / "model"
    torch.manual_seed(9)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    made = LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=1)).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    made.save_pretrained(path)
    for file in tiny_llama.glob("tokenizer*"):
        shutil.copy(file, path)
    return path


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each grid in three formats."""
    folder = tmp_path_factory.mktemp("gguf-runs")
    for name, own in GRIDS.items():
        fields = {"model": str(model), "output": str(folder / name), "method": "rtn", "formats": FORMATS}
        recipe = Recipe.model_validate(fields | own)
        assert list(quantize(recipe, make_plan(recipe)))
    return {name: folder / name for name in GRIDS}


@pytest.fixture
def export(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of a GGUF export to change, its file ``x.gguf``."""
    path = shutil.copytree(runs["sym-64"] / "gguf", tmp_path / "export")
    (path / "sym-64.gguf").rename(path / "x.gguf")
    return path


def refusal(source: Path, output: Path, **options: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        convert_checkpoint(source, "gptq", output, **options)
    assert not output.exists() and not output.with_name(f"{output.name}.partial").exists()
    return caught.value.problems


# ------------------------------------------------------------------------------------------------ exact


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("format_name", ["gptq", "compressed-tensors"])
def test_a_gguf_export_becomes_the_very_files_of_the_other_format(
    runs: dict[str, Path], tmp_path: Path, name: str, format_name: str
) -> None:
    done = convert_checkpoint(runs[name] / "gguf", format_name, tmp_path / "out")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (runs[name] / format_name / file).read_bytes(), file
    assert (done.source_format, done.sites, done.notes) == ("gguf", 14, ())
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        file.name for file in (runs[name] / format_name).iterdir()
    }


def test_a_file_alone_takes_config_and_tokenizer_from_the_original(
    runs: dict[str, Path], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "alone").mkdir()
    shutil.copy(runs["sym-64"] / "gguf" / "sym-64.gguf", tmp_path / "alone" / "m.gguf")
    file, out = str(tmp_path / "alone" / "m.gguf"), str(tmp_path / "out")
    assert main(["convert", file, "--format", "gptq", "-o", out]) == 1
    said = capsys.readouterr().err
    assert "alone has no config.json and no tokenizer.json, which a GGUF file does not hold in full; give" in said
    assert "--config DIR, the directory of the original checkpoint" in said
    assert main(["convert", file, "--config", str(model), "--format", "gptq", "-o", out, "--json", "-q"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["source"], found["source_format"]) == (file, "gguf")
    assert found["notes"] == ["not copied from the source: model.safetensors"]
    expected = runs["sym-64"] / "gptq" / "model.safetensors"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == expected.read_bytes()
    with pytest.raises(UsageError, match="--config is for GGUF files"):
        convert_checkpoint(runs["sym-64"] / "gptq", "awq", tmp_path / "awq", config=model)


@pytest.mark.parametrize(("kind", "head"), [("Q4_0", 2), ("Q4_1", 4), ("Q8_0", 2)])
def test_decoded_blocks_are_the_weights_that_the_package_gguf_makes(kind: str, head: int) -> None:
    codes = torch.randint(0, 256, (5, 6, 32 if kind == "Q8_0" else 16), dtype=torch.uint8)
    scale = (torch.randint(-127, 128, (5, 6, 1)) / 256).half()
    scale[0, 0] = 0
    zero = torch.randint(0, 16, scale.shape)
    heads = torch.cat([scale, (-zero * scale).half()], dim=-1).view(torch.uint8)[..., :head]
    blocks = torch.cat([heads, codes], dim=-1).flatten(1)
    bits, symmetric = {"Q4_0": (4, True), "Q4_1": (4, False), "Q8_0": (8, True)}[kind]
    decoded = decode_blocks(blocks, Scheme(bits, 32, symmetric, kind), "x")
    expected = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(decoded.dequantize(), torch.from_numpy(expected))
    assert kind != "Q4_1" or torch.equal(decoded.zero[scale[..., 0] != 0], zero[scale != 0].to(torch.uint8))


def test_blocks_of_one_group_are_found_by_their_equal_scales() -> None:
    scale = torch.tensor([[1, 1, 2, 2, 2, 2], [3, 3, 3, 3, 5, 5]]).half().unsqueeze(-1)
    blocks = torch.cat([scale.view(torch.uint8), torch.randint(0, 256, (2, 6, 16), dtype=torch.uint8)], -1).flatten(1)
    assert boundaries(blocks, "Q4_0") == [2, 4]
    decoded = decode_blocks(blocks, Scheme(4, 64, True, "Q4_0"), "x")
    assert decoded.scale.tolist() == [[1, 2, 2], [3, 3, 5]] and decoded.group_index.tolist() == [
        index // 64 for index in range(192)
    ]


# ------------------------------------------------------------------------------------------------ refused


def place_of(file: Path, name: str) -> tuple[int, int]:
    """Where a tensor's type number and its bytes are."""
    [tensor] = [tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == name]
    return tensor.field.offset + 8 + len(name) + 4 + 8 * len(tensor.shape), tensor.data_offset


def overwrite(file: Path, place: int, raw: bytes) -> None:
    content = bytearray(file.read_bytes())
    content[place : place + len(raw)] = raw
    file.write_bytes(content)


def test_k_quants_are_refused_with_tensor_type_and_reason(export: Path, tmp_path: Path) -> None:
    """A block of Q4_K has 256 weights and the bytes of eight of Q4_0."""
    for layer in (0, 1):
        place, _ = place_of(export / "x.gguf", f"blk.{layer}.ffn_down.weight")
        overwrite(export / "x.gguf", place, b"\x0c\0\0\0")
    assert refusal(export, tmp_path / "out") == [
        f"{export / 'x.gguf'} cannot be converted:",
        "2 tensors are Q4_K, which is no grid of codes, a scale and a whole zero for each group (Q4_0, Q4_1, Q8_0 "
        "are): blk.0.ffn_down.weight, blk.1.ffn_down.weight",
    ]


def test_quantized_embeddings_are_refused_and_a_head_is_a_site() -> None:
    shape = {"shape": (256, 128), "start": 0, "total_bytes": 256 * 136}
    tensors = {
        "model.embed_tokens.weight": GgufTensor("token_embd.weight", "Q8_0", **shape),  # type: ignore[arg-type]
        "lm_head.weight": GgufTensor("output.weight", "Q8_0", **shape),  # type: ignore[arg-type]
    }
    file = GgufCheckpoint(Path(), {}, Path("x.gguf"), tensors, GgufHeader({}, tuple(tensors.values())))
    assert odd_blocks(file) == [
        "1 tensors are Q8_0, and only GGUF quantizes anything but matrices of layers and the output head: "
        "token_embd.weight"
    ]
    changed = replace(file, tensors={"lm_head.weight": tensors["lm_head.weight"]})
    assert odd_blocks(changed) == []


def test_a_minimum_between_two_zeros_is_refused_with_its_numbers(runs: dict[str, Path], tmp_path: Path) -> None:
    path = shutil.copytree(runs["asym-32"] / "gguf", tmp_path / "export")
    _, place = place_of(path / "asym-32.gguf", "blk.0.attn_v.weight")
    overwrite(path / "asym-32.gguf", place, torch.tensor([0.5, -1.75]).half().view(torch.uint8).numpy().tobytes())
    with pytest.raises(SourceError) as caught:
        convert_checkpoint(path, "gptq", tmp_path / "out")
    assert str(caught.value) == (
        "model.layers.0.self_attn.v_proj: 1 of 256 Q4_1 blocks have a minimum that is no whole multiple of their "
        "scale, such as -1.75 for 0.5, so their zero is no integer"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_key_value_heads": 4}, "the file says llama.attention.head_count_kv 2, "),
        ({"rms_norm_eps": 1e-5}, "the file says llama.attention.layer_norm_rms_epsilon 9.99999"),
        ({"model_type": "qwen2"}, "the file holds a llama, "),
        ({"model_type": "gemma2"}, "model_type 'gemma2' is not known to this writer"),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
                }
            },
            "the file holds no rope_freqs.weight, which goes with rope_type llama3 and no other",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "the file says llama.rope.freq_base 10000"),
    ],
)  # fmt: skip
def test_a_config_of_another_model_is_refused(export: Path, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    content = json.loads((export / "config.json").read_text())
    (export / "config.json").write_text(json.dumps(content | change))
    problems = refusal(export, tmp_path / "out")
    assert len(problems) == 2 and problems[1].startswith(said)


def test_a_tokenizer_of_another_model_is_refused(export: Path, tmp_path: Path) -> None:
    content = json.loads((export / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = (token for token, index in vocabulary.items() if index in (10, 11))
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (export / "tokenizer.json").write_text(json.dumps(content))
    [_, said] = refusal(export, tmp_path / "out")
    assert said.startswith("tokenizer.ggml.tokens of the file is not that of ") and ": token 10 is " in said


def test_shapes_that_config_json_does_not_describe_are_refused(export: Path, tmp_path: Path) -> None:
    """Also where the file's own metadata agree with the config."""
    header = open_gguf(export).header
    assert header.metadata["llama.feed_forward_length"] == 256
    content = (export / "x.gguf").read_bytes()
    key = b"llama.feed_forward_length"
    place = content.index(key) + len(key) + 4
    overwrite(export / "x.gguf", place, (288).to_bytes(4, "little"))
    config = json.loads((export / "config.json").read_text())
    (export / "config.json").write_text(json.dumps(config | {"intermediate_size": 288}))
    with pytest.raises(SourceError, match=r"mlp\.gate_proj is \[256, 128\] \[out, in\], the model needs \[288, 128\]"):
        convert_checkpoint(export, "gptq", tmp_path / "out")
