"""Write the docstrings of a fixed list of standard library modules as one text: English prose every machine has.

    python scripts/stdlib_text.py OUT

It is no benchmark anybody else uses, and differs a little between Python versions; good for comparing a model with its
quantized self on a machine that has nothing better.
"""

import ast
import inspect
import sys
import sysconfig
from pathlib import Path

MODULES = (
    "argparse ast calendar cmd codecs collections/__init__ configparser contextlib csv dataclasses datetime decimal "
    "difflib doctest email/message enum fractions functools heapq inspect ipaddress logging/__init__ mailbox optparse "
    "pathlib pickle pprint random shutil socket statistics string subprocess tarfile tempfile textwrap threading "
    "turtle typing unittest/case unittest/mock urllib/request uuid weakref xml/dom/minidom zipfile"
)
SMALLEST = 200  # characters; shorter docstrings are mostly signatures


def docstrings(file: Path) -> list[str]:
    """The longer docstrings of a source file, in order, without importing it."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    texts = [ast.get_docstring(node, clean=False) or "" for node in nodes]
    return [inspect.cleandoc(text) for text in texts if len(text) >= SMALLEST]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/stdlib_text.py OUT")
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [library / f"{name}.py" for name in MODULES.split()]
    texts = [text for file in files if file.is_file() for text in docstrings(file)]
    Path(sys.argv[1]).write_text("\n\n".join(texts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
