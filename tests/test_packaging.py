"""What a newcomer reads and installs agrees with itself."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
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
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_direct_dependency_is_pinned(project: dict[str, Any]) -> None:
    wanted = [*project["project"]["dependencies"]]
    for extra in ("dev", "quickstart", "gguf", "eval"):
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


@pytest.mark.slow
def test_wheel_and_source_archive_hold_the_recipes_and_a_wheel_reads_them_unpacked_or_not(tmp_path: Path) -> None:
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.partition(".")[0]) < 77:
        pytest.skip("pyproject.toml asks for setuptools 77")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "quantforge", source / "quantforge", ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
    ran = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "importable" not in ran.stderr, ran.stderr  # a folder of data must not be taken for a package
    wheel, archive = (next((source / "dist").glob(f"*{suffix}")) for suffix in (".whl", ".tar.gz"))
    wanted = {f"quantforge/recipes/{file.name}" for file in (ROOT / "quantforge" / "recipes").iterdir()}
    assert wanted and wanted <= set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(archive) as packed:
        assert wanted <= {name.partition("/")[2] for name in packed.getnames()}
    names = sorted(Path(name).stem for name in wanted)
    listing = "from quantforge.shipped import shipped_recipes; print(*shipped_recipes())"
    zipfile.ZipFile(wheel).extractall(tmp_path / "unpacked")
    for place in (wheel, tmp_path / "unpacked"):
        ran = subprocess.run(
            [sys.executable, "-c", listing],
            env=os.environ | {"PYTHONPATH": str(place)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert ran.stdout.split() == names, ran.stderr
