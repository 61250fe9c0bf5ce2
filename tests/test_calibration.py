"""Calibration tokens: what is read, how it is packed, and what is said when it is too little."""

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from quantforge.calibration import CalibrationSet, build_calibration
from quantforge.errors import CalibrationError, UsageError
from quantforge.recipe import CalibrationRecipe

WORDS = [f"w{i}" for i in range(60)]
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]
PAD, UNK, BOS, EOS = range(4)
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"


def make_tokenizer(*, adds_bos: bool = False, has_bos: bool = True, eos: bool = True) -> Any:
    """One token a word; ids are 4 + position in WORDS, then user, assistant."""
    vocab = {word: i for i, word in enumerate([*SPECIAL, *WORDS, "user", "assistant"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    named = {"pad_token": "<pad>", "unk_token": "<unk>"}
    named |= {"bos_token": "<s>"} if has_bos else {}
    named |= {"eos_token": "</s>"} if eos else {}
    wrap: Any = PreTrainedTokenizerFast
    return wrap(tokenizer_object=tokenizer, model_max_length=16, **named)


def words(count: int, start: int = 0) -> str:
    return " ".join(WORDS[(start + i) % len(WORDS)] for i in range(count))


def ids(count: int, start: int = 0) -> list[int]:
    return [4 + (start + i) % len(WORDS) for i in range(count)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def cut_as_peers_are_given(tokenizer: Any, path: Path, samples: int, seqlen: int) -> torch.Tensor:
    """Tokenize the whole text, cut in order: the calibration tokens other tools are compared on."""
    stream: torch.Tensor = tokenizer(
        path.read_text(encoding="utf-8"), add_special_tokens=False, return_tensors="pt"
    ).input_ids[0]
    return stream[: samples * seqlen].reshape(samples, seqlen)


# ---------------------------------------------------------------------------------------------------- plain text


def test_a_txt_file_is_cut_like_the_tokens_of_its_whole_text(tmp_path: Path) -> None:
    path = tmp_path / "c4.txt"
    path.write_text("\n".join(words(37, start) for start in range(20)), encoding="utf-8")
    got = build_calibration(make_tokenizer(), dataset=str(path), nsamples=7, seqlen=50)
    assert torch.equal(got.tokens, cut_as_peers_are_given(make_tokenizer(), path, 7, 50))
    assert (got.asked, got.delivered, got.seqlen, got.source, got.bos) == (7, 7, 50, "c4.txt", False)


def test_only_a_prefix_of_a_huge_text_is_tokenized_and_the_tokens_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "huge.txt"
    path.write_text((" " * 3000 + words(10)) * 500, encoding="utf-8")  # sparse, so the prefix has to grow
    tokenizer, longest = make_tokenizer(), 0

    class Watch:
        bos_token_id, eos_token_id = BOS, EOS

        def __call__(self, text: str, **options: Any) -> Any:
            nonlocal longest
            longest = max(longest, len(text))
            return tokenizer(text, **options)

    got = build_calibration(Watch(), dataset=str(path), nsamples=4, seqlen=32)  # type: ignore[arg-type]
    assert torch.equal(got.tokens, cut_as_peers_are_given(tokenizer, path, 4, 32))
    assert longest < path.stat().st_size / 4


def test_a_text_longer_than_the_tokenizers_context_warns_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.txt"
    path.write_text(words(500), encoding="utf-8")
    build_calibration(make_tokenizer(), dataset=str(path), nsamples=1, seqlen=400)
    assert caplog.text == ""
    assert "longer than" not in "".join(capfd.readouterr())


def test_the_builtin_text_needs_no_file_and_gives_the_same_tokens_each_time() -> None:
    first = build_calibration(make_tokenizer(), nsamples=3, seqlen=64)
    second = build_calibration(make_tokenizer(), dataset="builtin", nsamples=3, seqlen=64)
    assert first.fingerprint == second.fingerprint
    assert first.source.startswith("builtin (pydoc_data.topics of Python 3.")


def test_the_fingerprint_depends_on_tokens_and_on_shape() -> None:
    tokens = torch.arange(24)
    prints = {CalibrationSet(tokens.reshape(shape), "x", 1, False).fingerprint for shape in ((4, 6), (6, 4), (24, 1))}
    prints.add(CalibrationSet(tokens.flip(0).reshape(4, 6), "x", 1, False).fingerprint)
    assert len(prints) == 4
    known = CalibrationSet(torch.tensor([[1, 2]]), "x", 1, False).fingerprint
    assert known == hashlib.sha256(b"1x2:" + struct.pack("<2q", 1, 2)).hexdigest()


# ------------------------------------------------------------------------------------------- rows and documents


def test_rows_are_joined_with_eos_and_packed_without_padding(tmp_path: Path) -> None:
    """Documents shorter and longer than a sequence alike fill sequences; no token is a pad."""
    path = write_rows(tmp_path / "a.jsonl", [{"text": words(n, 5 * n)} for n in (3, 30, 1, 14)])
    got = build_calibration(make_tokenizer(), dataset=path, nsamples=9, seqlen=8)
    stream = [*ids(3, 15), EOS, *ids(30, 150), EOS, *ids(1, 5), EOS, *ids(14, 70)]
    assert got.tokens.flatten().tolist() == stream[:48]
    assert got.delivered == 6
    assert not (got.tokens == PAD).any()


def test_rows_that_are_all_longer_than_a_sequence_are_split_not_skipped(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": words(100)}] * 3)
    assert build_calibration(make_tokenizer(), dataset=path, nsamples=37, seqlen=8).delivered == 37


def test_a_tokenizer_without_eos_joins_documents_with_nothing_and_says_so(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": words(5)}, {"text": words(5, 20)}])
    got = build_calibration(make_tokenizer(eos=False), dataset=path, nsamples=1, seqlen=10)
    assert got.tokens[0].tolist() == ids(5) + ids(5, 20)
    assert any("nothing between them" in note for note in got.notes)


def test_empty_rows_are_skipped_and_counted(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": ""}, {"text": words(4)}, {"text": " \n"}, {"text": None}, {"text": words(4)}]
    got = build_calibration(make_tokenizer(), dataset=write_rows(tmp_path / "a.jsonl", rows), nsamples=1, seqlen=9)
    assert got.tokens[0].tolist() == [*ids(4), EOS, *ids(4)]
    assert "3 empty documents were skipped" in got.notes


def test_every_kind_of_file_with_the_same_rows_gives_the_same_tokens(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"id": n, "text": words(20, n)} for n in range(5)]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(str(tmp_path / "a.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    write_rows(tmp_path / "lines.json", rows)
    (tmp_path / "folder").mkdir()
    write_rows(tmp_path / "folder" / "1.jsonl", rows[:2])
    write_rows(tmp_path / "folder" / "2.jsonl", rows[2:])
    names = ("a.parquet", "saved", "splits", "a.json", "lines.json", "folder")
    sets = [build_calibration(make_tokenizer(), dataset=str(tmp_path / n), nsamples=13, seqlen=8) for n in names]
    stream = [token for n in range(5) for token in [*ids(20, n), EOS]][:-1]
    for name, got in zip(names, sets, strict=True):
        assert got.tokens.flatten().tolist() == stream[:104], name
    with pytest.raises(CalibrationError, match="splits found: train, test; set --split"):
        build_calibration(make_tokenizer(), dataset=str(tmp_path / "splits"), split="dev", nsamples=1, seqlen=8)


def test_messages_are_rendered_with_the_chat_template_and_bos_is_not_doubled(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "w0 w1"}, {"role": "assistant", "content": "w2"}]
    path = write_rows(tmp_path / "chat.jsonl", [{"messages": chat}] * 2)
    tokenizer = make_tokenizer(adds_bos=True)
    with pytest.raises(CalibrationError, match=r"line 1 holds messages, and this tokenizer has no chat template"):
        build_calibration(tokenizer, dataset=path, nsamples=1, seqlen=6)
    tokenizer.chat_template = TEMPLATE
    user, assistant = 4 + len(WORDS), 5 + len(WORDS)
    document = [BOS, user, 4, 5, assistant, 6]
    got = build_calibration(tokenizer, dataset=path, nsamples=2, seqlen=6)
    assert got.tokens.tolist() == [document, [BOS, EOS, *document[:4]]]
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(CalibrationError, match="the chat template refuses these messages: roles must alternate"):
        build_calibration(tokenizer, dataset=path, nsamples=2, seqlen=6)


# ---------------------------------------------------------------------------------------------------- BOS policy


@pytest.mark.parametrize(
    ("adds_bos", "policy", "begins"),
    [(True, "auto", True), (False, "auto", False), (False, "always", True), (True, "never", False)],
)
def test_the_bos_policy_decides_how_each_sequence_begins_and_is_noted(
    tmp_path: Path, adds_bos: bool, policy: str, begins: bool
) -> None:
    path = tmp_path / "a.txt"
    path.write_text(words(40), encoding="utf-8")
    got = build_calibration(make_tokenizer(adds_bos=adds_bos), dataset=str(path), nsamples=3, seqlen=8, bos=policy)
    step, front = (7, [BOS]) if begins else (8, [])
    assert got.tokens.tolist() == [front + ids(step, step * i) for i in range(3)]
    assert got.bos is begins
    note = (
        f"each sequence begins with BOS (token {BOS}): --bos {policy}"
        if begins
        else f"no BOS is added to the sequences: --bos {policy}"
    )
    assert any(n.startswith(note) for n in got.notes)


def test_bos_always_without_a_bos_token_is_an_error_and_unknown_policies_are_listed() -> None:
    with pytest.raises(CalibrationError, match="the tokenizer has no BOS token; set --bos auto or --bos never"):
        build_calibration(make_tokenizer(has_bos=False), nsamples=1, seqlen=8, bos="always")
    with pytest.raises(UsageError, match="--bos must be one of auto, always, never; got 'yes'"):
        build_calibration(make_tokenizer(), nsamples=1, seqlen=8, bos="yes")


# ----------------------------------------------------------------------------------------------- asked and delivered


@pytest.mark.parametrize(("asked", "warns"), [(6, False), (7, True), (128, True)])
def test_a_given_text_that_fills_less_than_half_of_the_sequences_asked_for_is_a_warning(
    tmp_path: Path, asked: int, warns: bool
) -> None:
    path = tmp_path / "a.txt"
    path.write_text(words(100), encoding="utf-8")
    got = build_calibration(make_tokenizer(), dataset=str(path), nsamples=asked, seqlen=30)
    assert (got.asked, got.delivered) == (asked, 3)
    note = (
        f"delivered 3 of the {asked} sequences asked for: 1 documents hold 100 tokens, {30 * asked} are needed; "
        "pass a longer --dataset or a smaller --nsamples"
    )
    few = "warning: 90 calibration tokens are few"
    assert (f"warning: {note}" if warns else note) in got.notes
    assert [w[: len(few)] for w in got.warnings] == [f"warning: {note}"[: len(few)]] * warns + [few]
    assert got.to_json()["notes"] == list(got.notes)


@pytest.mark.parametrize("dataset", [None, "builtin"])
def test_the_builtin_text_that_is_too_short_is_a_plain_note(dataset: str | None) -> None:
    got = build_calibration(make_tokenizer(), dataset=dataset, nsamples=10**4, seqlen=512)
    assert 2 * got.delivered < got.asked == 10**4 and got.warnings == ()
    assert any(note.startswith(f"delivered {got.delivered} of the 10000 sequences asked for") for note in got.notes)


def test_enough_tokens_bring_no_warning(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(words(4096), encoding="utf-8")
    got = build_calibration(make_tokenizer(), dataset=str(path), nsamples=2, seqlen=2048)
    assert got.warnings == () and len(got.notes) == 1


def test_a_text_shorter_than_one_sequence_is_an_error_with_counts(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text(words(10), encoding="utf-8")
    expected = "too short for one sequence: 1 documents, 29 characters, 10 tokens found, 64 needed; pass --seqlen 10"
    with pytest.raises(CalibrationError, match=expected):
        build_calibration(make_tokenizer(), dataset=str(path), nsamples=1, seqlen=64)


def test_seqlen_is_the_recipes_by_default_and_capped_by_the_model(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(words(5000), encoding="utf-8")
    got = build_calibration(make_tokenizer(), dataset=str(path), max_position=32768)
    assert (got.seqlen, got.asked, got.delivered) == (512, 128, 9)
    assert (got.asked, got.seqlen) == (CalibrationRecipe().nsamples, CalibrationRecipe().seqlen)
    capped = build_calibration(make_tokenizer(), dataset=str(path), max_position=256)
    assert capped.seqlen == 256
    assert capped.notes[0] == "--seqlen 512 is capped to 256, the longest sequence the model's config allows"


# -------------------------------------------------------------------------------------------------------- refusals


def refusal(dataset: str | Path, **options: Any) -> str:
    with pytest.raises(CalibrationError) as caught:
        build_calibration(make_tokenizer(), dataset=str(dataset), nsamples=1, seqlen=4, **options)
    return str(caught.value)


def test_a_missing_column_names_the_columns_found_and_the_flag(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"id": 1, "body": words(20)}])
    assert refusal(path) == "a.jsonl line 1 has no column 'text'; columns found: id, body; set --column to one of them"
    assert "has no column 'nope'" in refusal(path, column="nope")
    assert build_calibration(make_tokenizer(), dataset=path, column="body", nsamples=1, seqlen=4).delivered == 1
    assert "column 'id' of a.jsonl line 1 holds int, neither text nor messages" in refusal(path, column="id")
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"id": 1, "body": "x"}]).to_parquet(str(tmp_path / "a.parquet"))
    assert "a.parquet row 0 has no column 'text'; columns found: id, body" in refusal(tmp_path / "a.parquet")


def test_files_that_cannot_be_read_are_refused_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    assert "latin.txt is not UTF-8 text: byte 0xe9" in refusal(tmp_path / "latin.txt")
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    assert "latin.jsonl is not UTF-8 text: byte 0xe9" in refusal(tmp_path / "latin.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"text": "w1"}\n\n{"text": \n')
    assert refusal(tmp_path / "bad.jsonl").startswith("bad.jsonl line 3 is not JSON: Expecting value")
    (tmp_path / "list.jsonl").write_text('["w1"]\n')
    assert "list.jsonl line 1 holds list; each line must be an object" in refusal(tmp_path / "list.jsonl")
    (tmp_path / "bad.json").write_text('[{"text": "w1"},\n oops]')
    assert "bad.json line 2 is not JSON" in refusal(tmp_path / "bad.json")
    (tmp_path / "half.jsonl").write_text('{"text": "w1 \\ud800 w2"}\n')
    assert "half a surrogate pair is not text" in refusal(tmp_path / "half.jsonl")
    (tmp_path / "a.csv").write_text("text\nw1\n")
    assert "a.csv: unknown extension '.csv'; --dataset reads .txt, .raw, .jsonl" in refusal(tmp_path / "a.csv")
    pytest.importorskip("pyarrow")
    (tmp_path / "bad.parquet").write_bytes(b"not parquet at all")
    assert "bad.parquet cannot be read as parquet" in refusal(tmp_path / "bad.parquet")


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere.txt").startswith("no such file or folder: ")
    (tmp_path / "empty.txt").write_text(" \n")
    assert refusal(tmp_path / "empty.txt").startswith("empty.txt: no text at all (1 empty documents)")
    (tmp_path / "empty.jsonl").write_text("")
    assert refusal(tmp_path / "empty.jsonl").startswith("empty.jsonl: no text at all (0 empty documents)")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.md").write_text("x")
    assert "holds no file that can be read" in refusal(tmp_path / "folder")
    assert "files found: notes.md" in refusal(tmp_path / "folder")


def test_a_hub_id_that_cannot_be_reached_says_how_to_pass_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    message = refusal("no-such-owner/no-such-data")
    assert "the hub could not be reached (HF_HUB_OFFLINE is set and it is not in the cache)" in message
    assert "--dataset FILE (.txt, .raw, .jsonl, .json, .parquet), or --dataset builtin" in message


def test_a_hub_data_set_is_streamed_by_split_and_subset(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    calls = []

    def load(path: str, **options: Any) -> list[dict[str, str]]:
        calls.append((path, options))
        return [{"text": words(20)}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    got = build_calibration(make_tokenizer(), dataset="owner/data", subset="en", split="valid", nsamples=1, seqlen=8)
    assert calls == [("owner/data", {"name": "en", "split": "valid", "streaming": True})]
    assert got.source == "owner/data, split valid, subset en"


@pytest.mark.parametrize(("nsamples", "seqlen"), [(0, 8), (1, 1)])
def test_counts_that_make_no_sense_are_usage_errors(nsamples: int, seqlen: int) -> None:
    with pytest.raises(UsageError, match="--nsamples must be at least 1 and --seqlen at least 2"):
        build_calibration(make_tokenizer(), nsamples=nsamples, seqlen=seqlen)


def test_real_c4_text_is_cut_like_the_tokens_of_its_whole_text() -> None:
    shared = Path(os.environ.get("QUANTFORGE_SHARED") or Path(__file__).parents[2] / "shared")
    path = shared / "data" / "c4" / "c4.calib.txt"
    if not path.is_file():
        pytest.skip("no C4 text; set QUANTFORGE_SHARED to the folder that holds data/")
    got = build_calibration(make_tokenizer(), dataset=str(path), nsamples=16, seqlen=128)
    assert torch.equal(got.tokens, cut_as_peers_are_given(make_tokenizer(), path, 16, 128))
