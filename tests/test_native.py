"""The compiled library of the CPU in bad surroundings: no cache, another's cache, damage, failing compilers, races."""

import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from quantforge.errors import UsageError
from quantforge.kernels import native

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the library is built on Linux and macOS only")
LEVEL = "portable"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An own cache folder; nothing remembered of it before or afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(native.SWITCH, raising=False)
    monkeypatch.setattr(native, "COMMON", ("-O0", *native.COMMON[1:]))  # to compile quickly
    native.load.cache_clear()
    native.status.cache_clear()
    yield
    native.load.cache_clear()
    native.status.cache_clear()


def compiler(path: Path, body: str) -> str:
    """A program that stands for a compiler; `body` does its work."""
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo fake; exit 0; }}\n{body}\n')
    path.chmod(0o755)
    return str(path)


def cached(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "cache").rglob("*") if path.is_file())


def test_the_library_is_kept_for_this_user_alone_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        native.load(LEVEL)
    (found,) = cached(tmp_path)
    assert stat.S_IMODE(found.stat().st_mode) == 0o700 == stat.S_IMODE(found.parent.stat().st_mode)
    before = found.stat().st_mtime_ns
    monkeypatch.setattr(native, "_compiled", None)
    native.load.cache_clear()
    assert native.load(LEVEL).supported() and found.stat().st_mtime_ns == before


ELSEWHERE = (
    "from quantforge.kernels import native; native.COMMON = ('-O0', *native.COMMON[1:]); "
    f"print(native.load({LEVEL!r}).supported())"
)


def test_a_damaged_library_is_built_anew(tmp_path: Path) -> None:
    native.load(LEVEL)
    (found,) = cached(tmp_path)
    size = found.stat().st_size
    found.unlink()  # it is loaded here, and must not change in place
    found.write_bytes(b"not a library")
    found.chmod(0o700)
    ran = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True)
    assert ran.stdout.strip() == "1", ran.stderr
    assert cached(tmp_path) == [found] and found.stat().st_size == size


@pytest.mark.parametrize("kind", ["a link of another user", "writable for all", "a file", "relative"])
def test_a_folder_that_others_control_is_not_used(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache" / "quantforge"
    folder.parent.mkdir()
    if kind == "a link of another user":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
        assert native._cache_folder() == folder  # one's own link is fine
        found = folder.stat().st_uid
        plain = Path.lstat
        monkeypatch.setattr(Path, "lstat", lambda path: os.stat_result([*plain(path)[:4], found + 1, *plain(path)[5:]]))
    elif kind == "writable for all":
        folder.mkdir()
        folder.chmod(0o777)
    elif kind == "a file":
        folder.write_text("")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "cache")
        monkeypatch.chdir(tmp_path)
    assert native._cache_folder() is None
    assert native.load(LEVEL).supported()  # from a folder that is gone again
    assert not [path for path in tmp_path.rglob("*.so")]


def test_without_a_home_that_can_be_written_it_runs_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/proc")  # even root cannot make folders there
    native._say_uncached.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"no folder under ~/\.cache .* anew by each process.*XDG_CACHE_HOME"):
        assert native._cache_folder() is None and native.load(LEVEL).supported()
    native.load.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        native.load(LEVEL)


@pytest.mark.parametrize("body", ["echo no such option >&2; exit 1", "exit 0"])
def test_a_compiler_that_fails_is_said_with_its_words(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path / "broken", body))
    with pytest.warns(RuntimeWarning, match=r"no compiled CPU kernel.*portable: .*install a C compiler") as caught:
        status = native.status()
    assert status.library is None and len(caught) == 1
    assert ("no such option" if "echo" in body else "broken failed: it wrote nothing") in status.reason
    assert not cached(tmp_path)


def test_many_threads_and_processes_build_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        built = list(pool.map(lambda _: native.load.__wrapped__(LEVEL), range(3)))
    assert all(library.supported() for library in built) and len(cached(tmp_path)) == 1
    cached(tmp_path)[0].unlink()
    command = [sys.executable, "-c", ELSEWHERE]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in processes] == ["1", "1"]
    assert len(cached(tmp_path)) == 1  # and no leftovers


def test_a_level_that_does_not_exist_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "avx-512")
    with pytest.raises(UsageError, match="QUANTFORGE_CPU_KERNEL='avx-512' is none of avx512"):
        native.status()
    monkeypatch.setenv(native.SWITCH, "none")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # asked for: nothing to warn of
        assert native.status() == native.Status(None, "QUANTFORGE_CPU_KERNEL=none")


def test_a_level_that_was_asked_for_and_cannot_be_had_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.SWITCH, LEVEL)
    monkeypatch.setattr(native, "load", lambda level: SimpleNamespace(supported=lambda: 0))
    with pytest.raises(UsageError, match=r"QUANTFORGE_CPU_KERNEL=portable cannot be had here .*cannot run it.*unset"):
        native.status()
    monkeypatch.undo()
    monkeypatch.setenv(native.SWITCH, LEVEL)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", compiler(tmp_path / "broken", "exit 1"))
    with pytest.raises(UsageError, match=r"portable cannot be had here .*broken failed: it wrote nothing"):
        native.status()


FLAGS_OF_LINUX = {"-mavx512vnni": "avx512_vnni", "-mavxvnni": "avx_vnni"}
"""Where /proc/cpuinfo spells an instruction set otherwise than the compiler's flag does."""


def processor_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


@pytest.mark.skipif(
    not processor_flags(), reason="/proc/cpuinfo does not list the instruction sets of an x86 processor"
)
@pytest.mark.parametrize("level", native.LEVELS)
def test_a_level_is_taken_where_the_processor_has_every_instruction_set_it_is_compiled_for(level: str) -> None:
    asked = [flag for flag in native.LEVELS[level] if not flag.startswith("-mprefer")]
    has_all = {FLAGS_OF_LINUX.get(flag, flag.removeprefix("-m")) for flag in asked} <= processor_flags()
    try:
        library = native.load(level)
    except RuntimeError as error:
        pytest.skip(f"this compiler builds no {level}: {error}")
    assert bool(library.supported()) == has_all


@pytest.mark.skipif(
    not processor_flags(), reason="/proc/cpuinfo does not list the instruction sets of an x86 processor"
)
def test_the_level_that_is_chosen_runs() -> None:
    """In a process of its own: an instruction that is not there kills it."""
    code = (
        "import torch, quantforge.kernels.ops as ops\n"
        "from quantforge.kernels import native, panels\n"
        "codes, scales = torch.randint(0, 16, (16, 64), dtype=torch.uint8), torch.ones(16, 1)\n"
        "packed = panels.pack(codes, scales, None, bits=4, group_size=64)\n"
        "y = torch.ops.quantforge.w4a16_linear(torch.ones(1, 64), *packed, None, 64, 16)\n"
        "torch.testing.assert_close(y[0], codes.sum(1) - 8.0 * 64, atol=1e-3, rtol=0)\n"
        "print(native.status().level)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout.strip() in native.LEVELS, (ran.returncode, ran.stdout, ran.stderr)
