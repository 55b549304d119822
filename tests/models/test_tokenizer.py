from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocabularies import byte_level_metadata, sentencepiece_metadata

from kvstrata.errors import RequestError
from kvstrata.models.tokenizer_gguf import tokenizer_from_gguf

BYTE_LEVEL = tokenizer_from_gguf(byte_level_metadata())
WITH_BOS = tokenizer_from_gguf(byte_level_metadata(add_bos_token=True))
PREFIXED = tokenizer_from_gguf(sentencepiece_metadata())
UNPREFIXED = tokenizer_from_gguf(sentencepiece_metadata(add_space_prefix=False))

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXT)
def test_byte_level_text_survives_encoding_and_decoding(text: str) -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text), skip_special_tokens=False) == text


@given(TEXT.filter(lambda text: "▁" not in text))
def test_sentencepiece_text_survives_encoding_and_decoding(text: str) -> None:
    assert PREFIXED.decode(PREFIXED.encode(text)) == text
    assert UNPREFIXED.decode(UNPREFIXED.encode(text)) == text


@given(TEXT)
def test_plain_text_never_becomes_a_special_token(text: str) -> None:
    forged = f"{text}<|im_start|>{text}<s></s>"
    for tokenizer in (BYTE_LEVEL, PREFIXED):
        ids = tokenizer.encode(forged, add_special_tokens=False)
        assert not tokenizer.special_ids.intersection(ids)


def test_special_tokens_in_text_are_parsed_on_request() -> None:
    assert BYTE_LEVEL.encode("<|im_start|>", parse_special=True) == [1]
    assert PREFIXED.encode("</s>", add_special_tokens=False, parse_special=True) == [2]


def test_parsing_for_one_caller_does_not_change_it_for_the_next() -> None:
    before = BYTE_LEVEL.encode("<|im_end|>")
    BYTE_LEVEL.encode("<|im_end|>", parse_special=True)
    assert BYTE_LEVEL.encode("<|im_end|>") == before


def test_user_defined_tokens_are_found_without_being_asked_for() -> None:
    (user,) = BYTE_LEVEL.encode("<user>")
    assert BYTE_LEVEL.token_bytes(user) == b"<user>"
    assert user not in BYTE_LEVEL.special_ids
    assert len(UNPREFIXED.encode("\n\n<h1>", add_special_tokens=False)) == 2


def test_bos_comes_first_once() -> None:
    assert WITH_BOS.encode("the")[0] == 1
    assert 1 not in WITH_BOS.encode("the", add_special_tokens=False)
    assert WITH_BOS.encode("<|im_start|>the", parse_special=True).count(1) == 1
    assert WITH_BOS.encode("<|im_start|>the")[0] == 1, "spelt-out text is no BOS when it is not parsed"


def test_eos_comes_last_where_the_file_asks_for_it() -> None:
    assert tokenizer_from_gguf(byte_level_metadata(add_eos_token=True)).encode("the")[-1] == 2


def test_space_prefix_is_taken_off_after_bos_and_kept_in_a_continuation() -> None:
    ids = PREFIXED.encode("the")
    assert ids == [1, PREFIXED.encode("the", add_special_tokens=False)[0]]
    assert PREFIXED.decode(ids) == "the"
    assert PREFIXED.decode(ids, skip_special_tokens=False) == "<s>the"
    assert PREFIXED.decode(ids[1:]) == " the"
    assert PREFIXED.decode(PREFIXED.encode("  the")) == "  the"


def test_parsed_template_text_survives_encoding_and_decoding() -> None:
    text = "<s>the</s>the"
    ids = PREFIXED.encode(text, parse_special=True)
    word = ids[1]
    assert PREFIXED.token_bytes(word) == b" the"
    assert ids == [1, word, 2, word]
    assert PREFIXED.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_skipped_unless_wanted() -> None:
    ids = [1, *BYTE_LEVEL.encode("the"), 2]
    assert BYTE_LEVEL.decode(ids) == "the"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == "<|im_start|>the<|im_end|>"


def test_token_bytes_are_the_exact_bytes() -> None:
    text = "é the\n\n☃"
    for tokenizer in (BYTE_LEVEL, UNPREFIXED):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert PREFIXED.token_bytes(3 + 0xE2) == b"\xe2"


def test_ids_past_the_vocabulary_have_no_text() -> None:
    assert BYTE_LEVEL.token_bytes(BYTE_LEVEL.vocab_size) == b""
    assert BYTE_LEVEL.token_bytes(-1) == b""
    assert BYTE_LEVEL.decode([10**9, *BYTE_LEVEL.encode("the")]) == "the"


def test_tokens_that_are_half_a_character_decode_to_the_replacement_character() -> None:
    half = BYTE_LEVEL.encode("☃")[:2]
    assert BYTE_LEVEL.decode(half) == "\ufffd"


def test_half_a_surrogate_pair_is_refused_with_its_position() -> None:
    for tokenizer in (BYTE_LEVEL, PREFIXED):
        with pytest.raises(RequestError, match=r"character 2 is U\+D83D"):
            tokenizer.encode("ab\ud83dcd")


def test_bos_and_eos_have_their_texts() -> None:
    assert (BYTE_LEVEL.bos_token, BYTE_LEVEL.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer_from_gguf(byte_level_metadata(bos_token_id=None)).bos_token == ""
