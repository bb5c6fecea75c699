"""Nasty inputs: what the reader keeps, mends, drops or refuses, and that the counts add up."""

import base64
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.data import documents
from reprise.data.documents import Reader, RecordReport
from reprise.runtime import UserError

LONG = "plain words " * 400


def read(path: Path, on_corrupt: str = "fail", *, limit: int = 1 << 20) -> tuple[list[str], RecordReport]:
    """Texts of a file, and the report, whose counts are checked to add up."""
    report = RecordReport()
    reader = Reader([(path.name, path)], text_key="text", on_corrupt=on_corrupt, max_record_bytes=limit)
    texts = [document.text for document in reader.documents(report)]
    report.as_json()
    assert report.kept == len(texts)
    return texts, report


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def line(text: object) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


def compressed(suffix: str, content: bytes) -> bytes:
    return gzip.compress(content) if suffix == ".gz" else zstandard.compress(content)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_every_kind_reads_the_same(tmp_path: Path, kind: str, suffix: str) -> None:
    content = b"one\ntwo\n" if kind == ".txt" else line("one") + line("two").rstrip()
    path = write(tmp_path / f"a{kind}{suffix}", compressed(suffix, content) if suffix else content)
    assert read(path)[0] == (["one\ntwo\n"] if kind == ".txt" else ["one", "two"])


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_files_joined_after_compression_are_read_to_the_end(tmp_path: Path, suffix: str) -> None:
    parts = compressed(suffix, line("one")) + compressed(suffix, line("two"))
    assert read(write(tmp_path / f"a.jsonl{suffix}", parts))[0] == ["one", "two"]


def test_a_byte_order_mark_makes_no_difference(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    assert read(write(tmp_path / "a.jsonl", mark + line("\ufeffone")))[0] == ["one"]
    assert read(write(tmp_path / "a.txt", mark + b"one"))[0] == ["one"]


def test_only_a_line_feed_ends_a_record_and_line_ends_become_line_feeds(tmp_path: Path) -> None:
    odd = "a\u2028b\u2029c\x85d\x0be\x0cf"
    content = json.dumps({"text": odd}, ensure_ascii=False).encode() + b"\r\n" + line("x\r\ny\rz")
    assert read(write(tmp_path / "a.jsonl", content))[0] == [odd, "x\ny\nz"]
    assert read(write(tmp_path / "a.txt", f"{odd}\r\nx".encode()))[0] == [f"{odd}\nx"]


def test_a_little_invalid_utf8_is_mended_and_much_costs_its_record_only(tmp_path: Path) -> None:
    little = b'{"text": "' + LONG.encode() + b'\xff"}\n'
    much = b'{"text": "ab\xff\xfe\xfdcd"}\n'
    path = write(tmp_path / "a.jsonl", line("one") + little + much + line("two"))
    texts, report = read(path)
    assert texts == ["one", LONG + "\ufffd", "two"]
    assert report.repaired == {"invalid_utf8": 1} and report.dropped == {"invalid_utf8": 1}
    assert read(path, "quarantine")[1].quarantined == {"invalid_utf8": 1}


def test_few_nuls_are_removed_and_many_are_no_text(tmp_path: Path) -> None:
    raw = b'{"text": "' + LONG.encode() + b'\0"}\n'
    path = write(tmp_path / "a.jsonl", line(LONG + "\0") + raw + line("a\0b") + bytes(50) + b"\n" + line("two"))
    texts, report = read(path)
    assert texts == [LONG, LONG, "two"]
    assert report.repaired == {"nul": 2} and report.dropped == {"binary": 2}
    assert read(write(tmp_path / "a.txt", "utf-16 text".encode("utf-16")))[1].dropped == {"binary": 1}


def test_halves_of_surrogate_pairs_are_joined_or_replaced(tmp_path: Path) -> None:
    texts, report = read(write(tmp_path / "a.jsonl", b'{"text": "a\\ud83d\\ude00b\\ud83dc\\ude00"}\n'))
    assert texts == ["a\U0001f600b\ufffdc\ufffd"] and report.repaired == {"lone_surrogate": 1}


def test_the_space_of_sentencepiece_is_replaced(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.txt", "a\u2581b".encode()))[0] == ["a_b"]


def test_empty_and_null_records_are_dropped_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", line("") + line(" \n\u3000") + b"\n" + line(None) + line("None"))
    texts, report = read(path)
    assert texts == ["None"] and report.dropped == {"empty": 3, "null_text": 1}
    assert read(write(tmp_path / "a.txt", b""))[1].dropped == {"empty": 1}
    assert report.summary() == "5 records read, 1 kept; dropped: 3 empty, 1 null_text"


@pytest.mark.parametrize(
    ("bad", "reason", "hint"),
    [
        (b'{"text": "cut', "malformed_json", "not a JSON object"),
        (b"[" * 100_000, "malformed_json", "not a JSON object"),
        (b'["text"]', "not_an_object", "a JSON list"),
        (b'{"body": "x", "url": "y"}', "no_text", r"no key 'text' \(data.text_key\); the record has: body, url"),
        (b'{"text": 12}', "text_not_string", "'text' is a int"),
        (line("x" * 200).strip(), "too_long", "prepare.max_record_mib"),
    ],
)
def test_a_corrupt_record_fails_by_place_or_is_set_aside(tmp_path: Path, bad: bytes, reason: str, hint: str) -> None:
    limit = 100 if reason == "too_long" else 1 << 20
    path = write(tmp_path / "a.jsonl", line("one") + bad + b"\n" + line("two"))
    with pytest.raises(UserError, match=f"a.jsonl, record 2, byte {len(line('one'))}: .*{hint}.*on_corrupt"):
        read(path, limit=limit)
    texts, report = read(path, "salvage", limit=limit)
    assert texts == ["one", "two"] and report.dropped == {reason: 1}
    texts, report = read(path, "quarantine", limit=limit)
    assert texts == ["one", "two"] and report.quarantined == {reason: 1}


def test_a_json_array_is_named_for_what_it_is(tmp_path: Path) -> None:
    for start, number in ((b"", 1), (b"\xef\xbb\xbf", 1), (b"\xef\xbb\xbf \n\n", 3)):
        path = write(tmp_path / "a.jsonl", start + b'[\n{"text": "a"},\n{"text": "b"}\n]\n')
        with pytest.raises(UserError, match=rf"a.jsonl, record {number},.*JSON array: write one object a line"):
            read(path)
        assert read(path, "salvage")[1].dropped["json_array"] == 1


@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["truncated", "trailer", "garbage", "not compressed"])
def test_damaged_compression(tmp_path: Path, kind: str, suffix: str, damage: str) -> None:
    lines = [line(f"record {number} " + f"{number * 2654435761 % 2**32:x}") for number in range(20_000)]
    whole = compressed(suffix, b"".join(lines))
    content = {
        "truncated": whole[: len(whole) // 2],
        "trailer": whole[:-3],
        "garbage": whole + b"garbage!",
        "not compressed": b"".join(lines),
    }[damage]
    path = write(tmp_path / f"a{kind}{suffix}", content)
    with pytest.raises(UserError, match=f"a{kind}{suffix}, .*truncated or damaged.*on_corrupt"):
        read(path)
    texts, report = read(path, "quarantine")
    assert texts == [] and report.quarantined == {"damaged_file": 1} and report.read == 1
    texts, report = read(path, "salvage")
    assert report.dropped == {"damaged_file": 1}
    if damage == "not compressed":
        assert texts == []
    elif kind == ".txt":
        assert len(texts) == 1 and b"".join(lines).decode().startswith(texts[0]) and texts[0].endswith("\n")
    else:
        assert texts == [json.loads(entry)["text"] for entry in lines[: len(texts)]]
        assert len(texts) > (5_000 if damage == "truncated" else 15_000)


def test_a_large_text_file_becomes_documents_of_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "TEXT_DOCUMENT_BYTES", 100)
    content = "".join(f"line {number}\n" for number in range(100))
    texts, report = read(write(tmp_path / "a.txt", content.encode()))
    assert len(texts) == report.read > 5 and "".join(texts) == content
    assert all(text.endswith("\n") and len(text) < 110 for text in texts)


def test_quarantine_keeps_the_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", line("one") + b'{"text": \xff\n')
    report = RecordReport(quarantine_file=io.BytesIO())
    reader = Reader([("a.jsonl", path)], text_key="text", on_corrupt="quarantine", max_record_bytes=1 << 20)
    assert len(list(reader.documents(report))) == 1
    assert isinstance(report.quarantine_file, io.BytesIO)
    entry = json.loads(report.quarantine_file.getvalue())
    assert entry["place"] == "a.jsonl, record 2, byte 16"
    assert base64.b64decode(entry["base64"]) == b'{"text": \xff\n'


@settings(deadline=None, max_examples=200)
@given(
    content=st.lists(
        st.one_of(
            st.binary(max_size=20),
            st.sampled_from([b'{"text": "a"}', b'{"text": null}', b'{"text": "\\ud800"}', b"\n", b"\r\n", b"[", b"\0"]),
        ),
        max_size=12,
    ).map(b"".join),
    suffix=st.sampled_from([".txt", ".jsonl", ".txt.gz", ".jsonl.zst"]),
    on_corrupt=st.sampled_from(["quarantine", "salvage"]),
)
def test_any_bytes_end_in_sound_text_and_counts_that_add_up(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str, on_corrupt: str
) -> None:
    texts, _ = read(write(tmp_path_factory.mktemp("any") / f"a{suffix}", content), on_corrupt, limit=40)
    for text in texts:
        assert text.strip() and "\0" not in text and "\r" not in text
        text.encode()


def test_reading_is_lazy(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", line("one") + b"broken\n")
    reader = Reader([("a.jsonl", path)], text_key="text", on_corrupt="fail", max_record_bytes=1 << 20)
    stream: Iterator[documents.Document] = reader.documents(RecordReport())
    assert next(stream) == documents.Document("a.jsonl:1", "one")
