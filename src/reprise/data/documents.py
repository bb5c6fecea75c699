"""Readers: files of `.txt` or `.jsonl`, each also `.gz` or `.zst`, to documents of clean text.

A `.jsonl` record is a line, a `.txt` record is the file (a large one in parts that end at a line end). Records end at
a line feed only, and are decoded one by one, so that one bad record costs itself and not the file. Every record ends
kept, dropped for a named reason, or quarantined; `RecordReport` counts all of it.
"""

import base64
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol

from reprise.data.compression import DAMAGE, damage_text, find_damage, open_binary, text_suffix
from reprise.runtime import UserError

# A record is rejected above these shares of its characters: it is then another encoding, or no text at all.
MAX_REPLACED_SHARE = 0.005
MAX_NUL_SHARE = 0.001

# A `.txt` file is cut into documents of about this size, so that none has to fit in memory whole.
TEXT_DOCUMENT_BYTES = 8 << 20

SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Document:
    """`id` names the file and record it came from."""

    id: str
    text: str


class ByteSink(Protocol):
    """Anything that bytes can be written to."""

    def write(self, content: bytes, /) -> object: ...


@dataclass
class RecordReport:
    """What became of the records: `read` is `kept` plus all of `dropped` plus all of `quarantined`, by reason.

    `repaired` counts kept records that were mended, by what was wrong. `notes` are remarks for the user.
    `quarantine_file`, when there is one, gets a JSON line for each quarantined record, with its bytes in base64.
    """

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    quarantined: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    quarantine_file: ByteSink | None = None

    def as_json(self) -> dict[str, object]:
        """The counts as plain data, in an order that does not depend on which came first."""
        assert self.read == self.kept + self.dropped.total() + self.quarantined.total(), self
        counts: dict[str, object] = {"read": self.read, "kept": self.kept}
        for name in ("dropped", "quarantined", "repaired"):
            counts[name] = dict(sorted(getattr(self, name).items()))
        return counts

    def summary(self) -> str:
        """One line: `12 records read, 10 kept, dropped: 2 empty`."""
        line = f"{self.read} records read, {self.kept} kept"
        for name in ("dropped", "quarantined", "repaired"):
            counts = sorted(getattr(self, name).items())
            if counts:
                line += f"; {name}: " + ", ".join(f"{count} {reason}" for reason, count in counts)
        return line


class _Dropped(Exception):
    """The record is sound but not wanted; the argument is the reason."""


class _Corrupt(Exception):
    """The record (or the rest of the file) is not what it should be: reason, and detail for the user."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@dataclass
class Reader:
    """Reads files into documents.

    `files`: (name, path) in reading order. `on_corrupt`, for a damaged file, a line that is no JSON object, one without
    text under `text_key`, or a record longer than `max_record_bytes`:

    - `fail`: UserError naming file, record and byte offset;
    - `quarantine`: set the record aside; of a damaged compressed file, the whole file;
    - `salvage`: drop the record and go on; of a damaged compressed file, keep the records before the damage.

    In every mode a record that is mostly not text (`invalid_utf8`, `binary`) costs itself only: it is quarantined under
    `quarantine` and dropped otherwise.
    """

    files: Sequence[tuple[str, Path]]
    text_key: str
    on_corrupt: str
    max_record_bytes: int

    def documents(self, report: RecordReport) -> Iterator[Document]:
        """All documents, in order; counts into `report` as it goes."""
        for name, path in self.files:
            if self.on_corrupt == "quarantine" and path.suffix in (".gz", ".zst"):
                damage = find_damage(path)
                if damage:
                    report.read += 1
                    self._settle(report, f"{name}: whole file", _Corrupt("damaged_file", damage), raw=b"")
                    continue
            if text_suffix(path) == ".jsonl":
                yield from self._read_jsonl(name, path, report)
            else:
                yield from self._read_text(name, path, report)

    def _read_jsonl(self, name: str, path: Path, report: RecordReport) -> Iterator[Document]:
        """One record a line."""
        number = 0
        offset = 0
        all_blank = True
        with open_binary(path) as stream:
            while True:
                place = f"{name}, record {number + 1}, byte {offset}"
                line = b""
                try:
                    line, length = _read_line(stream, self.max_record_bytes)
                    if not length:
                        return
                    report.read += 1
                    number += 1
                    offset += length
                    stored = len(line)
                    if number == 1:
                        line = line.removeprefix(b"\xef\xbb\xbf")
                    if all_blank and line.lstrip().startswith(b"["):
                        raise _Corrupt("json_array", "the file is a JSON array: write one object a line")
                    all_blank = all_blank and not line.strip()
                    if length > stored:
                        raise _Corrupt("too_long", self._too_long(length))
                    document = Document(f"{name}:{number}", self._json_text(line, report))
                except DAMAGE as error:
                    report.read += 1
                    self._settle(report, place, _Corrupt("damaged_file", damage_text(error)), raw=b"")
                    return
                except _Dropped as reason:
                    report.dropped[str(reason)] += 1
                except _Corrupt as problem:
                    self._settle(report, place, problem, raw=line)
                    if problem.reason == "json_array":
                        return
                else:
                    report.kept += 1
                    yield document

    def _json_text(self, line: bytes, report: RecordReport) -> str:
        """The clean text of a line; raises _Dropped or _Corrupt."""
        if not line.strip():
            raise _Dropped("empty")
        repairs: Counter[str] = Counter()
        try:
            # Raw control characters inside a string are no reason to lose it.
            record = json.loads(_decode(line, repairs), strict=False)
        except (ValueError, RecursionError) as error:
            raise _Corrupt("malformed_json", f"not a JSON object: {error}") from None
        if not isinstance(record, dict):
            raise _Corrupt("not_an_object", f"a JSON {type(record).__name__}, not an object")
        if self.text_key not in record:
            keys = ", ".join(sorted(record)[:10])
            raise _Corrupt("no_text", f"no key {self.text_key!r} (data.text_key); the record has: {keys}")
        text = record[self.text_key]
        if text is None:
            raise _Dropped("null_text")
        if not isinstance(text, str):
            raise _Corrupt("text_not_string", f"{self.text_key!r} is a {type(text).__name__}, not a string")
        text = clean(text, repairs)
        report.repaired.update(repairs.keys())
        return text

    def _read_text(self, name: str, path: Path, report: RecordReport) -> Iterator[Document]:
        """The file as one record, or several of about TEXT_DOCUMENT_BYTES."""
        number = 0
        offset = 0
        with open_binary(path) as stream:
            problem: _Corrupt | None = None
            at_end = False
            while not at_end and not problem:
                lines: list[bytes] = []
                size = 0
                try:
                    while size < TEXT_DOCUMENT_BYTES:
                        line, length = _read_line(stream, self.max_record_bytes)
                        if not length:
                            at_end = True
                            break
                        if length > len(line):
                            raise _Corrupt("too_long", self._too_long(length))
                        lines.append(line)
                        size += length
                except DAMAGE as error:
                    problem = _Corrupt("damaged_file", damage_text(error))
                except _Corrupt as error:
                    problem = error
                if problem and self.on_corrupt == "fail":
                    self._fail(f"{name}, byte {offset + size}", problem)
                # Nothing after the last part, unless the file had no first one.
                if lines or (number == 0 and not problem):
                    number += 1
                    content = b"".join(lines)
                    place = f"{name}, bytes {offset} to {offset + size}"
                    yield from self._text_record(f"{name}#{number}", content, place, report, first=number == 1)
                offset += size
            if problem:
                report.read += 1
                self._settle(report, f"{name}, byte {offset}", problem, raw=b"")

    def _text_record(
        self, identity: str, content: bytes, place: str, report: RecordReport, *, first: bool
    ) -> Iterator[Document]:
        """The document of one part of a text file, if it is one."""
        report.read += 1
        repairs: Counter[str] = Counter()
        try:
            if first:
                content = content.removeprefix(b"\xef\xbb\xbf")
            document = Document(identity, clean(_decode(content, repairs), repairs))
        except _Dropped as reason:
            report.dropped[str(reason)] += 1
        except _Corrupt as problem:
            self._settle(report, place, problem, raw=content)
        else:
            report.repaired.update(repairs.keys())
            report.kept += 1
            yield document

    def _settle(self, report: RecordReport, place: str, problem: _Corrupt, *, raw: bytes) -> None:
        """Count a corrupt record as on_corrupt says, or raise UserError."""
        rejected = problem.reason in ("invalid_utf8", "binary")
        if self.on_corrupt == "fail" and not rejected:
            self._fail(place, problem)
        if self.on_corrupt == "quarantine":
            report.quarantined[problem.reason] += 1
            if report.quarantine_file:
                entry = {
                    "place": place,
                    "reason": problem.reason,
                    "detail": problem.detail,
                    "base64": base64.b64encode(raw).decode(),
                }
                report.quarantine_file.write(json.dumps(entry).encode() + b"\n")
        else:
            report.dropped[problem.reason] += 1

    def _fail(self, place: str, problem: _Corrupt) -> NoReturn:
        raise UserError(
            f"{place}: {problem.detail}; mend the file, or set prepare.on_corrupt to quarantine or salvage"
        ) from None

    def _too_long(self, length: int) -> str:
        return (
            f"a record of {length} bytes is longer than the {self.max_record_bytes} of prepare.max_record_mib "
            "(is the file one object a line?)"
        )


def clean(text: str, repairs: Counter[str]) -> str:
    """Text that can be UTF-8, with `\\n` line ends; counts what it mended in `repairs`.

    Raises _Corrupt for a text full of NULs, and _Dropped for one without any visible character.
    """
    if SURROGATE.search(text):
        # Through UTF-16 two halves of a pair become the character they stand for, and a lone one is replaced.
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        repairs["lone_surrogate"] += 1
    num_nul = text.count("\0")
    if num_nul:
        if num_nul > MAX_NUL_SHARE * len(text):
            raise _Corrupt("binary", f"{num_nul} NULs in {len(text)} characters: this is no text")
        text = text.replace("\0", "")
        repairs["nul"] += 1
    # sentencepiece uses this character for the space, and would decode it as one.
    if "\u2581" in text:
        text = text.replace("\u2581", "_")
        repairs["lower_block"] += 1
    text = text.lstrip("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise _Dropped("empty")
    return text


def _decode(content: bytes, repairs: Counter[str]) -> str:
    """UTF-8 to text, invalid bytes as U+FFFD; raises _Corrupt when there are many of them, or many NULs."""
    num_nul = content.count(b"\0")
    if num_nul > MAX_NUL_SHARE * len(content):
        raise _Corrupt("binary", f"{num_nul} NULs in {len(content)} bytes: this is no text")
    if num_nul:
        content = content.replace(b"\0", b"")
        repairs["nul"] += 1
    try:
        return content.decode()
    except UnicodeDecodeError:
        text = content.decode(errors="replace")
    num_replaced = text.count("\ufffd")
    if num_replaced > MAX_REPLACED_SHARE * len(text):
        raise _Corrupt("invalid_utf8", f"{num_replaced} of {len(text)} characters are not UTF-8")
    repairs["invalid_utf8"] += 1
    return text


def _read_line(stream: io.BufferedIOBase, limit: int) -> tuple[bytes, int]:
    """The next line with its line feed, and its length; of one longer than `limit` bytes only the first `limit`."""
    line = stream.readline(limit)
    length = len(line)
    if length == limit and not line.endswith(b"\n"):
        while True:
            rest = stream.readline(limit)
            length += len(rest)
            if len(rest) < limit or rest.endswith(b"\n"):
                break
    return line, length
