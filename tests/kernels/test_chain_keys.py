"""Chained keys: SHA-256 as FIPS 180-4 has it, the same as hashlib's on every instruction set."""

from __future__ import annotations

import hashlib
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvstrata.kernels import reference_keys
from tests.kernels.native import everywhere, needs_native

chain_keys = torch.ops.kvstrata.chain_keys

# The examples that NIST publishes beside FIPS 180-4, and the empty message.
VECTORS = (
    (b"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
    (b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
    (
        b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
    ),
    (
        b"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrs"
        b"mnopqrstnopqrstu",
        "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1",
    ),
    (b"a" * 1_000_000, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"),
)


def tensor(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def rows(contents: list[bytes]) -> Tensor:
    return tensor(b"".join(contents)).view(len(contents), -1)


def listed(keys: Tensor) -> list[bytes]:
    return [bytes(key) for key in keys.tolist()]


def by_hashlib(parent: bytes, contents: list[bytes], key_bytes: int) -> list[bytes]:
    keys = [parent]
    for content in contents:
        keys.append(hashlib.sha256(keys[-1] + content).digest()[:key_bytes])
    return keys[1:]


@needs_native
@pytest.mark.parametrize(("message", "digest"), VECTORS, ids=["empty", "abc", "448 bits", "896 bits", "long"])
def test_published_vectors(message: bytes, digest: str) -> None:
    whole, halves = tensor(message), len(message) // 2
    assert listed(everywhere(lambda: chain_keys(tensor(b""), whole.view(1, -1), 32)))[0].hex() == digest
    split = everywhere(lambda: chain_keys(whole[:halves], whole[halves:].view(1, -1), 32))
    assert listed(split)[0].hex() == digest


@needs_native
@pytest.mark.parametrize("parent_bytes", [0, 1, 32, 65])
def test_every_length_pads_as_hashlib_does(parent_bytes: int) -> None:
    data = bytes(range(256)) * 2
    for length in range(200):
        parent, contents = data[:parent_bytes], [data[1 : 1 + length], data[7 : 7 + length]]
        keys = everywhere(lambda p=parent, c=contents: chain_keys(tensor(p), rows(c).view(2, -1), 32))  # type: ignore[misc]
        assert listed(keys) == by_hashlib(parent, contents, 32), length


@given(
    st.binary(max_size=40),
    st.integers(0, 150).flatmap(
        lambda n: st.lists(st.binary(min_size=n, max_size=n), min_size=1, max_size=5)
    ),
    st.integers(1, 32),
)
def test_chains_are_those_of_hashlib_in_any_backend(
    parent: bytes, contents: list[bytes], key_bytes: int
) -> None:
    given_ = (tensor(parent), rows(contents).view(len(contents), -1), key_bytes)
    expected = by_hashlib(parent, contents, key_bytes)
    assert listed(chain_keys(*given_)) == expected
    assert listed(reference_keys.chain_keys(*given_)) == expected


def test_a_chain_goes_on_from_its_middle() -> None:
    contents = torch.arange(20 * 72).remainder(251).to(torch.uint8).view(20, 72)
    whole = chain_keys(tensor(b"root"), contents, 32)
    for first in (1, 7, 19):
        assert torch.equal(chain_keys(whole[first - 1], contents[first:], 32), whole[first:])


def test_bytes_that_lie_at_odd_addresses_are_hashed_alike() -> None:
    data = torch.arange(300).remainder(253).to(torch.uint8)
    parent, contents = data[3:35], data[37:277].view(4, 60)
    assert torch.equal(chain_keys(parent, contents, 32), chain_keys(parent.clone(), contents.clone(), 32))


def test_no_blocks_have_no_keys() -> None:
    assert chain_keys(tensor(b"root"), torch.empty(0, 72, dtype=torch.uint8), 20).shape == (0, 20)


@pytest.mark.parametrize("run", [chain_keys, reference_keys.chain_keys], ids=["operator", "reference"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parent": torch.zeros(32)}, "parent has dtype torch.float32, expected torch.uint8"),
        (
            {"parent": torch.zeros(1, 32, dtype=torch.uint8)},
            "parent has shape [1, 32], expected [parent_bytes]",
        ),
        ({"contents": torch.zeros(2, 72, dtype=torch.int8)}, "contents has dtype torch.int8, expected torch"),
        (
            {"contents": torch.zeros(72, dtype=torch.uint8)},
            "contents has shape [72], expected [num_blocks, content_bytes]",
        ),
        (
            {"contents": torch.zeros(72, 2, dtype=torch.uint8).t()},
            "contents has strides [1, 2], expected contiguous",
        ),
        ({"key_bytes": 0}, "key_bytes is 0, expected 1 to 32"),
        ({"key_bytes": 33}, "key_bytes is 33, expected 1 to 32"),
    ],
)
def test_wrong_arguments_are_named(run: object, change: dict[str, object], message: str) -> None:
    arguments = {
        "parent": torch.zeros(32, dtype=torch.uint8),
        "contents": torch.zeros(2, 72, dtype=torch.uint8),
        "key_bytes": 32,
    }
    with pytest.raises(ValueError, match=re.escape(f"chain_keys: {message}")):
        run(**(arguments | change))  # type: ignore[operator]
