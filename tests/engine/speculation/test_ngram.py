"""Look-up in the text itself: where it went on, how long the match is, and how far to trust it."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from speculating import ngram
from toy import EOS, make_toy

from kvstrata import SamplingParams
from kvstrata.engine.request import Sequence
from kvstrata.engine.speculation.ngram import ORDERS, NgramDrafter, NgramIndex


def scan(tokens: list[int]) -> tuple[int, int]:
    """What the index is to find, by looking at everything: the latest place after the longest n-gram."""
    for order in ORDERS:
        for place in range(len(tokens) - 1, order - 1, -1):
            if len(tokens) > order and tokens[place - order : place] == tokens[-order:]:
                length = order
                while length < min(32, place) and tokens[place - length - 1] == tokens[-length - 1]:
                    length += 1
                return place, length
    return 0, 0


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=120),
    st.lists(st.integers(1, 40), max_size=10),
)
@settings(deadline=None, max_examples=200)
def test_the_index_finds_what_a_scan_finds_however_the_text_grows(text: list[int], steps: list[int]) -> None:
    tokens = array("I")
    index = NgramIndex(tokens)
    for step in [*steps, len(text)]:
        tokens.extend(text[len(tokens) : len(tokens) + step])
        assert index.match() == scan(tokens.tolist())


def test_a_long_prompt_at_once_is_as_token_by_token() -> None:
    draw = random.Random(0)
    text = [draw.randrange(20) for _ in range(2000)]
    at_once, grown = NgramIndex(array("I", text)), array("I")
    slowly = NgramIndex(grown)
    for token in text:
        grown.append(token)
        slowly.match()
    assert at_once.match() == slowly.match()


def test_what_follows_goes_round_where_the_text_ends() -> None:
    index = NgramIndex(array("I", [9, 1, 2, 3, 1, 2, 3]))
    place, length = index.match()
    assert (place, length) == (4, 3)
    assert index.following(place, 8).tolist() == [1, 2, 3, 1, 2, 3, 1, 2]


def sequence_of(tokens: list[int]) -> Sequence:
    toy = make_toy()
    params = SamplingParams(max_tokens=40)
    toy.engine.add_request("x", tokens, params)
    [sequence] = toy.engine.scheduler.waiting.in_order()
    return sequence


def test_trust_grows_with_the_match_and_with_what_came_true() -> None:
    drafter = NgramDrafter()
    text = [(n * n) % 89 + 1 for n in range(40)]
    sequence = sequence_of([*text, *text[:3]])
    before = drafter.outlook(sequence, 4)
    assert len(before) == 4
    assert before == sorted(before)
    for token in text[3:12]:
        sequence.append(token, 0.0)
        after = drafter.outlook(sequence, 4)
    assert after[0] > before[0]


def test_trust_falls_where_proposals_were_wrong_though_they_were_not_used() -> None:
    drafter = NgramDrafter()
    sequence = sequence_of([1, 2, 3, 4])
    chances = []
    for n in range(12):
        for token in (1, 2, 40 + n):  # after 1, 2 there is always another token
            sequence.append(token, 0.0)
            outlook = drafter.outlook(sequence, 2)
            if token == 2:
                chances.append(outlook[0])
    assert chances[-1] < chances[0] / 2


def test_nothing_is_proposed_after_an_end_token() -> None:
    drafter = NgramDrafter()
    sequence = sequence_of([7, 8, 9, EOS, 5, 7, 8])
    assert len(drafter.outlook(sequence, 6)) == 2
    assert drafter._states[sequence].expected.tolist() == [9, EOS]


def test_finished_sequences_are_forgotten() -> None:
    toy = make_toy(speculate=ngram())
    toy.engine.add_request("x", [1, 2, 3] * 5, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    toy.run()
    assert toy.engine.speculator is not None
    drafter = toy.engine.speculator.drafter
    assert isinstance(drafter, NgramDrafter)
    assert drafter._states == {}


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_prompts_have_no_match(length: int) -> None:
    assert NgramIndex(array("I", [1] * length)).match() == (0, 0)
