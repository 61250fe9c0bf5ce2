"""What every test shares: no network, few threads, one seed, and tiny checkpoints built from nothing."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"  # before any import of huggingface_hub, which reads it once
threads = "1" if "PYTEST_XDIST_WORKER" in os.environ else "2"  # side by side, one each
os.environ.setdefault("OMP_NUM_THREADS", threads)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
settings.register_profile("quantforge", deadline=None, derandomize=True, database=None)
settings.load_profile("quantforge")

SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "A group of columns shares one scale, and every group has its own.",
    "Round to nearest is a fine place to start, and a poor place to stop.",
    "Twelve layers were read, solved, written and read back.",
)


@pytest.fixture(autouse=True)
def _one_seed() -> Iterator[None]:
    """Tests that draw numbers draw the same ones in any order."""
    import torch

    torch.manual_seed(0)
    yield


def _build_llama(path: Path, *, tied: bool) -> Path:
    """Save a random Llama of 2 layers (hidden 128, intermediate 384, 4 heads, 2 kv heads, vocabulary 256)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1 + tied)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    _build_tokenizer().save_pretrained(path)
    return path


def _build_tokenizer():  # type: ignore[no-untyped-def]
    """A byte-level BPE of at most 256 tokens over printable ASCII; anything else is ``<unk>``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    letters = [*map(chr, range(33, 127)), "Ġ", "Ċ"]  # byte level writes space and newline as the last two
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256, special_tokens=["<s>", "</s>", "<unk>"], initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    assert tokenizer.get_vocab_size() <= 256
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory with its own `lm_head`. Read only: copy it before changing anything."""
    return _build_llama(tmp_path_factory.mktemp("tiny-llama") / "tiny-llama", tied=False)


@pytest.fixture(scope="session")
def tiny_llama_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with `lm_head` tied to the embedding. Read only: copy it before changing anything."""
    return _build_llama(tmp_path_factory.mktemp("tiny-llama-tied") / "tiny-llama-tied", tied=True)


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of GPT-2, whose linear layers are Conv1D and have biases. Read only."""
    from transformers import GPT2Config, GPT2LMHeadModel

    path = tmp_path_factory.mktemp("tiny-gpt2") / "tiny-gpt2"
    GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=1, n_head=2)).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exports of a few kB, rounded to nearest, and their ``source``, all without a tokenizer. Read only."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from quantforge.pipeline.plan import make_plan
    from quantforge.pipeline.run import quantize
    from quantforge.recipe import Recipe

    root = tmp_path_factory.mktemp("tiny-exports")
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(torch.bfloat16).save_pretrained(root / "source")
    exports = {
        "gptq": {"formats": ("gptq",)},
        "gptq-asym": {"formats": ("gptq",), "symmetric": False},
        "sharded": {"formats": ("gptq",), "max_shard_size": "10KB"},
        "packed": {"formats": ("compressed-tensors",), "symmetric": False},
        "w8a8": {"formats": ("compressed-tensors",), "bits": 8, "activation_bits": 8, "group_size": -1},
    }
    for name, own in exports.items():
        fields = {"model": str(root / "source"), "output": str(root / name), "method": "rtn", "group_size": 16}
        recipe = Recipe.model_validate(fields | own)
        assert list(quantize(recipe, make_plan(recipe)))
    return {name: root / name for name in ("source", *exports)}


@pytest.fixture
def take(tiny_exports: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of an export to damage, without its report, as if another tool had written it."""

    def copied(name: str, *, report: bool = False) -> Path:
        path = shutil.copytree(tiny_exports[name], tmp_path / name)
        if not report:
            (path / "quantforge.json").unlink(missing_ok=True)
        return path

    return copied


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text to calibrate on: 6000 words in an order of their own."""
    import torch

    file = tmp_path_factory.mktemp("text") / "calibration.txt"
    words = "layers groups scale column quick brown fox every own place stop start read back solved written".split()
    picks = torch.randint(0, len(words), (6000,), generator=torch.Generator().manual_seed(5)).tolist()
    file.write_text(" ".join(words[pick] for pick in picks))
    return file
