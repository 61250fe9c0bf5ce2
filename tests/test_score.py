"""Scoring a checkpoint: which text is read, and what is in memory while layers run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantforge.errors import UsageError
from quantforge.model.streamed import StreamedPass
from quantforge.pipeline import score
from quantforge.pipeline.score import evaluate_checkpoint

ROWS = ["The quick brown fox jumps over the lazy dog.\n"] * 20


@pytest.fixture
def rows(tmp_path: Path) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"page": row, "text": "other"}) + "\n" for row in ROWS))
    return str(file)


def test_no_outer_weight_of_either_model_is_loaded_while_layers_run(
    tiny_llama: Path, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[StreamedPass] = []
    loaded: list[list[bool]] = []
    original = StreamedPass.run_all

    def run_all(self: StreamedPass, progress: Callable[[int, int], None] | None = None) -> None:
        runs.append(self)

        def watched(done: int, total: int) -> None:
            outer: list[Any] = [run.owner.model.get_input_embeddings().weight for run in runs]  # type: ignore[operator]
            loaded.append([not weight.is_meta for weight in outer])

        original(self, watched)

    monkeypatch.setattr(StreamedPass, "run_all", run_all)
    result = evaluate_checkpoint(
        str(tiny_llama), reference=str(tiny_llama), dataset=rows, column="page", window=32, windows=2
    )
    assert loaded == [[False], [False], [False, False], [False, False]]
    assert result.divergence is not None and (result.divergence.kl, result.divergence.top1) == (0.0, 1.0)


def test_the_column_that_is_asked_for_is_the_text_that_is_scored(tiny_llama: Path, rows: str, tmp_path: Path) -> None:
    (tmp_path / "same.txt").write_text("".join(ROWS))
    by_column = evaluate_checkpoint(str(tiny_llama), dataset=rows, column="page", window=32, windows=2)
    by_text = evaluate_checkpoint(str(tiny_llama), text=str(tmp_path / "same.txt"), window=32, windows=2)
    assert by_column.nll == by_text.nll and by_column.source == rows
    assert by_column.nll != evaluate_checkpoint(str(tiny_llama), dataset=rows, window=32, windows=2).nll


@pytest.mark.parametrize(
    ("asked", "read", "source"),
    [
        ({"dataset": "a/b"}, ("a/b", None, None), "a/b"),
        ({"dataset": "a/b:c:d"}, ("a/b", "c", "d"), "a/b:c:d"),
        ({"dataset": "a/b", "subset": "c", "split": "d"}, ("a/b", "c", "d"), "a/b:c:d"),
        ({"dataset": "a/b:c", "split": "d"}, ("a/b", "c", "d"), "a/b:c:d"),
        ({"dataset": "a/b", "split": "d"}, ("a/b", None, "d"), "a/b::d"),
    ],
)
def test_flags_and_the_short_form_name_the_same_part_of_a_data_set(
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, str],
    read: tuple[str, str | None, str | None],
    source: str,
) -> None:
    calls = []

    def load(name: str, *, subset: str | None, split: str | None, column: str | None) -> list[str]:
        calls.append((name, subset, split))
        return ROWS

    monkeypatch.setattr(score, "load_dataset_rows", load)
    result = evaluate_checkpoint(str(tiny_llama), window=32, windows=1, **asked)  # type: ignore[arg-type]
    assert calls == [read] and result.source == source


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "give exactly one of --text FILE and --dataset ID"),
        ({"text": "a.txt", "dataset": "b"}, "give exactly one of --text FILE and --dataset ID"),
        ({"text": "a.txt", "column": "x", "split": "y"}, "--split, --column: these choose a part of --dataset"),
        ({"dataset": "a:b:c", "split": "d"}, "--split d and --dataset a:b:c disagree; give one of them"),
        ({"dataset": "a:b", "subset": "d"}, "--subset d and --dataset a:b disagree; give one of them"),
    ],
)
def test_a_request_that_contradicts_itself_is_refused_before_any_file_is_opened(
    asked: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        evaluate_checkpoint("no/such/checkpoint", **asked)  # type: ignore[arg-type]
