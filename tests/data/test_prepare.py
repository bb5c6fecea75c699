"""Preparing: once, found again, byte for byte the same whoever was killed, and one clear line when it cannot."""

import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from reprise.data import prepare as preparing
from reprise.data import shards
from reprise.data.corpora import DataConfig, PrepareConfig, open_source
from reprise.data.documents import RecordReport
from reprise.data.prepare import prepare
from reprise.data.shards import Corpus, HashedFile, SplitWriter, open_corpus
from reprise.runtime import UserError

WriteJsonl = Callable[..., Path]


def small(source: Path, **settings: object) -> DataConfig:
    return DataConfig(source=str(source), vocab_size=350, **settings)  # type: ignore[arg-type]


def content(folder: Path) -> dict[str, str]:
    """sha256 of every file of a folder."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def texts_of(corpus: Corpus, split: str) -> list[str]:
    """The documents of a split, decoded from its tokens."""
    part = corpus.split(split)
    texts = []
    for start, stop in zip(part.doc_offsets[:-1], part.doc_offsets[1:], strict=True):
        ids = part.tokens[int(start) : int(stop)].tolist()
        assert ids[-1] == corpus.tokenizer.eos_id and corpus.tokenizer.eos_id not in ids[:-1]
        texts.append(corpus.tokenizer.decode(ids[:-1]))
    return texts


def test_the_default_corpus_comes_back_exactly_from_its_tokens(sotu: Corpus) -> None:
    wanted: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for split, document in open_source(DataConfig(), PrepareConfig()).read(RecordReport()):
        wanted[split].append(document.text)
    for split, texts in wanted.items():
        assert texts_of(sotu, split) == texts
        part = sotu.split(split)
        assert part.tokens.dtype == np.uint16
        assert part.num_tokens == len(part.tokens) == part.doc_offsets[-1]
        assert part.num_bytes == sum(len(text.encode()) for text in texts)
        assert part.num_words is None
        assert sotu.manifest["splits"][split]["num_words"] == sum(len(text.split()) for text in texts)
    assert sotu.tokenizer.vocab_size == 8192
    assert sotu.manifest["records"] == {
        "read": 249,
        "kept": 237,
        "dropped": {"not_an_annual_message": 12},
        "quarantined": {},
        "repaired": {},
    }
    sotu.verify()


def test_a_second_call_is_a_no_op_that_says_so(
    write_jsonl: WriteJsonl, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(25)
    first = prepare(small(source), PrepareConfig(), tmp_path / "root")
    assert "prepared " in capsys.readouterr().out
    monkeypatch.setattr(preparing, "_learn", None)
    # Settings of training, and how many threads encode, are not part of what was prepared.
    data = small(source, num_lanes=3, window=9, eval_lanes=2)
    again = prepare(data, PrepareConfig(num_threads=1), tmp_path / "root")
    assert again.folder == first.folder
    assert capsys.readouterr().out.startswith(f"already prepared, nothing to do: {first.folder}")


def digest_of(data: DataConfig, settings: PrepareConfig) -> str:
    return preparing._digest(open_source(data, settings), data, settings)


def test_the_digest_follows_content_and_settings_and_not_the_place(write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    source = write_jsonl(25)
    copy = tmp_path / "elsewhere" / source.name
    copy.parent.mkdir()
    shutil.copy(source, copy)
    digest = digest_of(small(source), PrepareConfig())
    assert digest_of(small(copy), PrepareConfig()) == digest
    others = {
        digest_of(DataConfig(source=str(source), vocab_size=351), PrepareConfig()),
        digest_of(small(source, text_key="body"), PrepareConfig()),
        digest_of(small(source), PrepareConfig(on_corrupt="salvage")),
    }
    copy.write_bytes(source.read_bytes() + b"\n")
    others.add(digest_of(small(copy), PrepareConfig()))
    assert len(others | {digest}) == 5


def test_the_result_does_not_depend_on_threads(write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    source = write_jsonl(60)
    one = prepare(small(source), PrepareConfig(num_threads=1), tmp_path / "one")
    two = prepare(small(source), PrepareConfig(num_threads=2), tmp_path / "two")
    assert content(one.folder) == content(two.folder)
    assert one.folder.name == two.folder.name


def interrupt_at(call: int, function: Callable[..., object]) -> Callable[..., object]:
    """`function`, whose call number `call` raises what Ctrl-C does."""
    calls = itertools.count(1)

    def interrupted(*args: object, **settings: object) -> object:
        if next(calls) == call:
            raise KeyboardInterrupt
        return function(*args, **settings)

    return interrupted


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [
        (HashedFile, "close", range(1, 9)),
        (SplitWriter, "add", (1, 13, 25)),
        (preparing, "_publish", (1,)),
        (preparing, "sync_folder", (1,)),
    ],
)
def test_an_interruption_leaves_nothing_and_the_next_run_gives_the_same_bytes(
    write_jsonl: WriteJsonl,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    calls: Sequence[int],
) -> None:
    source, root = write_jsonl(25), tmp_path / "root"
    for call in calls:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt_at(call, getattr(owner, name)))
            with pytest.raises(KeyboardInterrupt):
                prepare(small(source), PrepareConfig(), root)
        assert [path.name for path in root.iterdir() if not path.name.endswith(".lock")] == []
    resumed = prepare(small(source), PrepareConfig(), root)
    straight = prepare(small(source), PrepareConfig(), tmp_path / "straight")
    assert content(resumed.folder) == content(straight.folder)


SCRIPT = """
import os, signal, sys
from pathlib import Path
from reprise.data import prepare as preparing
from reprise.data.corpora import DataConfig, PrepareConfig
source, root, mode = sys.argv[1:]
if mode == "killed":
    preparing._publish = lambda partial, folder: os.kill(os.getpid(), signal.SIGKILL)
if mode == "slow":
    publish = preparing._publish
    def slow(partial, folder):
        print("writing", flush=True)
        sys.stdin.readline()
        publish(partial, folder)
    preparing._publish = slow
preparing.prepare(DataConfig(source=source, vocab_size=350), PrepareConfig(), Path(root))
"""


def start(source: Path, root: Path, mode: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(Path(shards.__file__).parents[2])}
    command = [sys.executable, "-c", SCRIPT, str(source), str(root), mode]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def wait_for(words: str, process: "subprocess.Popen[str]") -> None:
    """Read what the process says up to a line with these words."""
    assert process.stdout is not None
    assert any(words in line for line in process.stdout), f"the process ended without saying {words!r}"


def test_a_killed_process_leaves_what_the_next_run_clears(write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    source, root = write_jsonl(25), tmp_path / "root"
    process = start(source, root, "killed")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert len(list(root.glob(".*.partial"))) == 1 and not list(root.glob("files-*"))
    resumed = prepare(small(source), PrepareConfig(), root)
    assert not list(root.glob(".*.partial"))
    straight = prepare(small(source), PrepareConfig(), tmp_path / "straight")
    assert content(resumed.folder) == content(straight.folder)


def test_two_processes_at_once_prepare_once(write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    source, root = write_jsonl(25), tmp_path / "root"
    first = start(source, root, "slow")
    wait_for("writing", first)
    second = start(source, root, "plain")
    wait_for("waiting for another process", second)
    first.communicate("\n", timeout=60)
    said, _ = second.communicate(timeout=60)
    assert first.returncode == second.returncode == 0
    assert "already prepared" in said
    open_corpus(next(iter(root.glob("files-*")))).verify()


def test_without_locks_the_first_rename_counts(
    write_jsonl: WriteJsonl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError("no locks here")

    source, root = write_jsonl(25), tmp_path / "root"
    monkeypatch.setattr(preparing.fcntl, "flock", no_locks)
    publish = preparing._publish

    def overtaken(partial: Path, folder: Path) -> None:
        shutil.copytree(partial, folder)
        publish(partial, folder)

    monkeypatch.setattr(preparing, "_publish", overtaken)
    prepare(small(source), PrepareConfig(), root).verify()
    assert not list(root.glob(".*.partial"))


@pytest.mark.parametrize(
    ("text", "vocab_size", "message"),
    [
        ("", 350, r"a.txt: no text in it \(1 records read, 0 kept; dropped: 1 empty\); give another data.source"),
        ("one line only\n", 350, "a.txt: 1 documents with 1 lines of text, too few .*; give more text"),
        ("some lines\nof text\nand more\n" * 9, 9000, r"data.vocab_size=9000 is too large for this corpus: .* at most"),
    ],
)
def test_a_corpus_that_cannot_be_prepared_leaves_nothing(
    tmp_path: Path, text: str, vocab_size: int, message: str
) -> None:
    source = tmp_path / "a.txt"
    source.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        prepare(DataConfig(source=str(source), vocab_size=vocab_size), PrepareConfig(), tmp_path / "root")
    assert "\n" not in str(error.value)
    assert [path.suffix for path in (tmp_path / "root").iterdir()] == [".lock"]


def test_a_source_that_changes_while_it_is_read_is_refused(
    write_jsonl: WriteJsonl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(25)
    learn = preparing._learn

    def learn_then_change(*args: object) -> object:
        learned = learn(*args)  # type: ignore[arg-type]
        with source.open("a") as stream:
            stream.write('{"text": "one more"}\n')
        return learned

    monkeypatch.setattr(preparing, "_learn", learn_then_change)
    with pytest.raises(UserError, match="^data.source=.*corpus.jsonl: the text changed .*; run the command again"):
        prepare(small(source), PrepareConfig(), tmp_path / "root")


def test_quarantined_records_are_in_a_file_and_in_the_manifest(
    write_jsonl: WriteJsonl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(25)
    with source.open("ab") as stream:
        stream.write(b'broken\n{"text": null}\n')
    with pytest.raises(UserError, match="record 26"):
        prepare(small(source), PrepareConfig(), tmp_path / "root")
    corpus = prepare(small(source), PrepareConfig(on_corrupt="quarantine"), tmp_path / "root")
    assert corpus.manifest["records"] == {
        "read": 27,
        "kept": 25,
        "dropped": {"null_text": 1},
        "quarantined": {"malformed_json": 1},
        "repaired": {},
    }
    entries = (corpus.folder / "quarantine.jsonl").read_text().splitlines()
    assert [json.loads(entry)["reason"] for entry in entries] == ["malformed_json"]
    said = capsys.readouterr().out
    assert "27 records read, 25 kept; dropped: 1 null_text; quarantined: 1 malformed_json" in said
    corpus.verify()


def test_few_documents_are_cut_at_line_ends_and_it_is_said(
    tmp_path: Path, sentences: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a.txt"
    source.write_text(sentences(200, seed=4))
    corpus = prepare(small(source), PrepareConfig(), tmp_path / "root")
    assert "1 documents, too few to split whole" in capsys.readouterr().out
    assert "".join(texts_of(corpus, "train") + texts_of(corpus, "val") + texts_of(corpus, "test")) == source.read_text()


def test_the_tokenizer_learns_from_training_text_only(write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    source = write_jsonl(25)
    lines = source.read_text().splitlines()
    lines[0] = json.dumps({"text": "zyzzyva " * 500})
    source.write_text("\n".join(lines) + "\n")
    corpus = prepare(small(source), PrepareConfig(), tmp_path / "root")
    assert not any("zy" in piece for piece in corpus.tokenizer.pieces)
    assert texts_of(corpus, "test")[0] == "zyzzyva " * 500


def test_the_training_sample_is_bounded_even_and_repeatable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = []
    for _ in range(2):
        sample = preparing._Sample(1000)
        for number in range(1000):
            sample.add(f"{number:09d}\n")
        drawn.append(sample.parts)
    assert drawn[0] == drawn[1] == sorted(drawn[0])
    assert 250 < sum(map(len, drawn[0])) <= 1000
    assert int(drawn[0][0]) < 200 and int(drawn[0][-1]) > 800
    one = preparing._Sample(10)
    one.add("a part that is longer than the whole sample")
    assert len(one.parts) == 1
