"""Tokenizers behind one interface: sentencepiece BPE for raw text, a closed word vocabulary for PTB-style files.

A tokenizer's fingerprint is the hash of its piece list, never of its model file: sentencepiece writes its own settings
into the file, so equal pieces can come in unequal files.
"""

import hashlib
import io
import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import sentencepiece

from reprise.data.documents import Document
from reprise.runtime import UserError

EOS_WORD = "<eos>"
MASK_PIECE = "<mask>"

# Reserved now because a trained vocabulary cannot grow later. Control symbols, not user-defined ones: a literal
# "<mask>" in a web page must not turn into the mask id.
CONTROL_PIECES = [MASK_PIECE, *(f"<sentinel_{number}>" for number in range(15))]

# sentencepiece drops a training line of more than 4,192 bytes without an error.
MAX_TRAINING_LINE_BYTES = 4000

# sentencepiece drops a training line that holds this character, which it uses for unknown text inside.
RESERVED_BY_TRAINER = "\u2585"

# Encoding in parts that end at a line end bounds memory, and changes nothing: a line feed is a piece of its own.
ENCODE_PART_CHARACTERS = 1 << 16

Ids = npt.NDArray[np.uint32]


class Tokenizer(ABC):
    """Text to ids and back.

    Attributes: `vocab_size`, `eos_id` (ends a document, and stands before the first one), `fingerprint` (sha256 of the
    piece list, hexadecimal), `kind` ("bpe" or "word").
    """

    kind: str
    eos_id: int

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = list(pieces)
        self.vocab_size = len(self.pieces)
        self.fingerprint = hashlib.sha256(json.dumps(self.pieces).encode()).hexdigest()

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with nothing added before or after it."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`. For any text that `encode` takes, `decode(encode(text)) == text` up to what the class says."""

    @abstractmethod
    def model_bytes(self) -> bytes:
        """The tokenizer as one file's content; `load` reads it back."""

    @abstractmethod
    def encode_documents(self, documents: Sequence[Document], *, num_threads: int) -> list[Ids]:
        """Ids of each document, with `<eos>` at its end. The result does not depend on `num_threads`."""


class SubwordTokenizer(Tokenizer):
    """sentencepiece BPE with byte fallback and no normalisation, so any text comes back exactly.

    The one exception is U+2581, which sentencepiece uses for the space and decodes as one; the readers in
    `documents.py` replace it before it gets here.
    """

    kind = "bpe"

    def __init__(self, model: bytes) -> None:
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        super().__init__([self._processor.id_to_piece(index) for index in range(self._processor.vocab_size())])
        self.eos_id = int(self._processor.eos_id())
        self.pad_id = int(self._processor.pad_id())
        self.mask_id = int(self._processor.piece_to_id(MASK_PIECE))

    def encode(self, text: str) -> list[int]:
        """Raises UserError when `text` holds half a surrogate pair, which no UTF-8 can carry."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"a lone surrogate at character {error.start}, which no UTF-8 can carry; leave it out"
            ) from None
        ids: list[int] = []
        for part in text_parts(text):
            ids.extend(self._processor.encode(part))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode([int(index) for index in ids]))

    def model_bytes(self) -> bytes:
        return self._model

    def encode_documents(self, documents: Sequence[Document], *, num_threads: int) -> list[Ids]:
        """Ids of every document, one array [tokens] each, in order; the same for any number of threads."""
        parts: list[str] = []
        parts_until: list[int] = []
        for document in documents:
            parts.extend(text_parts(document.text))
            parts_until.append(len(parts))
        encoded = self._processor.encode(parts, num_threads=num_threads, return_type="numpy")
        end = np.array([self.eos_id], dtype=np.uint32)
        starts = [0, *parts_until[:-1]]
        return [
            np.concatenate([*encoded[start:stop], end]).astype(np.uint32)
            for start, stop in zip(starts, parts_until, strict=True)
        ]


class WordTokenizer(Tokenizer):
    """A closed vocabulary of whitespace-separated words; a line feed is `<eos>`.

    Runs of blanks come back as one space, and blanks at line ends are lost: the words and lines round-trip.
    """

    kind = "word"

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(words)
        self._ids = {word: index for index, word in enumerate(self.pieces)}
        self.eos_id = self._ids[EOS_WORD]

    def encode(self, text: str) -> list[int]:
        """Raises UserError that names the first word outside the vocabulary."""
        ids: list[int] = []
        for number, line in enumerate(text.split("\n")):
            if number:
                ids.append(self.eos_id)
            for word in line.split():
                index = self._ids.get(word)
                if index is None:
                    instead = "<unk>" if "<unk>" in self._ids else "one of those"
                    raise UserError(
                        f"word {word!r} is not among the {self.vocab_size} words of the vocabulary; write {instead}"
                    )
                ids.append(index)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        lines: list[list[str]] = [[]]
        for index in ids:
            if index == self.eos_id:
                lines.append([])
            else:
                lines[-1].append(self.pieces[index])
        return "\n".join(" ".join(line) for line in lines)

    def model_bytes(self) -> bytes:
        return json.dumps(self.pieces, ensure_ascii=False, indent=0).encode()

    def encode_documents(self, documents: Sequence[Document], *, num_threads: int) -> list[Ids]:
        """One `<eos>` a line: a line feed at the document's end is its last `<eos>`, or one is added."""
        encoded = []
        for document in documents:
            try:
                ids = self.encode(document.text.removesuffix("\n"))
            except UserError as error:
                raise UserError(f"{document.id}: {error}") from None
            encoded.append(np.array([*ids, self.eos_id], dtype=np.uint32))
        return encoded


def load(kind: str, content: bytes) -> Tokenizer:
    """The tokenizer whose `model_bytes()` is `content`."""
    if kind == "bpe":
        return SubwordTokenizer(content)
    assert kind == "word", kind
    return WordTokenizer(json.loads(content))


def train_subword(texts: Iterable[str], *, vocab_size: int) -> tuple[SubwordTokenizer, dict[str, int]]:
    """Learn a BPE vocabulary of exactly `vocab_size` pieces.

    Returns the tokenizer and what the trainer saw: `{"bytes": ..., "skipped_bytes": ...}`. Raises UserError naming
    `data.vocab_size` and the largest (or least) size that this text supports.
    """
    seen = {"bytes": 0, "skipped_bytes": 0}
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_training_lines(texts, seen),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            # A dummy prefix would cost the exact round trip of text that begins with a space.
            add_dummy_prefix=False,
            split_digits=True,
            character_coverage=0.9999,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            control_symbols=CONTROL_PIECES,
            user_defined_symbols=["\n"],
            # The model file holds this number, and equal input must give an equal file.
            num_threads=1,
            minloglevel=3,
        )
    except RuntimeError as error:
        raise _vocabulary_error(vocab_size, str(error)) from None
    return SubwordTokenizer(model.getvalue()), seen


def build_word_vocabulary(documents: Iterable[Document]) -> WordTokenizer:
    """`<eos>` and every word of the documents, the frequent ones first (ties in code point order).

    Raises UserError naming the document that has `<eos>` as a word.
    """
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(document.text.split())
        if EOS_WORD in counts:
            raise UserError(f"{document.id}: the word {EOS_WORD} stands for the end of a line; write another for it")
    return WordTokenizer([EOS_WORD, *sorted(counts, key=lambda word: (-counts[word], word))])


def _vocabulary_error(vocab_size: int, message: str) -> UserError:
    """What sentencepiece means, in the words of our settings."""
    too_large = re.search(r"set it to a value <= (\d+)", message)
    if too_large:
        return UserError(
            f"data.vocab_size={vocab_size} is too large for this corpus: it supports at most {too_large[1]}"
        )
    too_small = re.search(r"smaller than required_chars\. (?:\d+) vs (\d+)", message)
    if too_small:
        return UserError(f"data.vocab_size={vocab_size} is too small for this corpus: it needs at least {too_small[1]}")
    return UserError(f"data.vocab_size={vocab_size}: sentencepiece cannot learn from this corpus: {message.strip()}")


def text_parts(text: str) -> Iterator[str]:
    """`text` in parts that end at a line end, each as short as that allows above ENCODE_PART_CHARACTERS."""
    start = 0
    while len(text) - start > ENCODE_PART_CHARACTERS:
        end = text.find("\n", start + ENCODE_PART_CHARACTERS - 1) + 1
        if not end:
            break
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _training_lines(texts: Iterable[str], seen: dict[str, int]) -> Iterator[str]:
    """Lines short enough for the trainer, without the line feeds; counts what it cannot take in `seen`."""
    for text in texts:
        seen["bytes"] += len(text.encode())
        if RESERVED_BY_TRAINER in text:
            seen["skipped_bytes"] += text.count(RESERVED_BY_TRAINER) * len(RESERVED_BY_TRAINER.encode())
            text = text.replace(RESERVED_BY_TRAINER, "\n")
        for line in text.split("\n"):
            if line:
                yield from split_line(line, max_bytes=MAX_TRAINING_LINE_BYTES)


def split_line(line: str, *, max_bytes: int) -> Iterator[str]:
    """Cut `line` into parts of at most `max_bytes` UTF-8 bytes, before a blank where there is one.

    The parts joined are the line. The blank stays at the head of the next part, since that is where BPE joins it.
    """
    content = line.encode()
    start = 0
    while len(content) - start > max_bytes:
        end = content.rfind(b" ", start + 1, start + max_bytes + 1)
        if end < 0:
            end = start + max_bytes
            # Never inside a character: 0b10xxxxxx continues one.
            while content[end] & 0xC0 == 0x80:
                end -= 1
        yield content[start:end].decode()
        start = end
    yield content[start:].decode()
