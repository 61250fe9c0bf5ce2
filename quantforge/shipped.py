"""The recipes that come with the package, under names such as ``w4a16``."""

import difflib
from importlib.resources import files

SUFFIX = ".yaml"


def shipped_recipes() -> dict[str, str]:
    """The YAML of each shipped recipe, by its name, sorted."""
    found = (file for file in (files("quantforge") / "recipes").iterdir() if file.name.endswith(SUFFIX))
    return dict(sorted((file.name.removesuffix(SUFFIX), file.read_text(encoding="utf-8")) for file in found))


def summary_of(text: str) -> str:
    """The first line of a recipe, a comment that says what it is for."""
    return text.partition("\n")[0].removeprefix("#").strip()


def suggestion(wanted: str) -> str:
    """``did you mean w4a16? shipped recipes: ...``, for a name that is none; folder and suffix do not count."""
    known = list(shipped_recipes())
    stem = wanted.replace("\\", "/").rpartition("/")[2].removesuffix(SUFFIX).lower()
    close = difflib.get_close_matches(stem, known, n=1)
    return f"{f'did you mean {close[0]}? ' if close else ''}shipped recipes: {', '.join(known)}"
