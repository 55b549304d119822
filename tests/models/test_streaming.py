from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocabularies import byte_level_metadata, sentencepiece_metadata

from kvstrata.errors import ConfigError
from kvstrata.models.streaming import IncrementalDecoder, StopMatcher
from kvstrata.models.tokenizer_gguf import tokenizer_from_gguf

BYTE_LEVEL = tokenizer_from_gguf(byte_level_metadata())
PREFIXED = tokenizer_from_gguf(sentencepiece_metadata())


def pieces(items: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted({min(cut, len(items)) for cut in cuts}), len(items)]
    return [items[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, PREFIXED], ids=["byte-level", "sentencepiece"])
@given(ids=st.lists(st.integers(0, 300)), cuts=st.lists(st.integers(0, 50)), skip=st.booleans())
def test_joined_stream_equals_one_decode(tokenizer, ids, cuts, skip) -> None:
    decoder = IncrementalDecoder(tokenizer, skip)
    streamed = "".join(decoder.push(part) for part in pieces(ids, cuts)) + decoder.finish()
    assert streamed == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦🏳️‍🌈", "한국어", "e\u0301\u0323", "日本語", "\U0010ffff"])
def test_a_stream_never_shows_half_a_character(text: str) -> None:
    decoder = IncrementalDecoder(BYTE_LEVEL)
    shown = ""
    for token_id in BYTE_LEVEL.encode(text):
        shown += decoder.push([token_id])
        assert text.startswith(shown)
    assert shown == text
    assert decoder.finish() == ""


def test_a_stream_that_ends_within_a_character_shows_one_replacement() -> None:
    decoder = IncrementalDecoder(BYTE_LEVEL)
    assert decoder.push(BYTE_LEVEL.encode("a☃")[:-1]) == "a"
    assert decoder.finish() == "\ufffd"


def test_a_special_token_within_a_character_does_not_break_it() -> None:
    first, *rest = BYTE_LEVEL.encode("☃")
    ids = [first, 2, *rest]
    decoder = IncrementalDecoder(BYTE_LEVEL)
    assert "".join(decoder.push([token_id]) for token_id in ids) == BYTE_LEVEL.decode(ids) == "☃"


def test_the_space_prefix_is_taken_off_over_a_push() -> None:
    bos, word = PREFIXED.encode("the")
    decoder = IncrementalDecoder(PREFIXED)
    assert [decoder.push([bos]), decoder.push([word]), decoder.push([word])] == ["", "the", " the"]


def first_stop(text: str, stop: list[str]) -> tuple[int, str] | None:
    """The stop string that is completed first, the longest of those that end together, and where it ends."""
    for end in range(1, len(text) + 1):
        ending = [item for item in stop if text[:end].endswith(item)]
        if ending:
            return end, max(ending, key=len)
    return None


def could_continue(text: str, stop: list[str]) -> int:
    """Length of the longest end of a text that begins a stop string without completing it."""
    return max((n for item in stop for n in range(len(item)) if text.endswith(item[:n])), default=0)


@given(
    text=st.text("abc", max_size=30),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30)),
    include=st.booleans(),
)
def test_stops_are_those_of_the_whole_text_however_it_is_cut(text, stop, cuts, include) -> None:
    matcher = StopMatcher(stop, include)
    found = first_stop(text, stop)
    shown, seen = "", ""
    edges = [0, *sorted({min(cut, len(text)) for cut in cuts}), len(text)]
    for start, end in pairwise(edges):
        seen = text[:end]
        emit, stopped = matcher.push(text[start:end])
        shown += emit
        if found is not None and end >= found[0]:
            assert stopped == found[1]
        else:
            assert stopped is None
            assert shown == seen[: len(seen) - could_continue(seen, stop)]
    shown += matcher.finish()
    if found is None:
        assert shown == text
    else:
        end, item = found
        assert shown == text[: end if include else end - len(item)]


def test_a_stop_string_over_several_pushes_is_never_shown() -> None:
    matcher = StopMatcher(["<END>"])
    assert [matcher.push(part) for part in ("hello <", "EN", "D> more")] == [
        ("hello ", None),
        ("", None),
        ("", "<END>"),
    ]
    assert matcher.finish() == ""


def test_a_stop_string_that_never_completes_is_shown_later() -> None:
    matcher = StopMatcher(["<END>"])
    assert matcher.push("a<EN") == ("a", None)
    assert matcher.push("Dx<E") == ("<ENDx", None)
    assert matcher.finish() == "<E"


def test_nothing_is_shown_after_a_stop() -> None:
    matcher = StopMatcher(["."])
    matcher.push("a. b")
    assert matcher.push("c") == ("", ".")
    assert matcher.finish() == ""


def test_without_stop_strings_nothing_is_held_back() -> None:
    matcher = StopMatcher([])
    assert matcher.push("abc") == ("abc", None)
    assert matcher.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stop: .*empty entry"):
        StopMatcher(["a", ""])
