"""Print the live table, format and grid by server, of rows that the scripts beside this one measured.

    python scripts/servers/live_table.py ROWS.json [--readme README.md]

With --readme the table in that file, between its two marks, is replaced. Servers that were not run have what our
contracts say of them, marked as such; a server with a plug-in is called "server + plug-in", and is as the server itself
where it was not run.
"""

import argparse
import json
from collections.abc import Sequence
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


def table(rows: Rows) -> str:
    """Markdown: the table, versions, and errors."""
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
            cells.append(cell(measured, errors) if measured else unmeasured)
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
    parser.add_argument("--readme", type=Path)
    asked = parser.parse_args()
    text = table(json.loads(asked.rows.read_text()))
    if asked.readme is None:
        print(text)
        return
    before, start, rest = asked.readme.read_text().partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (start and end):
        parser.error(f"{asked.readme} lacks the lines {MARKS[0]} and {MARKS[1]}")
    asked.readme.write_text(f"{before}{start}\n\n{text}\n\n{end}{after}")


if __name__ == "__main__":
    main()
