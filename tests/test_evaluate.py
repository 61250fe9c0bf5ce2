"""Windows of the classic protocol, and perplexity and divergence against values computed by hand."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from quantforge.errors import CalibrationError, NumericsError, QuantforgeError, UsageError
from quantforge.evaluate import divergence
from quantforge.evaluate.divergence import evaluate_windows
from quantforge.evaluate.protocol import (
    Windows,
    build_windows,
    load_dataset_rows,
    load_rows,
    parse_dataset,
    split_rows,
    spread,
)

BOS = 1


def make_tokenizer(*, adds_bos: bool = False) -> Any:
    """Bytes as tokens: id 2 + byte, so that a text and its tokens can be compared exactly."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<unk>": 0, "<s>": BOS} | {character: 2 + i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    wrap: Any = PreTrainedTokenizerFast
    return wrap(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>", model_max_length=8)


def plain_ids(text: str) -> list[int]:
    ids: list[int] = make_tokenizer()(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


# ------------------------------------------------------------------------------------------------------- protocol

FRAGMENT = " \n = Robert Boulter = \n \n Robert Boulter is an actor . \n\t\n = = Career = = \n"


def test_rows_of_a_wikitext_fragment_join_to_the_classic_string(tmp_path: Path) -> None:
    path = tmp_path / "wiki.test.raw"
    path.write_text(FRAGMENT, encoding="utf-8")
    rows = load_rows(path)
    assert rows == ["", " = Robert Boulter = \n", "", " Robert Boulter is an actor . \n", "", " = = Career = = \n"]
    joined = "\n\n = Robert Boulter = \n\n\n\n\n Robert Boulter is an actor . \n\n\n\n\n = = Career = = \n"
    got = build_windows(rows, make_tokenizer(), source="wiki", window=len(joined))
    assert got.tokens[0].tolist() == plain_ids(joined)


def test_rows_end_at_newlines_only_and_a_last_line_may_lack_its_own() -> None:
    assert split_rows("a\x0bb\u2028c\x85\nd") == ["a\x0bb\u2028c\x85\n", "d"]
    assert split_rows("\u00a0\n\nx\n") == ["", "", "x\n"]
    assert split_rows("") == []


def test_windows_are_cut_in_order_without_overlap_and_the_tail_is_dropped() -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    got = build_windows([text], make_tokenizer(), source="alphabet", window=8)
    assert got.tokens.flatten().tolist() == plain_ids(text)[:24]
    assert (got.indices, got.total, got.count, got.window) == ((0, 1, 2), 3, 3, 8)
    assert got.protocol == (
        "classic-ppl/8 (rows joined by \\n\\n, one tokenization, non-overlapping, tail dropped, BOS none, "
        "3 of 3 windows)"
    )


def test_n_windows_are_spread_evenly_over_those_there_are() -> None:
    assert spread(141, 16) == (0, 8, 17, 26, 35, 44, 52, 61, 70, 79, 88, 96, 105, 114, 123, 132)
    assert spread(5, 2) == (0, 2)
    assert spread(3, 7) == (0, 1, 2)
    text = "".join(chr(33 + i) for i in range(80))
    got = build_windows([text], make_tokenizer(), source="x", window=8, windows=4)
    assert got.indices == (0, 2, 5, 7)
    assert got.tokens.tolist() == [plain_ids(text)[8 * i : 8 * i + 8] for i in got.indices]
    assert "4 of 10 windows" in got.protocol and got.notes == ()


def test_more_windows_than_there_are_means_all_with_a_note() -> None:
    got = build_windows(["x" * 80], make_tokenizer(), source="x", window=8, windows=64)
    assert got.count == 10 and "10 of 10 windows" in got.protocol
    assert got.notes == ("--windows 64: the text has 10; all are scored",)


@pytest.mark.parametrize(
    ("adds_bos", "policy", "begins"),
    [(True, "auto", True), (False, "auto", False), (False, "always", True), (True, "never", False)],
)
def test_bos_stands_once_at_the_start_of_the_stream_and_in_the_name(adds_bos: bool, policy: str, begins: bool) -> None:
    text = "abcdefghijklmnop"
    got = build_windows([text], make_tokenizer(adds_bos=adds_bos), source="x", window=8, bos=policy)
    stream = ([BOS] if begins else []) + plain_ids(text)
    assert got.tokens.flatten().tolist() == stream[:16]
    assert f"BOS {'at the start' if begins else 'none'}, 2 of 2 windows" in got.protocol


def test_a_text_shorter_than_one_window_is_an_error_with_the_numbers() -> None:
    expected = "short: 2 rows, 6 characters, 6 tokens: shorter than one window of 2048; set --window 6 or less"
    with pytest.raises(CalibrationError, match=expected):
        build_windows(["ab", "cd"], make_tokenizer(), source="short")
    with pytest.raises(UsageError, match="--window must be at least 2 and --windows at least 1"):
        build_windows(["ab"], make_tokenizer(), source="short", windows=0)


def test_text_that_is_no_text_file_is_refused_with_the_flag(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="no such file"):
        load_rows(tmp_path / "nowhere.raw")
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(
        CalibrationError, match=r"unknown extension '\.jsonl'; --text reads \.txt, \.raw; use --dataset"
    ):
        load_rows(tmp_path / "a.jsonl")


def test_rows_of_a_data_set_are_the_values_of_its_column_empty_ones_too(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"page": row}) + "\n" for row in split_rows(FRAGMENT)))
    assert load_dataset_rows(str(path), column="page") == split_rows(FRAGMENT)
    (tmp_path / "wiki.raw").write_text(FRAGMENT)
    assert load_dataset_rows(str(tmp_path / "wiki.raw")) == split_rows(FRAGMENT)
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    with pytest.raises(CalibrationError, match="line 1 holds messages; perplexity needs plain text; set --column"):
        load_dataset_rows(str(path))


def test_a_data_set_is_written_as_id_subset_split(tmp_path: Path) -> None:
    assert parse_dataset("wikitext") == ("wikitext", None, None)
    assert parse_dataset("Salesforce/wikitext:wikitext-2-raw-v1") == ("Salesforce/wikitext", "wikitext-2-raw-v1", None)
    assert parse_dataset("a/b:c:validation") == ("a/b", "c", "validation")
    assert parse_dataset("a/b::validation") == ("a/b", None, "validation")
    with pytest.raises(UsageError, match="write ID, ID:subset or ID:subset:split"):
        parse_dataset("a:b:c:d")


def test_the_standard_wikitext_file_has_4358_rows() -> None:
    shared = Path(os.environ.get("QUANTFORGE_SHARED") or Path(__file__).parents[2] / "shared")
    path = shared / "data" / "wikitext-2-raw" / "wiki.test.raw"
    if not path.is_file():
        pytest.skip("no WikiText; set QUANTFORGE_SHARED to the folder that holds data/")
    rows = load_rows(path)
    assert len(rows) == 4358
    assert rows[:3] == ["", " = Robert Boulter = \n", ""]


# ------------------------------------------------------------------------------------------------------ divergence


class Table:
    """A model that was asked everything already."""

    def __init__(self, *windows: torch.Tensor) -> None:
        self.windows = windows

    def logits(self, index: int) -> torch.Tensor:
        return self.windows[index]


def make_windows(tokens: list[list[int]], indices: tuple[int, ...] | None = None) -> Windows:
    indices = indices or tuple(range(len(tokens)))
    return Windows(torch.tensor(tokens), indices, max(indices) + 1, "classic-ppl/test", "a text")


def log_softmax(row: list[float]) -> list[float]:
    top = max(row)
    norm = top + math.log(math.fsum(math.exp(x - top) for x in row))
    return [x - norm for x in row]


def brute_force(windows: Windows, model: Table, reference: Table) -> list[list[tuple[float, float, float, bool]]]:
    """(nll, reference nll, KL, same top) of each prediction, in Python floats, one at a time."""
    result = []
    for w in range(windows.count):
        tokens = windows.tokens[w].tolist()
        scores = []
        for position in range(len(tokens) - 1):
            p = log_softmax(model.windows[w][position].tolist())
            r = log_softmax(reference.windows[w][position].tolist())
            kl = math.fsum(math.exp(a) * (a - b) for a, b in zip(r, p, strict=True))
            target = tokens[position + 1]
            scores.append((-p[target], -r[target], kl, p.index(max(p)) == r.index(max(r))))
        result.append(scores)
    return result


def standard_error(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


def random_case(windows: int = 3, window: int = 9, vocab: int = 11) -> tuple[Windows, Table, Table]:
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab, (windows, window), generator=random).tolist()
    logits = [4 * torch.randn(window, vocab, generator=random) for _ in range(windows)]
    other = [x + torch.randn(window, vocab, generator=random) for x in logits]
    return make_windows(tokens), Table(*other), Table(*logits)


def test_perplexity_of_a_two_token_vocabulary_is_the_value_computed_by_hand() -> None:
    """p(1) = 3/4, 1/2, 1/4 in turn, and the targets are 1, 0, 1: ppl = (4/3 * 2 * 4) ** (1/3)."""
    logits = torch.tensor([[0.0, math.log(3)], [5.0, 5.0], [math.log(3), 0.0], [9.0, -9.0]])
    got = evaluate_windows(make_windows([[0, 1, 0, 1]]), Table(logits))
    assert got.ppl == pytest.approx((4 / 3 * 2 * 4) ** (1 / 3), rel=1e-7)
    assert (got.predictions, got.windows, got.divergence, got.nll_se_window) == (3, 1, None, None)


def test_kl_of_a_two_token_vocabulary_is_the_value_computed_by_hand() -> None:
    """Reference (3/4, 1/4) against (1/2, 1/2): KL = 3/4 ln 3/2 + 1/4 ln 1/2, not the other way round."""
    reference = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]])
    got = evaluate_windows(make_windows([[0, 0]]), Table(torch.zeros(2, 2)), Table(reference)).divergence
    assert got is not None
    assert got.kl == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-7)
    assert got.ppl_ratio == pytest.approx(2 * 3 / 4, rel=1e-7)
    assert got.kl_se is None and got.kl_se_window is None


@pytest.mark.parametrize("chunk_values", [1, 33, 1 << 23])
def test_every_number_equals_a_brute_force_in_python_floats(chunk_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "_CHUNK_VALUES", chunk_values)
    windows, model, reference = random_case()
    scores = brute_force(windows, model, reference)
    flat = [s for w in scores for s in w]
    nll, ref, kl, same = (list(column) for column in zip(*flat, strict=True))
    mean = [math.fsum(values) / len(values) for values in (nll, ref, kl)]
    per_window = [[math.fsum(column) / len(column) for column in zip(*w, strict=True)] for w in scores]
    got = evaluate_windows(windows, model, reference)
    d = got.divergence
    assert d is not None

    def close(value: float) -> Any:
        return pytest.approx(value, rel=1e-12, abs=1e-14)

    assert got.predictions == len(flat) == 24
    assert got.nll == close(mean[0])
    assert got.ppl == close(math.exp(mean[0]))
    assert got.nll_se == close(standard_error(nll))
    assert got.nll_se_window == close(standard_error([w[0] for w in per_window]))
    assert got.ppl_se == close(got.ppl * max(got.nll_se or 0, got.nll_se_window or 0))
    assert d.reference_ppl == close(math.exp(mean[1]))
    assert d.kl == close(mean[2])
    assert d.kl_se == close(standard_error(kl))
    assert d.kl_se_window == close(standard_error([w[2] for w in per_window]))
    assert d.kl_max == d.kl_p99 == close(max(kl))
    top1 = sum(same) / 24
    assert 0 < top1 < 1
    assert d.top1 == close(top1)
    assert d.top1_se == close(math.sqrt(top1 * (1 - top1) / 24))
    assert d.ppl_ratio == close(math.exp(mean[0] - mean[1]))
    paired = standard_error([a - b for a, b in zip(nll, ref, strict=True)])
    clustered = standard_error([w[0] - w[1] for w in per_window])
    assert d.ppl_ratio_se == close(d.ppl_ratio * max(paired, clustered))


def test_equal_logits_have_a_divergence_of_exactly_zero_however_large() -> None:
    windows, model, _ = random_case(window=20, vocab=300)
    wild = Table(*(1e4 * logits for logits in model.windows))
    got = evaluate_windows(windows, wild, wild).divergence
    assert got is not None
    assert (got.kl, got.kl_max, got.kl_p99, got.kl_se, got.top1, got.ppl_ratio) == (0, 0, 0, 0, 1, 1)


def test_kl_of_nearly_equal_logits_is_never_negative_beyond_rounding() -> None:
    windows, model, _ = random_case(window=40, vocab=5000)
    near = Table(*(logits + 1e-6 * torch.randn_like(logits) for logits in model.windows))
    got = evaluate_windows(windows, near, model).divergence
    assert got is not None
    assert -1e-15 < got.kl < 1e-11


def test_the_99th_percentile_is_the_nearest_rank() -> None:
    """Token i has a KL that grows with i; of 200 the 198th is the 99th percentile."""
    logits = torch.zeros(201, 2)
    logits[:, 0] = torch.arange(201) / 50
    got = evaluate_windows(make_windows([[0] * 201]), Table(logits), Table(torch.zeros(201, 2))).divergence
    assert got is not None
    expected = [math.log(math.cosh(i / 100)) for i in range(200)]
    assert got.kl_p99 == pytest.approx(expected[197], rel=1e-6)
    assert got.kl_max == pytest.approx(expected[199], rel=1e-6)


def test_the_window_error_sees_the_correlation_that_the_token_error_does_not() -> None:
    """Windows that differ as a whole: two of KL 0 and two of the same KL throughout."""
    apart = torch.tensor([[2.0, 0.0]]).repeat(100, 1)
    same = torch.zeros(100, 2)
    windows = make_windows([[0] * 100] * 4)
    got = evaluate_windows(windows, Table(apart, same, apart, same), Table(*[same] * 4)).divergence
    assert got is not None and got.kl_se is not None and got.kl_se_window is not None
    assert got.kl_se_window == pytest.approx(got.kl / math.sqrt(3), rel=1e-9)
    assert got.kl_se_window > 10 * got.kl_se


def test_the_last_logits_of_a_window_predict_nothing() -> None:
    windows, model, reference = random_case()
    first = evaluate_windows(windows, model, reference)
    for logits in model.windows:
        logits[-1] = math.nan
    assert evaluate_windows(windows, model, reference) == first


def test_logits_that_are_not_finite_name_the_window_and_the_model() -> None:
    windows, model, reference = random_case()
    windows = make_windows(windows.tokens.tolist(), (0, 47, 94))
    model.windows[1][3, 5] = math.nan
    expected = "the model, window 47 of a text: 1 logits are not finite, the first for position 3, token 5"
    with pytest.raises(NumericsError, match=expected):
        evaluate_windows(windows, model, reference)
    with pytest.raises(NumericsError, match="the reference, window 47"):
        evaluate_windows(windows, reference, model)
    reference.windows[2][0, 0] = -math.inf
    with pytest.raises(NumericsError, match="the model, window 94 of a text: 1 logits"):
        evaluate_windows(windows, reference)


def test_vocabularies_that_differ_are_an_error_with_both_sizes() -> None:
    windows = make_windows([[0, 1, 2]])
    with pytest.raises(QuantforgeError, match="vocabularies differ: 5 logits from the model, 8 from the reference"):
        evaluate_windows(windows, Table(torch.zeros(3, 5)), Table(torch.zeros(3, 8)))


def test_logits_that_do_not_fit_the_window_are_an_error() -> None:
    windows = make_windows([[0, 1, 7]])
    with pytest.raises(QuantforgeError, match=r"logits are \[2, 8\]; expected \[3, vocab\]"):
        evaluate_windows(windows, Table(torch.zeros(2, 8)))
    with pytest.raises(QuantforgeError, match="the text holds token 7, but there are 5 logits"):
        evaluate_windows(windows, Table(torch.zeros(3, 5)))


def test_progress_is_told_after_each_window_and_the_result_is_json_with_its_protocol() -> None:
    windows, model, reference = random_case()
    told: list[tuple[int, int]] = []
    got = evaluate_windows(windows, model, reference, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]
    data = json.loads(json.dumps(got.to_json()))
    assert data["protocol"] == "classic-ppl/test" and data["source"] == "a text"
    assert got.divergence is not None and data["divergence"]["kl"] == got.divergence.kl


def test_a_perplexity_beyond_the_range_of_a_float_is_infinite() -> None:
    logits = torch.tensor([[1e4, 0.0], [0.0, 0.0]])
    assert evaluate_windows(make_windows([[0, 1]]), Table(logits)).ppl == math.inf
