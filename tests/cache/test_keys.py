from __future__ import annotations

import hashlib
import struct

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given

from kvstrata import kernels
from kvstrata.cache.keys import Extras, KeyChain, block_key
from kvstrata.cache.retention import Retention
from tests.kernels.native import needs_native

ROOT = b"r" * 32
TEXTS = st.text(max_size=6)


def test_key_is_the_digest_of_parent_tokens_and_extras_with_lengths() -> None:
    extras = Extras(salt="s").encode()
    hashed = ROOT + struct.pack("<I2I", 8, 1, 70_000) + struct.pack("<I", len(extras)) + extras
    assert block_key(ROOT, [1, 70_000], extras) == hashlib.sha256(hashed).digest()


@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_different_extras_never_encode_alike(
    salt: str, adapter: str, other_salt: str, other_adapter: str
) -> None:
    one, other = Extras(salt, adapter), Extras(other_salt, other_adapter)
    assert (one.encode() == other.encode()) == (one == other)


def test_text_moved_from_salt_to_adapter_makes_another_key() -> None:
    assert Extras("ab", "c").encode() != Extras("a", "bc").encode()
    assert Extras("x", "").encode() != Extras("", "x").encode()
    assert Extras().encode() == b""


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.lists(st.integers(1, 9), max_size=20))
def test_chain_does_not_depend_on_how_tokens_arrive(tokens: list[int], pieces: list[int]) -> None:
    whole = KeyChain(ROOT, 4, Extras("e"))
    whole.extend(np.array(tokens, dtype=np.int64))
    parts, start = KeyChain(ROOT, 4, Extras("e")), 0
    for piece in [*pieces, len(tokens)]:
        parts.extend(tokens[start : start + piece])
        start += piece
    assert list(parts.tokens) == list(whole.tokens) == tokens
    parent = ROOT
    for block, key in enumerate(whole.keys):
        assert whole.parent(block) == parent
        assert key == block_key(parent, tokens[4 * block : 4 * block + 4], Extras("e").encode())
        assert whole.block_tokens(block) == np.array(tokens[4 * block : 4 * block + 4], dtype="<u4").tobytes()
        parent = key
    assert parts.keys == whole.keys
    assert parts.contents == whole.contents
    assert len(whole.keys) == len(tokens) // 4


def test_copied_chain_grows_apart() -> None:
    chain = KeyChain(ROOT, 2)
    chain.extend([1, 2, 3])
    twin = chain.copy()
    chain.extend([4])
    twin.extend([5])
    assert chain.keys[0] == twin.keys[0]
    assert chain.keys[1] != twin.keys[1]
    assert list(twin.tokens) == [1, 2, 3, 5]


def test_another_root_or_extras_shares_no_key() -> None:
    chains = [KeyChain(ROOT, 2), KeyChain(b"q" * 32, 2), KeyChain(ROOT, 2, Extras("x"))]
    for chain in chains:
        chain.extend([1, 2, 3, 4])
    assert len({key for chain in chains for key in chain.keys}) == 6


def test_digest_can_be_shortened() -> None:
    chain = KeyChain(ROOT, 2, digest_bytes=1)
    chain.extend(range(8))
    assert [len(key) for key in chain.keys] == [1] * 4


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_ids_that_are_no_u32_are_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        KeyChain(ROOT, 2).extend([token])


def keys_of(tokens: list[int], pieces: list[int], digest_bytes: int, extras: Extras) -> KeyChain:
    chain, start = KeyChain(ROOT, 4, extras, digest_bytes), 0
    for piece in [*pieces, len(tokens)]:
        chain.extend(tokens[start : start + piece])
        start += piece
    return chain


@pytest.mark.parametrize("pieces", [[], [3, 150, 1, 2]], ids=["whole", "in pieces"])
@pytest.mark.parametrize("digest_bytes", [1, 20, 32])
@pytest.mark.parametrize(
    "extras",
    [Extras(), Extras("é" * 50), Extras(retention=Retention(4, 60))],
    ids=["none", "long", "retention"],
)
def test_kernels_chain_the_keys_that_hashlib_does(
    monkeypatch: pytest.MonkeyPatch, extras: Extras, digest_bytes: int, pieces: list[int]
) -> None:
    tokens = [(token * 2_654_435_761) % 2**32 for token in range(403)]
    chain = keys_of(tokens, pieces, digest_bytes, extras)
    assert len(chain.keys) == 100
    monkeypatch.setattr(kernels, "backend", lambda: "reference")
    plain = keys_of(tokens, pieces, digest_bytes, extras)
    assert (chain.keys, chain.contents) == (plain.keys, plain.contents)
    parent = ROOT
    for block, key in enumerate(chain.keys):
        ids, encoded = tokens[4 * block : 4 * block + 4], chain.encoded_extras(block)
        assert key == block_key(parent, ids, encoded, digest_bytes)
        assert chain.contents[block] == struct.pack("<5II", 16, *ids, len(encoded)) + encoded
        parent = key


@needs_native
def test_a_long_run_of_blocks_is_hashed_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    chain_keys = kernels.chain_keys

    def counted(parent: bytes, contents: npt.NDArray[np.uint8], key_bytes: int) -> npt.NDArray[np.uint8]:
        calls.append(len(contents))
        return chain_keys(parent, contents, key_bytes)

    monkeypatch.setattr(kernels, "chain_keys", counted)
    chain = KeyChain(ROOT, 4)
    chain.extend([1, 2, 3, 4])
    chain.extend(range(2000))
    assert calls == [500]


def test_keys_are_those_of_stores_that_exist() -> None:
    chain = KeyChain(ROOT, 16, Extras("s"))
    chain.extend(range(1024))
    assert chain.keys[0].hex() == "012aee41b5529a361078b93512e7daf4eeba96728741b71058e794ad10804eac"
    assert chain.keys[-1].hex() == "914cbe3f27f534d9c318100eb7e6bf38d003a0c87234a386645dd4cd3eac7b07"
