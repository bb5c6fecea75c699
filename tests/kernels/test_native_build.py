"""A toolchain or a cache that fails: one line says why, and plain PyTorch takes over; a broken library is rebuilt."""

import shutil
from pathlib import Path

import pytest

from reprise.kernels import native

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, native._COMPILERS)), reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, with no build in it yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/nonexistent/g++", "No such file or directory: '/nonexistent/g++'"),
        ("/nonexistent/ccache g++", "No such file or directory: '/nonexistent/ccache'"),
        ("g++ 'half a word", "CXX=g++ 'half a word: No closing quotation"),
        ("false", "false failed (status 1)"),
        ("sh -c 'echo >&2; exit 3'", "failed (status 3)"),
        ("true", "No such file or directory"),
    ],
)
def test_a_compiler_that_does_not_work_is_said_in_one_line(
    compiler: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("REPRISE_NATIVE", "portable")
    assert native.library.__wrapped__() is None
    said = capsys.readouterr().out
    assert reason in said and len(said.splitlines()) == 1


def test_a_cache_that_takes_no_files_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "_cache_folder", lambda: tmp_path / "removed meanwhile")
    monkeypatch.setenv("REPRISE_NATIVE", "portable")
    monkeypatch.setenv("CXX", "true")
    assert native.library.__wrapped__() is None
    said = capsys.readouterr().out
    assert "removed meanwhile" in said and len(said.splitlines()) == 1


@needs_compiler
@pytest.mark.parametrize("num_bytes", [0, 100, 8000])
def test_a_broken_library_in_the_cache_is_built_anew_once(
    num_bytes: int, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler has two words, and makes a library of one line of what it is given."""
    real = next(filter(None, map(shutil.which, native._COMPILERS)))
    source = tmp_path / "tiny.cpp"
    source.write_text('extern "C" int machine_check() { return 1; }\n')
    calls = tmp_path / "calls"
    wrapper = _script(
        tmp_path / "wrapper",
        f'echo >> "{calls}"\n'
        'for last in "$@"; do :; done\n'
        'case " $* " in\n'
        f'*" -shared "*) exec "$1" -shared -fPIC "{source}" -o "$last" ;;\n'
        '*) : > "$last" ;;\nesac',
    )
    monkeypatch.setenv("CXX", f"'{wrapper}' '{real}'")
    num_calls = 1 + len(list(native.SOURCES.glob("*.cpp")))

    assert native.load("portable").machine_check() == 1
    assert native.load("portable").machine_check() == 1
    assert len(calls.read_text().splitlines()) == num_calls, "the cache was not read"

    # In another cache: what is loaded from a path already is not read again.
    (built,) = cache.rglob("*.so")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    broken = tmp_path / "other" / built.relative_to(cache)
    shutil.copytree(cache, tmp_path / "other")
    broken.write_bytes(built.read_bytes()[:num_bytes])
    compiler = wrapper.read_text()
    _script(wrapper, "echo 'error: out of paper' >&2; exit 1")
    with pytest.raises(native.BuildError, match="out of paper"):
        native.load("portable")
    assert not broken.exists(), "a broken library stays"

    broken.write_bytes(built.read_bytes()[:num_bytes])
    wrapper.write_text(compiler)
    assert native.load("portable").machine_check() == 1
    assert len(calls.read_text().splitlines()) == 2 * num_calls
