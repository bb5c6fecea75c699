"""Exact round trip, equal ids however the text is cut, and errors that name the setting."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.data import tokenizer as tokenizers
from reprise.data.documents import Document
from reprise.data.tokenizer import (
    EOS_WORD,
    SubwordTokenizer,
    WordTokenizer,
    build_word_vocabulary,
    split_line,
    train_subword,
)
from reprise.runtime import UserError

Sentences = Callable[..., str]


@pytest.fixture(scope="module")
def subword(sentences: Sentences) -> SubwordTokenizer:
    return train_subword([sentences(300, seed=0)], vocab_size=400)[0]


any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"))


@settings(deadline=None, max_examples=200)
@given(text=any_text)
def test_any_text_comes_back_exactly(subword: SubwordTokenizer, text: str) -> None:
    assert subword.decode(subword.encode(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        " two  spaces ",
        "\n\n a\tb\r\n",
        "e\u0301 \ufb01 \uff21",
        "a\0b",
        "\ufeffx\u200b",
        "12345",
        "日本語 😀",
        "\u2028",
    ],
)
def test_text_that_normalisers_change_comes_back_exactly(subword: SubwordTokenizer, text: str) -> None:
    assert subword.decode(subword.encode(text)) == text


def test_names_of_control_symbols_in_text_are_ordinary_text(subword: SubwordTokenizer) -> None:
    ids = subword.encode("<mask> </s> <sentinel_3> <0x41>")
    assert min(ids) > 20
    assert subword.decode(ids) == "<mask> </s> <sentinel_3> <0x41>"


def test_special_ids_are_the_reserved_ones(subword: SubwordTokenizer) -> None:
    assert (subword.eos_id, subword.pad_id, subword.mask_id) == (2, 3, 4)
    assert subword.pieces[4:20] == ["<mask>", *(f"<sentinel_{number}>" for number in range(15))]
    assert subword.vocab_size == len(subword.pieces) == 400


def test_documents_end_in_eos_and_do_not_depend_on_parts_or_threads(
    subword: SubwordTokenizer, sentences: Sentences, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [sentences(40, seed=1), "one line without an end", "\n", " \n\nx"]
    documents = [Document(str(number), text) for number, text in enumerate(texts)]
    monkeypatch.setattr(tokenizers, "ENCODE_PART_CHARACTERS", 1 << 30)
    whole = [[*subword.encode(text), subword.eos_id] for text in texts]
    monkeypatch.setattr(tokenizers, "ENCODE_PART_CHARACTERS", 50)
    for num_threads in (1, 2):
        encoded = subword.encode_documents(documents, num_threads=num_threads)
        assert [ids.tolist() for ids in encoded] == whole
    assert [[*subword.encode(text), subword.eos_id] for text in texts] == whole


def test_a_lone_surrogate_is_named_and_not_a_crash(subword: SubwordTokenizer) -> None:
    with pytest.raises(UserError, match="lone surrogate at character 2"):
        subword.encode("ab\ud800")


def test_equal_text_gives_equal_files_and_fingerprints(subword: SubwordTokenizer, sentences: Sentences) -> None:
    again = train_subword([sentences(300, seed=0)], vocab_size=400)[0]
    assert again.model_bytes() == subword.model_bytes()
    other = train_subword([sentences(300, seed=0)], vocab_size=399)[0]
    assert again.fingerprint == subword.fingerprint != other.fingerprint
    assert tokenizers.load("bpe", subword.model_bytes()).fingerprint == subword.fingerprint


def test_vocabulary_errors_give_the_limits_and_the_limits_work(sentences: Sentences) -> None:
    texts = [sentences(20, seed=0)]
    with pytest.raises(UserError, match=r"data.vocab_size=9000 is too large .* at most (\d+)") as large:
        train_subword(texts, vocab_size=9000)
    most = int(str(large.value).split()[-1])
    assert train_subword(texts, vocab_size=most)[0].vocab_size == most
    with pytest.raises(UserError, match=r"data.vocab_size=280 is too small .* at least (\d+)") as small:
        train_subword(texts, vocab_size=280)
    least = int(str(small.value).split()[-1])
    assert train_subword(texts, vocab_size=least)[0].vocab_size == least
    with pytest.raises(UserError, match="data.vocab_size"):
        train_subword(["\n"], vocab_size=300)


def test_long_lines_and_reserved_characters_are_learned_from_and_counted(sentences: Sentences) -> None:
    # All lines are above the limit of the trainer, which would stop without one to learn from.
    line = sentences(600, seed=3).replace("\n", " ")
    assert len(line) > 2 * 4192
    learned, seen = train_subword([line], vocab_size=400)
    assert "the" in "".join(learned.pieces) and seen == {"bytes": len(line), "skipped_bytes": 0}
    reserved, seen = train_subword([line.replace(".", "\u2585")], vocab_size=400)
    assert seen["skipped_bytes"] == 3 * line.count(".")
    assert any("wa" in piece for piece in reserved.pieces)


@given(text=any_text.filter(lambda text: "\n" not in text), max_bytes=st.integers(4, 40))
def test_split_lines_join_to_the_line_and_keep_the_bound(text: str, max_bytes: int) -> None:
    parts = list(split_line(text, max_bytes=max_bytes))
    assert "".join(parts) == text
    assert all(len(part.encode()) <= max_bytes for part in parts)


def test_split_lines_cut_at_blanks() -> None:
    assert list(split_line("aaa bbb ccc", max_bytes=8)) == ["aaa bbb", " ccc"]


def test_words_and_lines_round_trip_in_a_closed_vocabulary() -> None:
    words = build_word_vocabulary([Document("x", " b a b \n"), Document("y", " c <unk> b \n")])
    assert words.pieces == [EOS_WORD, "b", "<unk>", "a", "c"]
    assert words.encode("b a\nc") == [1, 3, 0, 4]
    assert words.decode([1, 3, 0, 4, 0]) == "b a\nc\n"
    loaded = tokenizers.load("word", words.model_bytes())
    assert isinstance(loaded, WordTokenizer) and loaded.fingerprint == words.fingerprint
    with pytest.raises(UserError, match=r"'zebra' is not among the 5 words .*; write <unk>$"):
        words.encode("a zebra")


@pytest.mark.parametrize("text", [" b a \n c \n", " b a \n c "])
def test_a_word_level_document_has_one_eos_a_line(text: str) -> None:
    document = Document("x", text)
    words = build_word_vocabulary([document])
    ids = words.encode_documents([document], num_threads=1)[0]
    assert words.decode(ids.tolist()) == "b a\nc\n"
    assert ids.dtype == np.uint32


def test_the_word_for_line_ends_cannot_be_a_word() -> None:
    with pytest.raises(UserError, match="^ptb.train.txt: the word <eos> stands for the end of a line; write another"):
        build_word_vocabulary([Document("ptb.train.txt", "a <eos> b")])


def test_kinds_are_told_apart() -> None:
    assert SubwordTokenizer.kind == "bpe" and WordTokenizer.kind == "word"
