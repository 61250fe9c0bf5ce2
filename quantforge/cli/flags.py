"""Flags: those of other tools are read as ours, and help shows them in groups."""

from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand

from quantforge.errors import UsageError
from quantforge.synonyms import SWITCHES, SYNONYMS, WITHOUT_COUNTERPART

NOTES = "quantforge.notes"
"""Where `Context.meta` keeps remarks about how flags were read."""

_PLURAL = {"formats": "format"}


class FlagCommand(TyperCommand):
    """A command that takes flags by their names in other tools, and whose help has a section for each help panel."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Rewrite what other tools call a flag, with a remark in `ctx.meta`; then parse as usual.

        Raises UsageError for a flag under two names, and for one that has no counterpart here.
        """
        notes: list[str] = ctx.meta.setdefault(NOTES, [])
        own = {name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)}
        return super().parse_args(ctx, list(_rewritten(args, own, notes)))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, then the options of each panel, in the order in which the first of each is declared."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            default = "Arguments" if param.param_type_name == "argument" else "Other options"
            if (line := param.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(param, "rich_help_panel", None) or default, []).append(line)
        for title, lines in sections.items():
            with formatter.section(title):
                formatter.write_dl(lines)


def listed(text: str) -> tuple[str, ...]:
    """The names in a comma list; empty ones are left out."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _rewritten(args: list[str], own: set[str], notes: list[str]) -> Iterator[str]:
    """`args` with the flags in `own` alone."""
    written: dict[str, str] = {}
    for number, arg in enumerate(args):
        if arg == "--":
            yield from args[number:]
            return
        flag, equals, value = arg.partition("=")
        flag, *after = (flag,) if flag in own or not flag.startswith("--") else _ours(flag, own, notes)
        if flag.startswith("--"):
            typed = arg.partition("=")[0].replace("_", "-")
            if written.setdefault(flag, typed) != typed:
                raise UsageError(f"command line: {written[flag]} and {typed} both set {flag.lstrip('-')}; keep one")
        yield flag + equals + value
        yield from after


def _ours(flag: str, own: set[str], notes: list[str]) -> tuple[str, ...]:
    """What `flag` is called here; itself when it is unknown, which the parser then says."""
    dashed = flag.replace("_", "-")
    name = dashed.removeprefix("--").replace("-", "_")
    if dashed in own:
        return (dashed,)
    if name in WITHOUT_COUNTERPART:
        raise UsageError(f"command line: there is no {flag}: {WITHOUT_COUNTERPART[name]}")
    ours = SWITCHES.get(dashed, ())
    if not ours and name in SYNONYMS:
        leaf = SYNONYMS[name].target.rpartition(".")[2]
        target = "--" + _PLURAL.get(leaf, leaf).replace("_", "-")
        ours = (target,) if target in own and not SYNONYMS[name].values else ()
    if not ours:
        return (flag,)
    notes.append(f"command line: {flag} is read as {' '.join(ours)}")
    return ours
