"""Characters split over tokens, stop texts over several tokens: the stream never shows a part of either."""

import pytest
from toy import toy_tokenizer

from kvstrata import SamplingParams
from kvstrata.engine.text import AnswerText
from kvstrata.models.tokenizer import Tokenizer, Vocabulary

TEXTS = [
    "flags \U0001f1f0\U0001f1f7 and families \U0001f469‍\U0001f469‍\U0001f467‍\U0001f466!",
    "안녕하세요 세계",
    "e\u0301\u0323 combining n\u0303 Z\u0351\u036b",
]


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token of its own, so that every character of more than one byte is split."""
    vocabulary = Vocabulary([""] * 256, byte_level=False, byte_of={i: i for i in range(256)})
    return Tokenizer(toy_tokenizer().encoder, vocabulary)


@pytest.mark.parametrize("text", TEXTS)
def test_joined_stream_equals_one_decode_and_no_piece_has_half_a_character(text: str) -> None:
    tokenizer = byte_tokenizer()
    answer = AnswerText(tokenizer, SamplingParams())
    ids = list(text.encode())
    pieces = [answer.push(token)[0] for token in ids]
    pieces.append(answer.finish()[0])
    assert "".join(pieces) == tokenizer.decode(ids) == text == answer.text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_stream_cut_inside_a_character_ends_as_one_decode_does() -> None:
    tokenizer = byte_tokenizer()
    ids = list("ab세".encode())[:-1]
    answer = AnswerText(tokenizer, SamplingParams())
    streamed = "".join(answer.push(token)[0] for token in ids) + answer.finish()[0]
    assert streamed == tokenizer.decode(ids) == "ab\ufffd"


def test_a_stop_text_over_several_tokens_is_never_shown() -> None:
    answer = AnswerText(byte_tokenizer(), SamplingParams(stop=["</end>"]))
    shown, stopped = "", None
    for token in b"text </end> more":
        piece, stopped = answer.push(token)
        shown += piece
        assert "<" not in shown
        if stopped:
            break
    assert (shown, stopped) == ("text ", "</end>")


def test_a_stop_text_that_starts_and_never_completes_is_shown_in_the_end() -> None:
    answer = AnswerText(byte_tokenizer(), SamplingParams(stop=["</end>"]))
    shown = "".join(answer.push(token)[0] for token in b"a </en b </e")
    assert shown == "a </en b "
    assert shown + answer.finish()[0] == "a </en b </e"
