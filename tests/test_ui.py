"""What the command line renders, string by string."""

import io

import pytest
from fake_pipeline import run_of
from rich.console import Console

from quantforge.cli.runview import duration, gathered, megabytes
from quantforge.cli.ui import Ui


def test_on_a_terminal_a_bar_counts_layers_above_the_same_lines() -> None:
    err = Console(file=io.StringIO(), force_terminal=True, width=100, markup=False, highlight=False)
    ui = Ui(err=err)
    report = ui.follow(run_of())
    shown = err.file.getvalue()  # type: ignore[attr-defined]
    assert report.method == "gptq"
    assert "layer 2/2  loss 0.400 x RTN  4.250 bits/weight  3.0 s" in shown
    assert "2/2" in shown and "ETA 0:00" in shown


def test_remarks_that_agree_about_sites_are_one_and_others_stay() -> None:
    remarks = ["a.b: few tokens", "the disk: is slow", "a.c: few tokens", "a.d: dead inputs", "a.e: few tokens"]
    expected = ["a.b and 2 more sites: few tokens", "the disk: is slow", "a.d: dead inputs"]
    assert gathered(remarks) == expected


def test_a_remark_that_is_a_warning_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    ui = Ui()
    ui.notes(["warning: few tokens", "a note", "a note"])
    ui.warn("warning: few tokens")
    assert capsys.readouterr().err == "warning: few tokens\nnote: a note\nwarning: few tokens\n"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (7, "0:07"), (760, "12:40"), (10931, "3:02:11")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_megabyte_is_a_million_bytes() -> None:
    assert megabytes(269_060_552) == "269.1 MB"
