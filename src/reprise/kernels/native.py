"""The C++ kernels of `csrc/`: built once for this machine's processor, kept in the user's cache, loaded with ctypes.

No header of PyTorch's or Python's is needed, so a build takes about 10 seconds on two cores and outlives upgrades of
both. OpenMP is the copy that PyTorch has already loaded, so that its threads and ours are the same ones.

Without a compiler, or where the build or its self-check fails, `library()` is None, one line says why, and the callers
take their pure PyTorch path. The environment variable REPRISE_NATIVE chooses by hand: `off`, or one of LEVELS.
"""

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
import xxhash

from reprise.runtime import UserError, say

SOURCES = Path(__file__).parent / "csrc"
# Formats of the products that there is native code for.
DTYPES = (torch.float32, torch.bfloat16)

_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma")
# Instruction sets, best first, and how a compiler is told. `emulated_tiles`, AMX's layout in plain code, is for tests.
LEVELS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma"),
    "portable": (),
    "emulated_tiles": ("-DEMULATE_TILES",),
}
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
_COMPILERS = ("c++", "g++", "clang++")
_NO_LIBRARY = "no native library here"


@cache
def library() -> ctypes.CDLL | None:
    """The kernels for the best instruction set that works here, or None, said once and why."""
    chosen = os.environ.get("REPRISE_NATIVE", "")
    if chosen and chosen != "off" and chosen not in LEVELS:
        raise UserError(f"REPRISE_NATIVE={chosen}: allowed: off, {', '.join(LEVELS)}")
    if chosen == "off":
        say("native kernels: off (REPRISE_NATIVE); the cells run in plain PyTorch")
        return None
    failure = "no instruction set of this processor passed its self-check"
    for level in (chosen,) if chosen else _levels_here():
        try:
            loaded = load(level)
        except BuildError as error:
            failure = str(error)
            break
        if loaded.machine_check() == 1:
            return loaded
    say(f"native kernels: {failure}; the cells run in plain PyTorch, several times slower")
    return None


def check_format(product: torch.dtype) -> None:
    """Raises UserError where native code has no products in this format. Nothing that torch.compile cannot trace."""
    if product not in DTYPES:
        raise UserError(f"implementation=native: {_no_products(product)}; allowed: auto, eager, reference")


def require() -> ctypes.CDLL:
    """The library. Raises UserError where there is none."""
    loaded = library()
    if loaded is None:
        raise UserError(f"implementation=native: {_NO_LIBRARY}; allowed: auto, eager, reference")
    return loaded


def obstacle(device: str, product: torch.dtype) -> str | None:
    """Why native code does not run for a device type and a format of products, in a few words; None where it does."""
    if device != "cpu":
        return f"no native code for {device}"
    if product not in DTYPES:
        return _no_products(product)
    return None if library() is not None else _NO_LIBRARY


def _no_products(product: torch.dtype) -> str:
    return f"no native products in {str(product).removeprefix('torch.')}"


def level() -> str:
    """Name of the instruction set in use, or `none`."""
    loaded = library()
    return "none" if loaded is None else Path(loaded._name).parent.name.partition("-")[0]


class BuildError(Exception):
    """Why there is no native library, in a few words."""


def load(level: str) -> ctypes.CDLL:
    """The library of one instruction set, built first where the cache has none. Raises BuildError."""
    compiler = _compiler()
    try:
        return _load(compiler, level)
    except OSError as error:
        raise BuildError(str(error)) from error


def _compiler() -> list[str]:
    """The compiler's command: CXX, which may hold more than one word (`ccache g++`), or the first one found."""
    chosen = os.environ.get("CXX", "")
    try:
        words = shlex.split(chosen)
    except ValueError as error:
        raise BuildError(f"CXX={chosen}: {error}") from error
    words = words or list(filter(None, map(shutil.which, _COMPILERS)))[:1]
    if not words:
        raise BuildError(f"no C++ compiler found ({', '.join(_COMPILERS)}, or CXX)")
    return words


def _load(compiler: list[str], level: str) -> ctypes.CDLL:
    """Raises BuildError and OSError."""
    sources = sorted(SOURCES.iterdir())
    digest = xxhash.xxh64("\0".join((*compiler, *_FLAGS, *LEVELS[level], platform.machine())).encode())
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    folder = _cache_folder() / f"{level}-{digest.hexdigest()}"
    target = folder / "libreprise_kernels.so"
    kept = _kept(target)
    if kept is not None:
        return kept
    with _locked(folder.with_suffix(".lock")):
        # Another rank may have built it while this one waited.
        kept = _kept(target)
        if kept is not None:
            return kept
        target.unlink(missing_ok=True)
        _build(compiler, [path for path in sources if path.suffix == ".cpp"], level, target)
        return ctypes.CDLL(str(target))


def _kept(target: Path) -> ctypes.CDLL | None:
    """The library in the cache, or None where there is none or a broken one."""
    try:
        # Loading half a file may end the process.
        is_whole = _digest_path(target).read_text() == xxhash.xxh64(target.read_bytes()).hexdigest()
        return ctypes.CDLL(str(target)) if is_whole else None
    except OSError:
        return None


def _digest_path(target: Path) -> Path:
    return target.with_suffix(".xxh64")


def _levels_here() -> list[str]:
    """Instruction sets that this processor says it has, best first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ["portable"]
    has_avx512 = torch.cpu._is_avx512_supported()
    has_bf16 = has_avx512 and torch.cpu._is_avx512_bf16_supported()
    present = {
        "amx": has_bf16 and torch.cpu._is_amx_tile_supported(),
        "avx512_bf16": has_bf16,
        "avx512": has_avx512,
        "avx2": torch.cpu._is_avx2_supported(),
        "portable": True,
    }
    return [name for name in LEVELS if present.get(name, False)]


def _build(compiler: list[str], sources: list[Path], level: str, target: Path) -> None:
    """Compile and link beside `target`, then move the result there, so that no reader sees half a file."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent.parent) as scratch:
        library_path = Path(scratch) / target.name
        errors = ""
        # Apple's compiler has no OpenMP: one thread is better than none.
        for threads in (("-fopenmp",), ()):
            errors = _compile(compiler, sources, (*_FLAGS, *LEVELS[level], *threads), library_path)
            if not errors:
                break
        if errors:
            lines = errors.splitlines()
            raise BuildError(
                f"{shlex.join(compiler)} failed ({next((line for line in lines if 'error' in line), lines[0])})"
            )
        target.parent.mkdir(exist_ok=True)
        _digest_path(target).write_text(xxhash.xxh64(library_path.read_bytes()).hexdigest())
        library_path.replace(target)
    say(f"native kernels: built for {level} in {time.monotonic() - started:.0f} s, kept in {target.parent}")


def _compile(compiler: list[str], sources: list[Path], flags: tuple[str, ...], library_path: Path) -> str:
    """Every source at the same time, then one link. Returns what the compiler had to say against it, or nothing."""
    objects = [library_path.with_name(f"{source.stem}.o") for source in sources]
    running = [
        subprocess.Popen(
            [*compiler, *flags, "-c", str(source), "-o", str(result)],
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        for source, result in zip(sources, objects, strict=True)
    ]
    said = [process.communicate()[1] for process in running]
    for process, errors in zip(running, said, strict=True):
        if process.returncode != 0:
            return errors.strip() or f"status {process.returncode}"
    linked = subprocess.run(
        [*compiler, *flags, "-shared", *map(str, objects), "-o", str(library_path)],
        capture_output=True,
        text=True,
        errors="replace",
    )
    return "" if linked.returncode == 0 else linked.stderr.strip() or f"status {linked.returncode}"


def _cache_folder() -> Path:
    """Where builds are kept: the user's cache, or a temporary folder of the user's where that cannot be written."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    for folder in (Path(home) / "reprise", Path(tempfile.gettempdir()) / f"reprise-{os.getuid()}"):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    raise BuildError("no folder to keep a build in; set XDG_CACHE_HOME")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
