"""Opening files that may be compressed, so that damage is an error and never a short file."""

import gzip
import io
import zlib
from pathlib import Path
from typing import Any

import zstandard

SUFFIXES = (".txt", ".jsonl")
COMPRESSIONS = ("", ".gz", ".zst")

# What the decompressors raise on a truncated or damaged file.
DAMAGE = (EOFError, OSError, zlib.error, zstandard.ZstdError)


def text_suffix(path: Path) -> str:
    """`.txt` or `.jsonl`, looking through a compression suffix; any other suffix as it is."""
    return Path(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix


def open_binary(path: Path) -> io.BufferedIOBase:
    """The file's content, decompressed as its suffix says; reading a damaged file raises one of DAMAGE."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
        return io.BufferedReader(_ZstdFile(path), buffer_size=1 << 17)
    return path.open("rb")


class _ZstdFile(io.RawIOBase):
    """Reads zstandard frames one after another. The package's own reader ends a truncated file without an error."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """As `io.RawIOBase.readinto`, in bytes. Raises EOFError for a file that ends inside a frame."""
        while not self._output:
            if not self._input:
                self._input = self._file.read(1 << 16)
                if not self._input:
                    if self._frame is not None:
                        raise EOFError("the file ends inside a zstandard frame")
                    return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._output = memoryview(self._frame.decompress(self._input))
            self._input = b""
            if self._frame.eof:
                self._input = self._frame.unused_data
                self._frame = None
        target = memoryview(buffer)
        count = min(len(target), len(self._output))
        target[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def find_damage(path: Path) -> str:
    """What is wrong with a compressed file, by reading it to its end; empty when nothing is."""
    try:
        with open_binary(path) as stream:
            while stream.read(1 << 20):
                pass
    except DAMAGE as error:
        return damage_text(error)
    return ""


def damage_text(error: BaseException) -> str:
    """One of DAMAGE in words."""
    return f"the file is truncated or damaged ({error})"
