"""What a task says of its settings once it has what they are about."""

import pytest

from reprise.config import Config
from reprise.data.tokenizer import EOS_WORD, WordTokenizer
from reprise.runtime import UserError
from reprise.tasks import encode_prompt


def test_a_prompt_that_the_tokenizer_cannot_read_is_refused_by_its_key() -> None:
    tokenizer = WordTokenizer([EOS_WORD, "the", "river", "<unk>"])
    assert encode_prompt(Config(prompt="the river"), tokenizer) == [1, 2]
    with pytest.raises(UserError) as caught:
        encode_prompt(Config(prompt="the delta"), tokenizer)
    assert str(caught.value) == (
        "prompt='the delta': word 'delta' is not among the 4 words of the vocabulary; write <unk>"
    )
