"""One digest of all weights, for the model fingerprint: equal only where the stored weights are equal."""

from __future__ import annotations

import hashlib
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvstrata.models.weights import WeightSource

PIECE_BYTES = 4 << 20  # the unit of work of a thread; part of the digest's definition
THREADS = 2


def weights_digest(source: WeightSource) -> bytes:
    """32 bytes: SHA-256 over each tensor's name, format, shape, row order and the digests of its pieces.

    Tensors come in the order of their canonical names. hashlib releases the interpreter's lock, so the
    pieces are hashed in threads.
    """
    total = hashlib.sha256(b"kvstrata weights 1")
    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        tensors = [(name, source.raw(name)) for name in sorted(source.names())]
        pieces = [(name, raw, _pieces(raw.data)) for name, raw in tensors]
        digests = pool.map(_sha256, [piece for _, _, of_tensor in pieces for piece in of_tensor])
        for name, raw, of_tensor in pieces:
            order = b"" if raw.row_order is None else raw.row_order.astype("<i8").tobytes()
            head = repr((name, raw.format, raw.shape, raw.data.nbytes)).encode()
            for field in (head, order, *itertools.islice(digests, len(of_tensor))):
                total.update(len(field).to_bytes(8, "little"))
                total.update(field)
    return total.digest()


def _pieces(data: np.ndarray) -> list[memoryview]:
    flat = np.ascontiguousarray(data).reshape(-1).data
    return [flat[start : start + PIECE_BYTES] for start in range(0, len(flat), PIECE_BYTES)]


def _sha256(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()
