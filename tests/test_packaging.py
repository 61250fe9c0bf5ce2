"""What a newcomer reads and installs agrees with itself."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
WRITTEN = [
    file
    for pattern in (
        "*.md",
        "*.toml",
        "*.txt",
        "docs/*.md",
        "quantforge/recipes/*",
        "scripts/*",
        ".ci/*",
        "quantforge/**/*.py",
    )
    for file in sorted(ROOT.glob(pattern))
    if file.is_file()
]


@pytest.fixture
def project() -> dict[str, Any]:
    if sys.version_info < (3, 11):
        pytest.skip("needs tomllib")
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_direct_dependency_is_pinned(project: dict[str, Any]) -> None:
    wanted = [*project["project"]["dependencies"]]
    for extra in ("dev", "quickstart", "eval"):
        wanted += project["project"]["optional-dependencies"][extra]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {canonical(line.split("==")[0]) for line in lines if "==" in line and not line.startswith("#")}
    names = {canonical(re.split(r"[<>=;\[ ]", requirement)[0]) for requirement in wanted}
    assert names <= pinned


def test_the_distribution_is_not_called_quantforge(project: dict[str, Any]) -> None:
    assert project["project"]["name"] == "quantforge-llm"
    assert project["project"]["scripts"] == {"quantforge": "quantforge.cli:main"}


def test_no_document_installs_somebody_elses_quantforge() -> None:
    for file in WRITTEN:
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"pip3? install [^\n]*\bquantforge(?![-\w])", text), file


def test_no_file_names_a_machine() -> None:
    private = re.compile(r"/(?:opt|root|home|Users)/")
    for file in WRITTEN:
        assert not private.search(file.read_text(encoding="utf-8")), file


def test_the_version_has_one_source(project: dict[str, Any]) -> None:
    version = project["project"]["version"]
    for file in (ROOT / "quantforge").rglob("*.py"):
        assert f'"{version}"' not in file.read_text(encoding="utf-8"), file


def test_links_of_the_documents_lead_somewhere() -> None:
    for file in (ROOT / "README.md", ROOT / "docs" / "architecture.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", file.read_text(encoding="utf-8")):
            assert (file.parent / target).exists(), f"{file.name} links to {target}"
