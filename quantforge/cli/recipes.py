"""The ``recipes`` verb: the recipes that come with the package."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from quantforge.errors import UsageError

Name = Annotated[str, Argument(metavar="NAME", help="As in `quantforge recipes list`.", show_default=False)]

recipes = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@recipes.callback()
def _root() -> None:
    """Recipes that come with the package: list them, print one, or copy one to change it.

    \b
    Examples:
      quantforge recipes list
      quantforge recipes copy w4a16 ./mine.yaml
      quantforge quantize ./SmolLM2-135M --recipe w4a16-asym
    """


@recipes.command("list", short_help="Names, and what each is for.")
def list_recipes(as_json: Annotated[bool, Option("--json", help="Print everything as JSON.")] = False) -> None:
    """Names of the shipped recipes, their bits and method, and what each is for.

    \b
    Examples:
      quantforge recipes list
      quantforge recipes list --json
    """
    from quantforge.cli.ui import Ui
    from quantforge.reading import recipe_of
    from quantforge.shipped import shipped_recipes

    Ui(as_json=as_json).recipes([(name, text, recipe_of(name, text)) for name, text in shipped_recipes().items()])


@recipes.command("show", short_help="Print one.")
def show(
    name: Name, as_json: Annotated[bool, Option("--json", help="Print it and its settings as JSON.")] = False
) -> None:
    """The YAML of a shipped recipe.

    \b
    Examples:
      quantforge recipes show w4a16
      quantforge recipes show w8a8 --json
    """
    from quantforge.cli.ui import Ui
    from quantforge.reading import recipe_of

    text = _text(name)
    Ui(as_json=as_json).recipe(name, text, recipe_of(name, text))


@recipes.command("copy", short_help="Copy one, to change it.")
def copy(
    name: Name,
    destination: Annotated[
        Path | None, Argument(metavar="[DEST]", help="A file or a directory. [NAME.yaml]", show_default=False)
    ] = None,
) -> None:
    """Write a shipped recipe to a file of yours; nothing is overwritten.

    \b
    Examples:
      quantforge recipes copy w4a16
      quantforge recipes copy w4a16-mixed ./mine.yaml
    """
    text = _text(name)
    path = destination or Path()
    if path.is_dir():
        path = path / f"{name}.yaml"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(f"{path} exists, and nothing is overwritten; name another file") from error
    except FileNotFoundError as error:
        raise UsageError(f"{path.parent} is no directory; make it first") from error

    from quantforge.cli.ui import Ui

    Ui().copied(name, path)


def _text(name: str) -> str:
    from quantforge.shipped import shipped_recipes, suggestion

    text = shipped_recipes().get(name)
    if text is None:
        raise UsageError(f"there is no recipe {name}; {suggestion(name)}")
    return text
