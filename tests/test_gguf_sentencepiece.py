"""SentencePiece vocabularies in GGUF: scores that give the merges again, and what does not fit."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from conftest import SENTENCES

from quantforge.errors import PlanError
from quantforge.formats.gguf.sentencepiece import (
    SPACE,
    is_sentencepiece,
    sentencepiece_problems,
    sentencepiece_scores,
    space_prefix,
)
from quantforge.pipeline.plan import make_plan
from quantforge.pipeline.run import quantize
from quantforge.recipe import Recipe

METASPACE = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
PREPENDED = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, REPLACE]}
TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "A group of columns,  two spaces,   three; 1234 and\na line\tand a tab.",
    "Zo\u00eb: \u00fcber \u4e2d\u6587 \U0001f600!",
    "readbackwritten starts solved </s> after",
    "x",
    "",
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tokenizer.json as transformers makes one of a SentencePiece model: all ways to split each joined token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(SENTENCES * 4, trainers.BpeTrainer(vocab_size=140, show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    joined = [left + right for left, right in learned["merges"]]
    letters = [token for token in learned["vocab"] if token not in joined]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *joined, *letters]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    splits = [(token[:cut], token[cut:]) for token in joined for cut in range(1, len(token))]
    merges = [list(pair) for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
    assert len(merges) > len(joined) > 50
    made = Tokenizer(
        models.BPE(vocabulary, [tuple(pair) for pair in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    made.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", False)
    content: dict[str, Any] = json.loads(made.to_str())
    assert content["pre_tokenizer"] == METASPACE and len(content["model"]["merges"]) == len(merges)
    return content


@pytest.fixture(scope="module")
def model(tokenizer: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer whose embedding has four rows more than there are tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("sentencepiece") / "model"
    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = len(tokenizer["model"]["vocab"]) + 4
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=tokens, max_position_embeddings=64)).save_pretrained(path)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def recipe_of(model: Path, output: Path) -> Recipe:
    return Recipe(
        model=str(model), output=str(output), method="rtn", bits=4, group_size=32, token_weights="none",
        formats=("gguf",),
    )  # fmt: skip


def test_transformers_own_loader_makes_the_same_tokens_of_the_file(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    recipe = recipe_of(model, tmp_path / "out")
    assert list(quantize(recipe, make_plan(recipe)))
    ours = AutoTokenizer.from_pretrained(model)
    (tmp_path / "alone").mkdir()
    (tmp_path / "out" / "out.gguf").rename(tmp_path / "alone" / "out.gguf")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "alone", gguf_file="out.gguf")
    for text in TEXTS:
        assert theirs(text).input_ids == ours(text).input_ids, text
    assert ours("fox \u4e2d").input_ids[0] == 1 and ours("\u4e2d").input_ids[-3:] == [3 + 0xE4, 3 + 0xB8, 3 + 0xAD]
    assert theirs.decode(theirs(TEXTS[1]).input_ids, skip_special_tokens=True) == TEXTS[1]


def test_the_file_says_which_tokens_are_bytes_and_what_is_added(model: Path, tmp_path: Path) -> None:
    recipe = recipe_of(model, tmp_path / "out")
    assert list(quantize(recipe, make_plan(recipe)))
    said = {key: field.contents() for key, field in gguf.GGUFReader(tmp_path / "out" / "out.gguf").fields.items()}
    expected = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False, "tokenizer.ggml.add_space_prefix": True,
    }  # fmt: skip
    assert {key: said.get(key) for key in expected} == expected and "tokenizer.ggml.merges" not in said
    kinds, scores = said["tokenizer.ggml.token_type"], said["tokenizer.ggml.scores"]
    assert kinds[:3] == [2, 3, 3] and kinds[3:259] == [6] * 256 and kinds[259] == 1 and kinds[-4:] == [5] * 4
    assert scores[:259] == [0.0] * 259 and scores[259:263] == [0.0, -1.0, -2.0, -3.0]


def join_by_score(text: str, vocabulary: dict[str, int], scores: dict[str, float]) -> Iterator[int]:
    """llama.cpp's way: the neighbors whose joined token has the highest score, leftmost first."""
    pieces = list(SPACE + text.replace(" ", SPACE))
    while True:
        found = [
            (-scores.get(pieces[at] + pieces[at + 1], 0.0), at)
            for at in range(len(pieces) - 1)
            if pieces[at] + pieces[at + 1] in vocabulary
        ]
        if not found:
            break
        _, at = min(found)
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]
    for piece in pieces:
        known = vocabulary.get(piece)
        yield from [known] if known is not None else (vocabulary[f"<0x{byte:02X}>"] for byte in piece.encode())


def test_joining_by_score_gives_the_tokens_that_the_merges_give(tokenizer: dict[str, Any]) -> None:
    from tokenizers import Tokenizer

    made, vocabulary = Tokenizer.from_str(json.dumps(tokenizer)), tokenizer["model"]["vocab"]
    scores = sentencepiece_scores(tokenizer)
    draw = random.Random(7)
    words = " ".join(SENTENCES).split()
    for _ in range(200):
        picked = [draw.choice((*words, draw.choice(words)[: draw.randint(1, 4)], "\u00e9", "zz")) for _ in range(6)]
        text = draw.choice((" ", "", "  ")).join(picked)
        found = made.encode(text, add_special_tokens=False).ids
        assert list(join_by_score(text, vocabulary, scores)) == found, text


@pytest.mark.parametrize(
    ("normalizer", "before", "prefix"),
    [
        (None, METASPACE, True),
        (None, {**METASPACE, "prepend_scheme": "never"}, False),
        (None, {**METASPACE, "split": True}, None),
        (PREPENDED, None, True),
        (REPLACE, None, False),
        (PREPENDED, METASPACE, None),
        ({"type": "NFKC"}, METASPACE, None),
        ({"type": "NFKC"}, None, None),
        (None, {"type": "Whitespace"}, None),
        (None, None, None),
    ],
)
def test_what_is_done_to_spaces_is_known_by_its_structure(normalizer: Any, before: Any, prefix: bool | None) -> None:
    assert space_prefix({"normalizer": normalizer, "pre_tokenizer": before}) is prefix


def test_merges_without_a_score_are_refused_with_an_example(tokenizer: dict[str, Any]) -> None:
    assert is_sentencepiece(tokenizer) and list(sentencepiece_problems(tokenizer, "t.json")) == []
    model = tokenizer["model"]

    def problems(**changes: Any) -> list[str]:
        return list(sentencepiece_problems({**tokenizer, "model": {**model, **changes}}, "t.json"))

    merges = [tuple(pair) for pair in model["merges"]]
    several = next(pair for pair in merges if sum(a + b == pair[0] + pair[1] for a, b in merges) > 1)
    fewer = [list(pair) for pair in merges if pair != several]
    [said] = problems(merges=fewer)
    assert said == (
        "t.json lacks 1 merges that llama.cpp would make, as it joins any two tokens to a third: such as "
        f"{several[0]!r} and {several[1]!r}"
    )
    [said] = problems(merges=[*fewer, list(several)])
    joined = several[0] + several[1]
    assert said == f"the merges of t.json that give {joined!r} stand apart; llama.cpp has one score for a token"
    [said] = problems(vocab={token: index for token, index in model["vocab"].items() if token != "<0x0A>"})
    assert said == "t.json has byte_fallback, and 1 of 256 bytes are no tokens, such as <0x0A>"
    [said] = problems(ignore_merges=True)
    assert said.startswith("t.json sets ignore_merges of its model")
    assert problems(merges=[f"{left} {right}" for left, right in merges]) == []


def test_a_tokenizer_that_does_not_fit_is_refused_before_a_run(model: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(model, tmp_path / "model")
    content = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "NFKC"}
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(PlanError, match=r"gguf: tokenizer\.json prepares texts otherwise than by writing spaces as"):
        make_plan(recipe_of(tmp_path / "model", tmp_path / "out"))
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(PlanError, match=r"transformers makes one of tokenizer\.model"):
        make_plan(recipe_of(tmp_path / "model", tmp_path / "out"))
