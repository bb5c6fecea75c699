"""Token shards: a prepared corpus on disk, written once and read through memory maps.

A folder holds, for each split, `<split>-<number>.tokens` (little-endian uint16, or uint32 for a vocabulary above
65,536) and `<split>.offsets` (int64: where each document starts, and the end), the tokenizer's file, and
`manifest.json` with counts, settings and the sha256 of each file. It appears under its name only when complete.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from reprise.data import tokenizer as tokenizers
from reprise.data.tokenizer import Tokenizer
from reprise.runtime import UserError

FORMAT = 1
MANIFEST = "manifest.json"


class TokenArray(Protocol):
    """What a split's tokens can do: a memory map of one shard, or `ShardedTokens`."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class ShardedTokens:
    """Several shards as one array: takes an int, a slice without step, or an int64 array of any shape."""

    def __init__(self, shards: list[npt.NDArray[Any]]) -> None:
        self._shards = shards
        self._starts = np.cumsum([0, *(len(shard) for shard in shards)])
        self.dtype = shards[0].dtype

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            assert step == 1, index
            index = np.arange(start, max(start, stop), dtype=np.int64)
        places = np.asarray(index, dtype=np.int64)
        shard_of = np.searchsorted(self._starts, places, side="right") - 1
        tokens = np.empty(places.shape, dtype=self.dtype)
        for number in np.unique(shard_of):
            here = shard_of == number
            tokens[here] = self._shards[number][places[here] - self._starts[number]]
        return tokens if places.shape else tokens[()]


@dataclass(frozen=True)
class TokenSplit:
    """One split.

    tokens: ids, in document order; each document ends in `<eos>`. doc_offsets: int64 [num_documents + 1] into tokens.
    num_bytes: UTF-8 bytes of the text. num_words: words, `<eos>` of each line among them, None where the corpus
        defines none.
    """

    tokens: TokenArray
    doc_offsets: npt.NDArray[np.int64]
    num_tokens: int
    num_bytes: int
    num_words: int | None


class Corpus:
    """A prepared corpus: `folder`, `manifest`, `tokenizer`, and its splits."""

    def __init__(self, folder: Path, manifest: dict[str, Any], tokenizer: Tokenizer) -> None:
        self.folder = folder
        self.manifest = manifest
        self.tokenizer = tokenizer

    def split(self, name: str) -> TokenSplit:
        """The split `train`, `val` or `test`."""
        entry = self.manifest["splits"][name]
        dtype = np.dtype(self.manifest["dtype"])
        shards = [np.memmap(self.folder / shard["file"], dtype=dtype, mode="r") for shard in entry["shards"]]
        return TokenSplit(
            tokens=shards[0] if len(shards) == 1 else ShardedTokens(list(shards)),
            doc_offsets=np.memmap(self.folder / entry["offsets"]["file"], dtype="<i8", mode="r"),
            num_tokens=entry["num_tokens"],
            num_bytes=entry["num_bytes"],
            num_words=entry["num_words"] if self.manifest["words_defined"] else None,
        )

    def verify(self) -> None:
        """Read every file and compare its sha256. Raises UserError naming the first that differs."""
        for entry in file_entries(self.manifest):
            with (self.folder / entry["file"]).open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != entry["sha256"]:
                    raise _damaged(self.folder / entry["file"], "its content is not what was prepared")


def open_corpus(folder: Path) -> Corpus:
    """Open a prepared folder. Raises UserError when it is none, or a file of it is missing or of the wrong size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise UserError(f"{folder}: no prepared corpus (no {MANIFEST}); run task=prepare") from None
    except ValueError as error:
        raise _damaged(folder / MANIFEST, str(error)) from None
    if manifest.get("format") != FORMAT:
        raise _damaged(folder / MANIFEST, f"format {manifest.get('format')}, this version reads {FORMAT}")
    for entry in file_entries(manifest):
        path = folder / entry["file"]
        size = path.stat().st_size if path.exists() else None
        if size != entry["num_bytes"]:
            raise _damaged(path, "it is missing" if size is None else f"{size} bytes, not {entry['num_bytes']}")
    entry = manifest["tokenizer"]
    tokenizer = tokenizers.load(entry["kind"], (folder / entry["file"]).read_bytes())
    if tokenizer.fingerprint != entry["fingerprint"]:
        raise _damaged(folder / entry["file"], "the tokenizer's pieces are not those that the tokens were made with")
    return Corpus(folder, manifest, tokenizer)


def file_entries(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Every file of a prepared folder but the manifest: `{file, num_bytes, sha256}`."""
    entries = [manifest["tokenizer"]]
    for split in manifest["splits"].values():
        entries += [split["offsets"], *split["shards"]]
    if manifest["quarantine"]:
        entries.append(manifest["quarantine"])
    return entries


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path}: {why}; delete the folder and run task=prepare again")


class HashedFile:
    """A file that is being written: hashed on the way, on disk when closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream = path.open("wb")
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    def write(self, content: bytes) -> None:
        self._stream.write(content)
        self._digest.update(content)
        self._num_bytes += len(content)

    def close(self) -> dict[str, Any]:
        """Flush to disk, and give the file's entry for the manifest."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        return {"file": self._path.name, "num_bytes": self._num_bytes, "sha256": self._digest.hexdigest()}


class SplitWriter:
    """Writes the shards of one split, document by document."""

    def __init__(self, folder: Path, name: str, *, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self._folder = folder
        self._name = name
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._shards: list[dict[str, Any]] = []
        self._shard = self._next_shard()
        self._left = shard_tokens
        self._offsets = HashedFile(folder / f"{name}.offsets")
        self._offsets.write(np.int64(0).astype("<i8").tobytes())
        self._counts = {"num_documents": 0, "num_tokens": 0, "num_bytes": 0, "num_words": 0}

    def add(self, ids: npt.NDArray[Any], *, num_bytes: int, num_words: int) -> None:
        """Append a document: its ids (which end in `<eos>`), and the size of its text."""
        added = {"num_documents": 1, "num_tokens": len(ids), "num_bytes": num_bytes, "num_words": num_words}
        for name, value in added.items():
            self._counts[name] += value
        self._offsets.write(np.int64(self._counts["num_tokens"]).astype("<i8").tobytes())
        ids = ids.astype(self._dtype)
        while len(ids):
            if not self._left:
                self._shards.append(self._shard.close())
                self._shard = self._next_shard()
                self._left = self._shard_tokens
            self._shard.write(ids[: self._left].tobytes())
            self._left, ids = max(self._left - len(ids), 0), ids[self._left :]

    def close(self) -> dict[str, Any]:
        """Finish the files, and give the split's entry for the manifest."""
        self._shards.append(self._shard.close())
        return {**self._counts, "offsets": self._offsets.close(), "shards": self._shards}

    def _next_shard(self) -> HashedFile:
        return HashedFile(self._folder / f"{self._name}-{len(self._shards):05d}.tokens")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest type for the ids of a vocabulary."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")
