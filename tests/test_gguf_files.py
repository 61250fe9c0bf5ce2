"""GGUF files as others read them: transformers' own loader, the package gguf, and every part of quantforge."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from quantforge.errors import PlanError, SourceError, UsageError, VerifyError
from quantforge.formats import CheckpointFacts, SiteShape, load_format
from quantforge.model.gguf_file import open_gguf
from quantforge.model.packed import open_any
from quantforge.model.source import Checkpoint, open_checkpoint
from quantforge.pipeline.convert import convert_checkpoint
from quantforge.pipeline.describe import describe_checkpoint
from quantforge.pipeline.examine import examine
from quantforge.pipeline.plan import make_plan
from quantforge.pipeline.run import quantize
from quantforge.pipeline.score import evaluate_checkpoint
from quantforge.pipeline.verify import verify_checkpoint
from quantforge.pipeline.writer import write_checkpoint
from quantforge.quantized import SCALE_DTYPES, CacheScales, QuantizedWeight
from quantforge.recipe import Recipe
from quantforge.spec import QuantSpec


class Made:
    """Implements `contents.Contents` with random codes for every matrix of the decoder layers, without a solver."""

    def __init__(self, path: Path, specs: Callable[[str], QuantSpec]) -> None:
        self.source: Checkpoint = open_checkpoint(path)
        self.config: Mapping[str, Any] = self.source.config
        tensors = self.source.tensors
        names = [
            key.removesuffix(".weight") for key, info in tensors.items() if ".layers." in key and len(info.shape) > 1
        ]
        self.shapes = {name: SiteShape(name, *tensors[f"{name}.weight"].shape) for name in names}
        self.specs = {name: specs(name) for name in names}
        self.activations = None
        self.kv_cache = None
        self.cache_scales: Mapping[str, CacheScales] = {}
        self.packed = {f"{name}.weight": name for name in names}
        self.changed: frozenset[str] = frozenset()
        self.unused: frozenset[str] = frozenset()
        self.weights = {name: self._random(name) for name in names}

    def _random(self, name: str) -> QuantizedWeight:
        spec, shape = self.specs[name], self.shapes[name]
        grid = (shape.out_features, spec.groups(shape.in_features))
        codes = torch.randint(0, spec.code_max + 1, (shape.out_features, shape.in_features), dtype=torch.uint8)
        steps = torch.randint(1, 128, grid) * torch.where(torch.rand(grid) > 0.5, 1, -1)
        zero = torch.randint(0, spec.code_max + 1, grid)
        zero = torch.full(grid, spec.symmetric_zero) if spec.symmetric else zero
        scales = (steps * 2.0 ** -(spec.bits + 8)).to(SCALE_DTYPES[spec.scale_dtype])
        return QuantizedWeight(spec, codes, scales, zero.to(torch.uint8))

    def weight(self, name: str) -> QuantizedWeight:
        return self.weights[name]

    expected = weight

    def tensor(self, key: str) -> torch.Tensor:
        raise KeyError(key)

    def write(self, directory: Path) -> Path:
        directory.mkdir()
        facts = CheckpointFacts(self.specs, (), has_zero_zero=False)
        write_checkpoint(directory, self, load_format("gguf"), facts, 1 << 30)
        assert verify_checkpoint(directory, self) == len(self.source.tensors)
        return directory

    def state(self) -> dict[str, torch.Tensor]:
        copied = {key: self.source.read(key) for key in self.source.tensors if key not in self.packed}
        return copied | {f"{name}.weight": weight.dequantize() for name, weight in self.weights.items()}


def save_model(path: Path, config: Any, tokenizer_from: Path) -> Path:
    """A random model of two layers, its vectors not all ones or zeros, with the tokenizer of another."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(path)
    for file in tokenizer_from.glob("tokenizer*"):
        shutil.copy(file, path)
    return path


@pytest.fixture(scope="module")
def models(tiny_llama: Path, tiny_llama_tied: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    sizes: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 50000.0}
    folder = tmp_path_factory.mktemp("models")
    configs = {
        "biased": LlamaConfig(**sizes, attention_bias=True, mlp_bias=True, rope_parameters=rope),
        "mistral": MistralConfig(**sizes, sliding_window=64),
        "qwen2": Qwen2Config(**sizes, rope_parameters=rope),
        "qwen2-tied": Qwen2Config(**sizes, tie_word_embeddings=True),
        "qwen3": Qwen3Config(**sizes, head_dim=128),
    }
    made = {name: save_model(folder / name, config, tiny_llama) for name, config in configs.items()}
    return {"llama": tiny_llama, "llama-tied": tiny_llama_tied} | made


def mixture(name: str) -> QuantSpec:
    """Every block type, a group of one block or a whole row, in one file."""
    if name.endswith("v_proj"):
        return QuantSpec(8, None, scale_dtype="float16")
    return QuantSpec(4, 32, symmetric=not name.endswith("up_proj"), scale_dtype="float16")


@pytest.mark.parametrize("name", ["llama", "llama-tied", "biased", "mistral", "qwen2", "qwen2-tied", "qwen3"])
def test_transformers_own_loader_finds_the_very_weights(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    made = Made(models[name], mixture)
    out = made.write(tmp_path / "out")
    where = {"gguf_file": "model.gguf", "dtype": torch.float32}
    loaded = AutoModelForCausalLM.from_pretrained(out, quantization_config=GgufConfig(dequantize=True), **where).eval()
    ours = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32).eval()
    missing, unexpected = ours.load_state_dict(made.state(), strict=False)
    assert not unexpected and missing == (["lm_head.weight"] if name.endswith("tied") else [])
    assert loaded.config.tie_word_embeddings == name.endswith("tied")
    theirs = loaded.state_dict()
    lost = ours.state_dict().keys() - theirs.keys()
    assert all(key.endswith("bias") for key in lost) and bool(lost) == (name == "biased")  # it expects no biases there
    assert not [key for key in theirs if not torch.equal(theirs[key], ours.state_dict()[key])]
    tokens = torch.randint(0, 256, (1, 24))
    with torch.no_grad():
        if not lost:
            torch.testing.assert_close(loaded(tokens).logits, ours(tokens).logits, rtol=0, atol=1e-5)
    text = "Every group has its own scale, 1234.\n\n  <s> x"
    tokenizers = [AutoTokenizer.from_pretrained(models["llama"]), AutoTokenizer.from_pretrained(out, **where)]
    assert tokenizers[0](text).input_ids == tokenizers[1](text).input_ids


def test_biases_of_a_llama_are_reordered_with_their_rows(models: dict[str, Path], tmp_path: Path) -> None:
    made = Made(models["biased"], mixture)
    out = made.write(tmp_path / "out")
    reader = gguf.GGUFReader(out / "model.gguf")
    [stored] = [tensor for tensor in reader.tensors if tensor.name == "blk.1.attn_k.bias"]
    source = made.source.read("model.layers.1.self_attn.k_proj.bias")
    assert stored.tensor_type.name == "F32" and stored.data[:4].tolist() == source[[0, 8, 1, 9]].tolist()
    assert torch.equal(open_gguf(out).read("model.layers.1.self_attn.k_proj.bias"), source)


def test_the_file_says_what_the_model_is(models: dict[str, Path], tmp_path: Path) -> None:
    file = Made(models["mistral"], mixture).write(tmp_path / "out") / "model.gguf"
    reader = gguf.GGUFReader(file)
    said = {key: field.contents() for key, field in reader.fields.items()}
    expected = {
        "general.architecture": "llama", "general.type": "model", "general.file_type": 2,
        "general.quantization_version": 2, "llama.block_count": 2, "llama.embedding_length": 96,
        "llama.attention.head_count": 6, "llama.attention.head_count_kv": 2, "llama.rope.dimension_count": 16,
        "llama.attention.sliding_window": 64, "llama.vocab_size": 256, "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 2, "tokenizer.ggml.add_bos_token": False,
    }  # fmt: skip
    assert {key: said.get(key) for key in expected} == expected
    vocab = json.loads((models["llama"] / "tokenizer.json").read_text())["model"]["vocab"]
    tokens, kinds = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"]
    assert len(tokens) == len(kinds) == 256 and {token: tokens.index(token) for token in vocab} == vocab
    assert kinds[:4] == [3, 3, 3, 1] and all(
        (kind == 5) == token.startswith("[PAD") for token, kind in zip(tokens, kinds, strict=True)
    )
    kinds_of = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert {kinds_of[f"blk.0.{name}.weight"] for name in ("attn_q", "attn_k", "ffn_down")} == {"Q4_0"}
    assert (kinds_of["blk.0.ffn_up.weight"], kinds_of["blk.0.attn_v.weight"]) == ("Q4_1", "Q8_0")
    assert (kinds_of["blk.0.attn_norm.weight"], kinds_of["token_embd.weight"]) == ("F32", "F32")


def test_bfloat16_matrices_stay_and_vectors_become_float32(models: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models["qwen2-tied"], dtype=torch.bfloat16)
    shutil.copytree(models["qwen2-tied"], tmp_path / "bf16")
    model.save_pretrained(tmp_path / "bf16")
    out = Made(tmp_path / "bf16", lambda name: QuantSpec(4, 32)).write(tmp_path / "out")
    kinds = {key: tensor.kind for key, tensor in open_gguf(out).tensors.items()}
    assert "lm_head.weight" not in kinds and kinds["model.embed_tokens.weight"] == "BF16"
    assert kinds["model.norm.weight"] == kinds["model.layers.0.self_attn.q_proj.bias"] == "F32"


def test_llama3_factors_are_a_tensor_of_the_file(models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(models["llama"], tmp_path / "llama3")
    config = json.loads((tmp_path / "llama3" / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
    }  # fmt: skip
    (tmp_path / "llama3" / "config.json").write_text(json.dumps(config))
    out = Made(tmp_path / "llama3", mixture).write(tmp_path / "out")
    [factors] = [t for t in gguf.GGUFReader(out / "model.gguf").tensors if t.name == "rope_freqs.weight"]
    assert factors.data.shape == (16,) and (factors.data[0], factors.data[-1]) == (1.0, 8.0)


# ------------------------------------------------------------------------------------------------ verification


@pytest.fixture
def written(models: dict[str, Path], tmp_path: Path) -> tuple[Made, Path]:
    made = Made(models["qwen2"], mixture)
    return made, made.write(tmp_path / "out")


def test_one_bit_of_a_block_or_of_a_copied_tensor_is_found(written: tuple[Made, Path]) -> None:
    made, out = written
    file = out / "model.gguf"
    places = {tensor.name: tensor.data_offset for tensor in gguf.GGUFReader(file).tensors}
    content = bytearray(file.read_bytes())
    content[places["blk.1.ffn_down.weight"] + 9] ^= 0x10
    content[places["blk.0.attn_norm.weight"]] ^= 1
    file.write_bytes(content)
    with pytest.raises(VerifyError) as caught:
        verify_checkpoint(out, made)
    assert caught.value.problems[1:] == [
        "model.layers.0.input_layernorm.weight: differs from the source",
        "model.layers.1.mlp.down_proj.weight: different dequantized weights",
    ]


def test_hyperparameters_that_are_not_the_configs_are_found(written: tuple[Made, Path]) -> None:
    made, out = written
    made.config = {**made.config, "num_attention_heads": 3}
    with pytest.raises(
        VerifyError, match=r"the file states attention\.head_count 6, config.json num_attention_heads 3"
    ):
        verify_checkpoint(out, made)


@pytest.mark.parametrize("kept", [0, 3, 100, 5000, -1])
def test_a_truncated_file_is_a_source_error(written: tuple[Made, Path], kept: int) -> None:
    made, out = written
    content = (out / "model.gguf").read_bytes()
    (out / "model.gguf").write_bytes(content[:kept])
    with pytest.raises(SourceError, match=r"model\.gguf is truncated or no GGUF file"):
        open_gguf(out)
    with pytest.raises(VerifyError, match="is truncated or no GGUF file"):
        verify_checkpoint(out, made)


# ------------------------------------------------------------------------------------------------ commands


@pytest.fixture(scope="module")
def run(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """One run with three formats: its plan and output."""
    out = tmp_path_factory.mktemp("run") / "small"
    recipe = Recipe(
        model=str(tiny_llama), output=str(out), method="rtn", bits=4, group_size=64, token_weights="none",
        formats=("gptq", "compressed-tensors", "gguf"),
    )  # fmt: skip
    plan = make_plan(recipe)
    assert list(quantize(recipe, plan))
    return plan, out


def test_an_export_is_examined_by_its_hashes_and_values(run: tuple[Any, Path], tmp_path: Path) -> None:
    path = shutil.copytree(run[1] / "gguf", tmp_path / "gguf")
    examination = examine(path)
    assert examination.ok and (examination.quant_method, examination.tensors) == ("gguf", 21)
    assert "llama-cpp" in {verdict.server for verdict in examination.verdicts if verdict.loads}
    content = (path / "small.gguf").read_bytes()
    (path / "small.gguf").write_bytes(content[:-2] + b"\xff\x7f")  # the end of a tensor in float32
    codes = {(finding.code, finding.where) for finding in examine(path).errors}
    assert ("changed", "small.gguf") in codes
    (path / "small.gguf").write_bytes(content[:100])
    assert ("gguf", "small.gguf") in {(finding.code, finding.where) for finding in examine(path).errors}


def test_a_run_writes_one_file_named_after_its_output(run: tuple[Any, Path], tiny_llama: Path) -> None:
    _, out = run
    names = {file.name for file in (out / "gguf").iterdir()}
    assert "small.gguf" in names and {"config.json", "tokenizer.json", "quantforge.json"} <= names
    assert not any(name.endswith(".safetensors") for name in names)
    config = json.loads((out / "gguf" / "config.json").read_text())
    assert config.pop("quantization_config") == {"quant_method": "gguf"}
    assert config == json.loads((tiny_llama / "config.json").read_text())


def test_the_plan_tells_the_size_within_a_percent(run: tuple[Any, Path]) -> None:
    plan, out = run
    actual = open_gguf(out / "gguf").total_bytes
    assert plan.bits_per_weight == 4.5 and abs(plan.estimated_bytes - actual) <= 0.01 * actual


def test_inspect_knows_the_blocks(run: tuple[Any, Path]) -> None:
    found = describe_checkpoint(str(run[1] / "gguf"))
    assert found.scheme == "Q4_0, blocks of 32: 14 sites" and found.format == "gguf" and found.bits_per_weight == 4.5
    assert found.quantized[0].name.startswith("model.layers.0.") and "lm_head.weight" in found.kept


def test_a_file_may_be_named_where_a_directory_may(run: tuple[Any, Path], text: Path, tmp_path: Path) -> None:
    path = shutil.copytree(run[1] / "gguf", tmp_path / "gguf")
    file = path / "small.gguf"
    by_directory, score = examine(path), evaluate_checkpoint(str(path), text=str(text), window=64, windows=1)
    (path / "another.gguf").write_bytes(b"GGUF of another size")  # as directories of GGUF files have them
    found = describe_checkpoint(str(file))
    assert (found.scheme, found.format) == ("Q4_0, blocks of 32: 14 sites", "gguf")
    assert (found.files, found.total_bytes) == ({"small.gguf": file.stat().st_size}, file.stat().st_size)
    assert evaluate_checkpoint(str(file), text=str(text), window=64, windows=1).ppl == score.ppl
    by_file = examine(file)
    assert by_file.ok and by_file.path == str(file)
    assert (by_file.findings, by_file.tensors, by_file.verdicts) == (
        by_directory.findings,
        by_directory.tensors,
        by_directory.verdicts,
    )
    file.write_bytes(file.read_bytes()[:-2] + b"\xff\x7f")
    assert {(finding.code, finding.where) for finding in examine(file).errors} >= {("changed", "small.gguf")}


def test_a_file_of_another_models_config_is_described_as_what_it_is(run: tuple[Any, Path], tmp_path: Path) -> None:
    """Beside the safetensors of another export, whose config.json it shares."""
    path = shutil.copytree(run[1] / "gptq", tmp_path / "gptq")
    shutil.copy(run[1] / "gguf" / "small.gguf", path)
    assert describe_checkpoint(str(path / "small.gguf")).format == "gguf"
    with pytest.raises(UsageError, match=r"model\.safetensors .* config\.json may be theirs"):
        examine(path / "small.gguf")
    with pytest.raises(SourceError, match="is a file; MODEL is a checkpoint directory"):
        describe_checkpoint(str(path / "model.safetensors"))
    with pytest.raises(SourceError, match=r"config\.json"):
        describe_checkpoint(str(shutil.copy(path / "small.gguf", tmp_path)))


def test_eval_of_the_file_is_that_of_the_same_grid_in_safetensors(run: tuple[Any, Path], text: Path) -> None:
    scores = [
        evaluate_checkpoint(str(run[1] / name), text=str(text), window=64, windows=2)
        for name in ("gguf", "compressed-tensors")
    ]
    assert scores[0].ppl == scores[1].ppl


def test_conversion_gives_the_bytes_of_the_run(run: tuple[Any, Path], tmp_path: Path) -> None:
    out = run[1]
    found = convert_checkpoint(str(out / "gptq"), "gguf", str(tmp_path / "small"))
    assert found.tensors == len(open_gguf(out / "gguf").tensors)
    assert (tmp_path / "small" / "small.gguf").read_bytes() == (out / "gguf" / "small.gguf").read_bytes()


def test_an_asymmetric_run_chooses_scales_whose_minima_are_exact(tiny_llama: Path, tmp_path: Path) -> None:
    recipe = Recipe(
        model=str(tiny_llama), output=str(tmp_path / "run"), method="rtn", bits=4, group_size=32, symmetric=False,
        token_weights="none", formats=("compressed-tensors", "gguf"),
    )  # fmt: skip
    plan = make_plan(recipe)
    assert {spec.exact_minima for spec in plan.specs.values()} == {True} and plan.bits_per_weight == 5.0
    said = "scales have 7 significant bits, so that the minima -zero * scale which gguf stores in float16 are exact"
    assert said in plan.notes
    assert list(quantize(recipe, plan))
    packed, blocks = open_any(tmp_path / "run" / "compressed-tensors"), open_gguf(tmp_path / "run" / "gguf")
    sites = [key for key in blocks.keys() if blocks.is_packed(key)]  # noqa: SIM118
    assert len(sites) == 14 and {blocks.tensors[key].kind for key in sites} == {"Q4_1"}
    assert all(torch.equal(blocks.read(key), packed.read(key)) for key in sites)
    convert_checkpoint(tmp_path / "run" / "compressed-tensors", "gguf", tmp_path / "gguf")
    assert (tmp_path / "gguf" / "gguf.gguf").read_bytes() == (tmp_path / "run" / "gguf" / "run.gguf").read_bytes()
    alone = make_plan(recipe.model_copy(update={"formats": ("gptq",), "output": str(tmp_path / "alone")}))
    assert not any(spec.exact_minima for spec in alone.specs.values()) and said not in alone.notes


def test_minima_that_float16_cannot_hold_refuse_a_conversion_with_sites_and_counts(
    models: dict[str, Path], tmp_path: Path
) -> None:
    made = Made(models["llama"], lambda name: QuantSpec(4, 32, symmetric=False))
    odd = made.weights["model.layers.0.self_attn.k_proj"]
    odd.scale[:3, 0], odd.zero[:3, 0] = 255 / 2**16, 9
    facts = CheckpointFacts(made.specs, ("lm_head",), has_zero_zero=False)
    (tmp_path / "ct").mkdir()
    write_checkpoint(tmp_path / "ct", made, load_format("compressed-tensors"), facts, 1 << 30)
    with pytest.raises(PlanError) as caught:
        convert_checkpoint(str(tmp_path / "ct"), "gguf", str(tmp_path / "out"))
    assert caught.value.problems[1].startswith("gguf stores minima, -zero * scale, in float16, which cannot hold 3 of ")
    assert caught.value.problems[1].endswith(" exactly, at 1 sites: model.layers.0.self_attn.k_proj (3)")
    assert not (tmp_path / "out").exists() and "gguf" not in caught.value.problems[2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"symmetric": False, "bits": 8}, "gguf: no block type holds 8 bits, group 64, asymmetric exactly"),
        ({"bits": 3}, "gguf: no block type holds 3 bits, group 64, symmetric exactly"),
        ({"bits": 8, "activation_bits": 8, "group_size": -1}, "--format gguf cannot hold quantized activations"),
    ],
)
def test_what_a_file_cannot_hold_is_refused_before_a_run(
    tiny_llama: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    settings = {"bits": 4, "group_size": 64, "method": "rtn", "output": str(tmp_path / "out"), **change}
    with pytest.raises(PlanError) as caught:
        make_plan(Recipe(model=str(tiny_llama), formats=("gguf",), **settings))
    assert [said in problem for problem in caught.value.problems] == [True]
