"""The cache salt in a record's extras: whose it is."""

from __future__ import annotations

import struct

_LENGTH = struct.Struct("<I")


def salt_of(extras: bytes) -> str:
    """The salt, or an empty text if there is none or the extras are of no known form."""
    fields: list[bytes] = []
    place = 0
    while place + _LENGTH.size <= len(extras):
        (length,) = _LENGTH.unpack_from(extras, place)
        place += _LENGTH.size
        fields.append(extras[place : place + length])
        place += length
    for kind, value in zip(fields[::2], fields[1::2], strict=False):
        if kind == b"salt":
            return value.decode(errors="replace")
    return ""
