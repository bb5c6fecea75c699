"""Prepare a corpus once: read, split, learn the vocabulary, write token shards; found again by digest.

The folder's name is `<corpus>-<digest>`, the digest being over the settings and the content of the source. It is built
beside its place and renamed when complete, so that a folder of that name is always whole, whoever was killed when.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from reprise.data.corpora import SPLITS, CorpusSource, DataConfig, PrepareConfig, SplitDocuments, open_source
from reprise.data.documents import Document, RecordReport
from reprise.data.shards import (
    FORMAT,
    MANIFEST,
    Corpus,
    HashedFile,
    SplitWriter,
    open_corpus,
    token_dtype,
)
from reprise.data.tokenizer import Tokenizer, build_word_vocabulary, text_parts, train_subword
from reprise.runtime import UserError, say, sync_folder

QUARANTINE = "quarantine.jsonl"

# Documents are encoded in batches of about this much text, for the threads of the tokenizer.
BATCH_CHARACTERS = 4 << 20


def prepare(data: DataConfig, settings: PrepareConfig, root: Path) -> Corpus:
    """The prepared corpus of `data`, under `root`; made if it is not there yet.

    The same settings and content give the same bytes, whatever happened before. Processes that prepare the same corpus
    at once wait for one another. Raises UserError for a missing or empty source, a vocabulary too large for it, and
    what `prepare.on_corrupt=fail` finds.
    """
    source = open_source(data, settings)
    folder = root / f"{source.name}-{_digest(source, data, settings)}"
    if folder.exists():
        return _found(folder)
    root.mkdir(parents=True, exist_ok=True)
    with _lock(root / f".{folder.name}.lock") as locked:
        if folder.exists():
            return _found(folder)
        host = socket.gethostname()
        if locked:
            # Nobody else on this host is at it, so these are of killed processes.
            for leftover in root.glob(f".{folder.name}.{host}-*.partial"):
                shutil.rmtree(leftover)
        say(f"preparing {source.name}: reading the text and learning the vocabulary")
        tokenizer, training, first_report = _learn(source, data, settings)
        partial = root / f".{folder.name}.{host}-{os.getpid()}.partial"
        partial.mkdir()
        try:
            report = _write(source, tokenizer, training, settings, partial, digest=folder.name.rpartition("-")[2])
            if report.as_json() != first_report.as_json():
                raise UserError(f"{source.setting}: the text changed while it was read; run the command again")
            _publish(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    corpus = open_corpus(folder)
    for note in report.notes:
        say(note)
    say(f"{source.name}: {report.summary()}")
    say(f"prepared {_describe(corpus)}")
    return corpus


def _digest(source: CorpusSource, data: DataConfig, settings: PrepareConfig) -> str:
    """16 hexadecimal digits that name the prepared form of the corpus."""
    identity: dict[str, object] = {
        "format": FORMAT,
        "corpus": source.name,
        "source": source.identity,
        "shard_mib": settings.shard_mib,
    }
    if not source.word_level:
        identity |= {"vocab_size": data.vocab_size, "tokenizer_sample_mib": settings.tokenizer_sample_mib}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _found(folder: Path) -> Corpus:
    corpus = open_corpus(folder)
    say(f"already prepared, nothing to do: {_describe(corpus)}")
    return corpus


def _describe(corpus: Corpus) -> str:
    splits = corpus.manifest["splits"]
    counts = ", ".join(f"{name} {splits[name]['num_tokens']:,}" for name in SPLITS)
    return f"{corpus.folder} (tokens: {counts}; vocabulary {corpus.tokenizer.vocab_size:,})"


def _learn(
    source: CorpusSource, data: DataConfig, settings: PrepareConfig
) -> tuple[Tokenizer, dict[str, int], RecordReport]:
    """First pass: the tokenizer, what it was trained on, and what became of the records."""
    report = RecordReport()
    documents = (document for split, document in source.read(report) if split == "train")
    if source.word_level:
        return build_word_vocabulary(documents), {}, report
    sample = _Sample(settings.tokenizer_sample_mib << 20)
    for document in documents:
        sample.add(document.text)
    if not sample.parts:
        raise UserError(
            f"{source.setting}: no text in it ({report.summary()}); give another data.source, or for .jsonl files the"
            " data.text_key that has the text"
        )
    tokenizer, training = train_subword(sample.parts, vocab_size=data.vocab_size)
    return tokenizer, training, report


class _Sample:
    """Parts of the training text, at most `max_bytes` of them, drawn evenly and the same at each reading.

    A part is kept while a hash of its number is below a threshold, which is halved whenever the sample grows too large.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._threshold = 1 << 64
        self._num_parts = 0
        self._num_bytes = 0
        self._kept: list[tuple[int, str]] = []

    @property
    def parts(self) -> list[str]:
        return [part for _, part in self._kept]

    def add(self, text: str) -> None:
        """Take a document's text into the draw; which parts stay depends on how many came before, not on chance."""
        for part in text_parts(text):
            key = xxhash.xxh3_64_intdigest(str(self._num_parts).encode())
            self._num_parts += 1
            if key >= self._threshold:
                continue
            self._kept.append((key, part))
            self._num_bytes += len(part.encode())
            while self._num_bytes > self._max_bytes and len(self._kept) > 1:
                self._threshold //= 2
                least = min(self._kept)
                self._kept = [entry for entry in self._kept if entry[0] < self._threshold] or [least]
                self._num_bytes = sum(len(kept.encode()) for _, kept in self._kept)


def _write(
    source: CorpusSource,
    tokenizer: Tokenizer,
    training: dict[str, int],
    settings: PrepareConfig,
    folder: Path,
    *,
    digest: str,
) -> RecordReport:
    """Second pass: everything of the prepared corpus into `folder`, on disk when it returns."""
    dtype = token_dtype(tokenizer.vocab_size)
    shard_tokens = (settings.shard_mib << 20) // dtype.itemsize
    writers = {name: SplitWriter(folder, name, dtype=dtype, shard_tokens=shard_tokens) for name in SPLITS}
    quarantine = HashedFile(folder / QUARANTINE) if settings.on_corrupt == "quarantine" else None
    report = RecordReport(quarantine_file=quarantine)
    for batch in _batches(source.read(report)):
        encoded = tokenizer.encode_documents([document for _, document in batch], num_threads=settings.num_threads)
        for (split, document), ids in zip(batch, encoded, strict=True):
            num_words = len(ids) if source.word_level else len(document.text.split())
            writers[split].add(ids, num_bytes=len(document.text.encode()), num_words=num_words)
    model = HashedFile(folder / ("tokenizer.model" if tokenizer.kind == "bpe" else "vocabulary.json"))
    model.write(tokenizer.model_bytes())
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "corpus": source.name,
        "digest": digest,
        "source": source.identity,
        "dtype": dtype.str,
        "words_defined": source.word_level,
        "tokenizer": {
            "kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "fingerprint": tokenizer.fingerprint,
            "training": training,
            **model.close(),
        },
        "splits": {name: writer.close() for name, writer in writers.items()},
        "records": report.as_json(),
        "notes": report.notes,
        "quarantine": quarantine.close() if quarantine else None,
    }
    written = HashedFile(folder / MANIFEST)
    written.write(json.dumps(manifest, indent=2, sort_keys=True).encode() + b"\n")
    written.close()
    sync_folder(folder)
    return report


def _batches(documents: SplitDocuments) -> Iterator[list[tuple[str, Document]]]:
    batch: list[tuple[str, Document]] = []
    size = 0
    for split, document in documents:
        batch.append((split, document))
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _publish(partial: Path, folder: Path) -> None:
    """Rename the complete folder to its place; whoever got there first has the same bytes."""
    try:
        partial.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    sync_folder(folder.parent)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold the lock file, waiting for another process that does; false where the file system has no locks.

    The kernel lets go of it when the process ends, however it ends. Without a lock two processes do the work twice, and
    the first rename counts.
    """
    with path.open("w") as stream:
        locked = True
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that prepares {path.name[1:].removesuffix('.lock')}")
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError:
            locked = False
        yield locked
