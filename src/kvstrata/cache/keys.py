"""Block keys: what a full block's content is called, whoever computed it.

A key is SHA-256 over the parent's key, the block's token ids and the extras that change what K and V would
be; the first parent is the model fingerprint. So equal keys mean equal token ids from position 0 on, under
the same model and extras, up to collisions, which the prefix index finds by comparing the content itself.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from kvstrata.cache.chaining import chained_keys, split_rows
from kvstrata.cache.retention import FULL, Retention

KEY_BYTES = 32
_RETENTION = b"retention"
SEGMENT_BLOCKS = 16  # blocks of a chain that are placed, leased and looked up together
SEGMENT_BYTES = 8  # of a segment's name

TokenIds = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True)
class Extras:
    """What separates caches of the same tokens.

    salt: chosen by the caller; adapter: weights on top of the model's. retention: which tokens a query sees;
    it separates only blocks in which some token hides others, since up to there K and V are the same.
    """

    salt: str = ""
    adapter: str = ""
    retention: Retention = FULL

    def encode(self) -> bytes:
        """Each field that is set, as type, length and UTF-8 text, so that no two different extras encode
        alike; without the retention.
        """
        return _field(b"salt", self.salt) + _field(b"adapter", self.adapter)

    def encode_hiding(self) -> bytes:
        """The same for blocks that depend on the retention."""
        return self.encode() + _field(_RETENTION, "" if self.retention.is_full else str(self.retention))


def _field(kind: bytes, text: str) -> bytes:
    if not text:
        return b""
    value = text.encode()
    return struct.pack("<I", len(kind)) + kind + struct.pack("<I", len(value)) + value


def salt_of(encoded: bytes) -> str:
    """The salt in what `Extras.encode` gave; empty where it has none or is of no known form."""
    value = _value(encoded, b"salt")
    return "" if value is None else value.decode(errors="replace")


def hides(encoded: bytes) -> bool:
    """Whether these extras are of a block that depends on a retention, and so is found without all before."""
    return _value(encoded, _RETENTION) is not None


def _value(encoded: bytes, wanted: bytes) -> bytes | None:
    place = 0
    while place < len(encoded):
        kind, place = _framed(encoded, place)
        value, place = _framed(encoded, place)
        if kind == wanted:
            return value
    return None


def _framed(encoded: bytes, place: int) -> tuple[bytes, int]:
    """A field and the place after it; extras that a record brings may end anywhere."""
    length = int.from_bytes(encoded[place : place + 4], "little")
    return encoded[place + 4 : place + 4 + length], place + 4 + length


def block_key(parent: bytes, token_ids: TokenIds, extras: bytes, digest_bytes: int = KEY_BYTES) -> bytes:
    """The key of one full block: SHA-256(parent, token ids as u32 little-endian, extras), lengths before
    both.

    digest_bytes: bytes that are kept of the digest; tests shorten it to make keys collide.
    """
    raw = np.asarray(token_ids, dtype="<u4").tobytes()
    content = struct.pack("<I", len(raw)) + raw + struct.pack("<I", len(extras)) + extras
    return sha256(parent + content).digest()[:digest_bytes]


def _contents(tokens: array[int], num_blocks: int, extras: bytes) -> npt.NDArray[np.uint8]:
    """What `block_key` hashes after the parent of each of these blocks: `[num_blocks, content bytes]`."""
    raw = np.frombuffer(tokens, dtype=np.uint32).reshape(num_blocks, -1)
    raw_bytes = 4 * raw.shape[1]
    tail = struct.pack("<I", len(extras)) + extras
    contents = np.empty((num_blocks, 4 + raw_bytes + len(tail)), dtype=np.uint8)
    contents[:, :4] = np.frombuffer(struct.pack("<I", raw_bytes), dtype=np.uint8)
    contents[:, 4 : 4 + raw_bytes] = raw.astype("<u4", copy=False).view(np.uint8)
    contents[:, 4 + raw_bytes :] = np.frombuffer(tail, dtype=np.uint8)
    return contents


NO_EXTRAS = Extras()


class KeyChain:
    """The tokens of one sequence and the keys of its full blocks, each computed once.

    root: the first parent, the model fingerprint. own_from: the first block that carries the retention, None
    where none does. tokens: array of u32. keys:
    one for each full block. contents: for each full block the bytes that were hashed after the parent's key
    (token ids and extras), which is what tells two blocks apart whose keys collide.
    """

    __slots__ = (
        "_encoded",
        "block_size",
        "contents",
        "digest_bytes",
        "extras",
        "keys",
        "own_from",
        "root",
        "tokens",
    )

    def __init__(
        self, root: bytes, block_size: int, extras: Extras = NO_EXTRAS, digest_bytes: int = KEY_BYTES
    ) -> None:
        self.root = root
        self.block_size = block_size
        self.extras = extras
        self.own_from = extras.retention.own_from(block_size)
        self._encoded = (extras.encode(), extras.encode_hiding())
        self.digest_bytes = digest_bytes
        self.tokens = array("I")
        self.keys: list[bytes] = []
        self.contents: list[bytes] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, token_ids: TokenIds) -> None:
        """Append tokens and compute the keys of the blocks that they fill."""
        if isinstance(token_ids, np.ndarray):
            self.tokens.frombytes(np.ascontiguousarray(token_ids, dtype=np.uint32).tobytes())
        elif isinstance(token_ids, list):
            self.tokens.fromlist(token_ids)  # takes a third of the time of extend
        else:
            self.tokens.extend(token_ids)
        full = len(self.tokens) // self.block_size
        own_from = full if self.own_from is None else min(full, self.own_from)
        for end in (own_from, full):
            if end > len(self.keys):
                self._append_keys(len(self.keys), end)

    @property
    def retention(self) -> Retention:
        """Which tokens a query of this sequence sees."""
        return self.extras.retention

    def hides(self, block: int) -> bool:
        """Whether a token of this block hides others, so that its content depends on the retention."""
        return self.own_from is not None and block >= self.own_from

    def encoded_extras(self, block: int) -> bytes:
        """What is hashed of the extras for a block."""
        return self._encoded[self.hides(block)]

    def _append_keys(self, first: int, full: int) -> None:
        rows = _contents(
            self.tokens[first * self.block_size : full * self.block_size],
            full - first,
            self.encoded_extras(first),
        )
        contents = split_rows(rows)
        self.keys += chained_keys(self.parent(first), rows, contents, self.digest_bytes)
        self.contents += contents

    def parent(self, block: int) -> bytes:
        """The key before that of `block`."""
        return self.keys[block - 1] if block else self.root

    def segment(self, block: int) -> bytes:
        """The name of the segment that a full block is in: the first bytes of its first block's key."""
        return self.keys[block - block % SEGMENT_BLOCKS][:SEGMENT_BYTES].ljust(SEGMENT_BYTES, b"\0")

    def block_tokens(self, block: int) -> bytes:
        """Token ids of a full block, u32 little-endian."""
        return self.contents[block][4 : 4 + 4 * self.block_size]

    def copy(self) -> KeyChain:
        """An independent chain of the same tokens, for a fork."""
        twin = KeyChain(self.root, self.block_size, self.extras, self.digest_bytes)
        twin.tokens = self.tokens[:]
        twin.keys = self.keys.copy()
        twin.contents = self.contents.copy()
        return twin
