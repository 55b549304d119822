from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.models.sentencepiece_bpe import LiteralMatcher, SentencePieceBPE

# Scores out of order, ties, a token over a space inside, and parts that are no token by themselves.
SCORES = {
    "▁": -9.0, "a": -8.0, "b": -8.0, "c": -8.0, "ab": -2.0, "bc": -1.0, "abc": -3.0, "▁a": -2.0, "aa": -2.0,
    "aaa": -1.0, "▁▁": -1.0, "c▁a": 0.0, "cc": -5.0, "bb": -5.0, "▁▁▁": -4.0, "bcbc": -6.0, "b▁": -7.0,
}  # fmt: skip
IDS = {token: 300 + n for n, token in enumerate(SCORES)}
LITERALS = {"  ": 1, "   ": 2, "<b>": 3, "<bb>": 4, "\n": 5, "\n\n": 6}


def encoder(byte_ids: tuple[int, ...] = tuple(range(10, 266)), **literals: int) -> SentencePieceBPE:
    return SentencePieceBPE(
        IDS, SCORES, byte_ids=byte_ids, unknown_id=0, literals=literals, specials={}, space_prefix=False
    )


def naive_merge(text: str) -> list[str]:
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (-SCORES[pair], left)
            for left in range(len(symbols) - 1)
            if (pair := symbols[left] + symbols[left + 1]) in SCORES
        ]
        if not pairs:
            return symbols
        _, left = min(pairs)
        symbols[left : left + 2] = [symbols[left] + symbols[left + 1]]


@given(st.text("aabbc  ", max_size=40))
def test_merges_are_those_of_the_definition(text: str) -> None:
    tokens = {token_id: token for token, token_id in IDS.items()}
    assert [tokens[token_id] for token_id in encoder().encode(text, False)] == naive_merge(text)


def test_a_remembered_word_gives_the_same_ids() -> None:
    bpe = encoder()
    assert bpe.encode("abcabc abc", False) == bpe.encode("abcabc abc", False)


def test_unknown_characters_become_their_bytes() -> None:
    assert encoder().encode("aé", False) == [IDS["a"], 10 + 0xC3, 10 + 0xA9]


def test_unknown_characters_become_one_unknown_token_without_byte_tokens() -> None:
    assert encoder(byte_ids=()).encode("éüa", False) == [0, IDS["a"]]


def naive_split(text: str) -> list[str | int]:
    parts: list[str | int] = []
    position = 0
    while position < len(text):
        found = max((lit for lit in LITERALS if text.startswith(lit, position)), key=len, default=None)
        if found is not None:
            parts.append(LITERALS[found])
            position += len(found)
            continue
        if parts and isinstance(parts[-1], str):
            parts[-1] += text[position]
        else:
            parts.append(text[position])
        position += 1
    return parts


@given(st.text("  <b>\na"))
def test_literals_are_found_leftmost_and_longest(text: str) -> None:
    assert LiteralMatcher(LITERALS).split(text) == naive_split(text)


def test_no_literals_leave_the_text_whole() -> None:
    assert LiteralMatcher({}).split("abc") == ["abc"]
    assert LiteralMatcher({}).split("") == []
