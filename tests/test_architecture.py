"""The layers of the package hold: who may import whom, which third-party package may be imported where."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "quantforge"
FILES = sorted(PACKAGE.rglob("*.py"))

LEVELS = {
    0: {
        "__init__",
        "errors",
        "extras",
        "spec",
        "patterns",
        "recipe",
        "synonyms",
        "schemes",
        "presets",
        "shipped",
        "registry",
        "report",
        "sizes",
        "rules",
        "reading",
    },
    1: {"quantized", "numerics", "text", "documents"},
    2: {"methods", "transforms", "formats", "readers", "contracts", "kernels"},
    3: {"model", "calibration", "evaluate"},
    4: {"pipeline", "runtime", "integrations"},
    5: {"cli", "transformers", "__main__"},
}
LEVEL_OF = {unit: level for level, units in LEVELS.items() for unit in units}
SHARED = {*LEVELS[0], "quantized", "cli"}  # plain values, which their own level may use too; and what __main__ starts

PLACES = {  # third-party package -> units that may import it; a package not listed may be imported from level 1 up
    "typer": {"cli"},
    "rich": {"cli"},
    "transformers": {"model", "evaluate", "runtime", "integrations"},
    "datasets": {"documents", "calibration", "evaluate"},
    "triton": {"kernels"},
    "vllm": {"integrations"},
    "pydantic": {"recipe", "rules", "reading"},
    "yaml": {"reading"},
}
ONLY_INSIDE_FUNCTIONS = {"triton", "vllm"}
TRITON_SOURCE = PACKAGE / "kernels" / "sources"  # imports triton, and is itself imported inside functions only
VLLM_PARTS = {PACKAGE / "integrations" / "vllm" / name for name in ("kernel.py", "gptq.py")}  # likewise, for vllm


@dataclass(frozen=True)
class Import:
    """`target` is dotted; `deferred` when it stands inside a function."""

    file: Path
    line: int
    target: str
    deferred: bool

    @property
    def unit(self) -> str:
        """The part of the package that imports: a folder, or a file at the top."""
        return unit_of(self.file)

    def __str__(self) -> str:
        return f"{self.file.relative_to(PACKAGE.parent)}:{self.line} imports {self.target}"


def unit_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(file: Path) -> Iterator[Import]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    deferred = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        for target in targets:
            yield Import(file, node.lineno, target, id(node) in deferred)


ALL = [found for file in FILES for found in imports_of(file)]


def inner(found: Import) -> str | None:
    """The unit of this package that is imported, or None."""
    root, _, rest = found.target.partition(".")
    unit = rest.partition(".")[0]
    return None if root != "quantforge" else unit if unit in LEVEL_OF else "__init__"


def test_every_file_belongs_to_a_level() -> None:
    assert {unit_of(file) for file in FILES} <= set(LEVEL_OF)


def test_packages_import_lower_levels_only() -> None:
    wrong = []
    for found in ALL:
        target = inner(found)
        if target is None or target == found.unit or found.unit == "__init__":
            continue  # the package itself imports for type checkers only, and nothing at run time (tested below)
        lower = LEVEL_OF[target] < LEVEL_OF[found.unit]
        beside = LEVEL_OF[target] == LEVEL_OF[found.unit] and target in SHARED
        if not (lower or beside):
            wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


def test_third_party_packages_stay_in_their_places() -> None:
    wrong = [
        str(found)
        for found in ALL
        for place in [PLACES.get(found.target.partition(".")[0])]
        if place is not None and found.unit not in place
    ]
    assert not wrong, "\n".join(wrong)


def test_triton_and_vllm_are_imported_inside_functions_only() -> None:
    starts = [f"{file.parent.relative_to(PACKAGE.parent)}/{file.stem}".replace("/", ".") for file in VLLM_PARTS]
    starts.append("quantforge.kernels.sources")
    wrong = [
        str(found)
        for found in ALL
        if not found.deferred and found.file.parent != TRITON_SOURCE and found.file not in VLLM_PARTS
        if found.target.partition(".")[0] in ONLY_INSIDE_FUNCTIONS or found.target.startswith(tuple(starts))
    ]
    assert not wrong, "\n".join(wrong)


def test_triton_source_stands_alone() -> None:
    wrong = [str(f) for f in ALL if f.file.parent == TRITON_SOURCE and f.target.partition(".")[0] != "triton"]
    assert not wrong, "\n".join(wrong)


def test_values_and_recipe_know_no_torch() -> None:
    heavy = {"torch", "numpy", "safetensors", "transformers", "datasets"}
    wrong = [str(f) for f in ALL if LEVEL_OF[f.unit] == 0 and f.target.partition(".")[0] in heavy]
    assert not wrong, "\n".join(wrong)


def test_readers_share_no_code_with_writers() -> None:
    writing = ("quantforge.formats", "quantforge.numerics.bits", "quantforge.quantized")
    wrong = [
        str(found)
        for found in ALL
        if (found.unit == "readers" or found.file.name == "gguf_file.py")
        and any((found.target + ".").startswith(name + ".") for name in writing)
    ]
    assert not wrong, "\n".join(wrong)


def test_files_stay_short() -> None:
    long = {str(file): lines for file in FILES if (lines := len(file.read_text(encoding="utf-8").splitlines())) > 400}
    assert not long


@pytest.mark.parametrize(
    "code",
    [
        "import quantforge",
        "import quantforge.recipe, quantforge.reading, quantforge.report",
        "import quantforge.cli",
        "import quantforge.kernels",
        "import quantforge.integrations.vllm",
        "import quantforge.cli; quantforge.cli.main(['--help'])",
        "import quantforge.cli; quantforge.cli.main(['quantize', '--help'])",
    ],
)
def test_importing_and_helping_stay_light(code: str) -> None:
    heavy = {"torch", "transformers", "datasets", "numpy", "safetensors", "triton", "vllm"}
    if "recipe" not in code and "quantize" not in code:  # to convert a verb's arguments, typer itself may use pydantic
        heavy.add("pydantic")
    check = f"{code}\nimport sys\nfound = set({sorted(heavy)!r}) & set(sys.modules)\nassert not found, found"
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert ran.returncode == 0, ran.stderr
