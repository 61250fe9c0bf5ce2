"""Print the live table, format and grid by server, of rows that the scripts beside this one measured.

    python scripts/servers/live_table.py ROWS.json [--into docs/servers.md] [--summary README.md]

With --into the table in that file, between its two marks, is replaced; with --summary that of another file by a short
one: of each server the way of running nearest to us, and no errors. Servers that were not run have what our contracts
say of them, marked as such; a server with a plug-in is called "server + plug-in", and is as the server itself where it
was not run.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MARKS = ("<!-- live table: scripts/servers/live_table.py -->", "<!-- end of the live table -->")
Rows = Sequence[dict[str, Any]]


def cell(rows: Rows, errors: list[str]) -> str:
    """What one server made of one export, measured; adds what it said when it refused to `errors`."""
    parts = []
    for row in rows:
        if row["ours"] is None:
            if row["error"] not in errors:
                errors.append(row["error"])
            text = f"refused ({errors.index(row['error']) + 1})"
        else:
            apart = "" if row["outcome"] == "alike" else "**apart**: "
            text = f"{apart}{row['ours']['best']} of {row['ours']['tokens']}, {row['ours']['mean']:.4f}"
        parts.append(f"{row['arithmetic']}: {text}")
    return "; ".join(parts)


def best(rows: Rows, errors: list[str]) -> str:
    """The measured way of running that came nearest to us, or that there is none."""
    answered = [row for row in rows if row["ours"] is not None]
    if not answered:
        return "refuses"
    return cell([min(answered, key=lambda row: float(row["ours"]["mean"]))], errors).rpartition(",")[0]


def table(rows: Rows, shown: Callable[[Rows, list[str]], str] = cell) -> str:
    """Markdown: the table, versions, and errors; `shown` makes a cell of the rows for it."""
    ran = sorted({row["server"] for row in rows})
    paper = sorted({name for row in rows for name in row["verdicts"]} - set(ran))
    head = ["format", "grid", *(f"{name}, tried" for name in ran), *(f"{name}, on paper" for name in paper)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    errors: list[str] = []
    for file_format, grid in sorted({(row["format"], row["grid"]) for row in rows}):
        these = [row for row in rows if (row["format"], row["grid"]) == (file_format, grid)]
        verdicts = these[0]["verdicts"]
        cells = [file_format, grid]
        for name in ran:
            measured = [row for row in these if row["server"] == name]
            plain, plugged, _ = name.partition(" + ")
            unmeasured = f"as {plain}" if plugged else f"on paper: {verdicts[name] or 'no'}"
            cells.append(shown(measured, errors) if measured else unmeasured)
        cells += [verdicts[name] or "no" for name in paper]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- {name}: {versions(rows, name)}" for name in ran)]
    plain = [error.replace("`", "'") for error in errors]
    lines += ["", *(f"{number}. `{error}`" for number, error in enumerate(plain, 1))] if errors else []
    return "\n".join(lines)


def versions(rows: Rows, server: str) -> str:
    """Every version that its rows were measured with, and on which processors."""
    found: dict[str, set[str]] = {}
    for row in rows:
        if row["server"] == server:
            for name, version in row["versions"].items():
                found.setdefault(name, set()).add(version)
    processors = {f"{row['cpu']['model']} ({' '.join(row['cpu']['flags'])})" for row in rows if row["server"] == server}
    listed = ", ".join(f"{name} {' and '.join(sorted(values))}" for name, values in found.items())
    return f"{listed}; {'; '.join(sorted(processors))}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=Path)
    parser.add_argument("--into", type=Path)
    parser.add_argument("--summary", type=Path)
    asked = parser.parse_args()
    rows = json.loads(asked.rows.read_text())
    if asked.into is None and asked.summary is None:
        print(table(rows))
    for file, shown in ((asked.into, cell), (asked.summary, best)):
        if file is not None:
            before, start, rest = file.read_text().partition(MARKS[0])
            _, end, after = rest.partition(MARKS[1])
            if not (start and end):
                parser.error(f"{file} lacks the lines {MARKS[0]} and {MARKS[1]}")
            file.write_text(f"{before}{start}\n\n{table(rows, shown)}\n\n{end}{after}")


if __name__ == "__main__":
    main()
