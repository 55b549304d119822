"""Listing the keys of a server, a page at a time, beside all that it does otherwise."""

from __future__ import annotations

from collections.abc import Iterator

from kvstrata.tiers.valkey.errors import ReplyError, ServerBrokenError
from kvstrata.tiers.valkey.node import Node

_PAGE = 1000  # keys looked at in one call


def scan(node: Node, pattern: str, timeout: float) -> Iterator[list[bytes]]:
    """Names that match a pattern, in lists that are not empty; a name may come twice, as SCAN has it.

    timeout: seconds for each page. Raises ServerError.
    """
    cursor: bytes = b"0"
    while True:
        [reply] = node.execute([("SCAN", cursor, "MATCH", pattern, "COUNT", _PAGE)], timeout)
        if not isinstance(reply, list) or len(reply) != 2 or not isinstance(reply[1], list):
            reason = str(reply) if isinstance(reply, ReplyError) else "SCAN gave something else"
            raise ServerBrokenError(reason, node.name)
        names = [name for name in reply[1] if isinstance(name, bytes)]
        if names:
            yield names
        cursor = reply[0] if isinstance(reply[0], bytes) else b"0"
        if cursor == b"0":
            return
