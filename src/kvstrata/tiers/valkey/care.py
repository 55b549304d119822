"""Looking after what is on Valkey servers, without a model; each server by itself, replicas too."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar

from kvstrata.errors import ConfigError
from kvstrata.tiers.care import Cleaned, Progress, StoredRecord
from kvstrata.tiers.disk.geometry import Geometry
from kvstrata.tiers.lifetime import Clocks
from kvstrata.tiers.record import FIXED_BYTES, RecordHeader, check_payload, decode_header, header_bytes
from kvstrata.tiers.tier import MissReason
from kvstrata.tiers.valkey.errors import ServerError
from kvstrata.tiers.valkey.figures import Survey
from kvstrata.tiers.valkey.names import BlockName, all_blocks, parse_block
from kvstrata.tiers.valkey.node import Node
from kvstrata.tiers.valkey.opening import check_servers
from kvstrata.tiers.valkey.resp import Reply
from kvstrata.tiers.valkey.scanning import scan
from kvstrata.tiers.valkey.servers import Servers
from kvstrata.tiers.valkey.settings import ValkeySettings

T = TypeVar("T")

_PATIENCE = 10.0  # seconds for each call; nobody waits for an answer meanwhile
_HEADERS_AT_ONCE = 200
_VALUES_AT_ONCE = 4
_FIRST_BYTES = header_bytes(16)  # as much as the header of a block of the usual size has
_TOKEN_BYTES_AT = 144  # see docs/store-format.md


class StoreServers:
    """A `Store` on servers. Raises ConfigError where they cannot be used, at once or later."""

    def __init__(self, settings: ValkeySettings, *, clocks: Clocks | None = None) -> None:
        self._settings = settings
        self._clocks = clocks or Clocks()
        self._servers = Servers(settings)
        try:
            check_servers(self._servers)
        except ConfigError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._servers.close()

    @property
    def geometries(self) -> list[Geometry]:
        found = {r.geometry: None for r in self.records() if r.header is not None}
        return list(found)

    @property
    def used_bytes(self) -> int:
        survey = Survey(self._servers)
        survey.ask()
        return survey.held.used_bytes

    def records(self, progress: Progress | None = None) -> Iterator[StoredRecord]:
        for node, names in self._names(_HEADERS_AT_ONCE, progress):
            yield from self._headers(node, names)

    def verify(self, progress: Progress | None = None) -> Iterator[StoredRecord]:
        for record, _ in self.payloads(None, progress):
            yield record

    def payloads(
        self, geometry: Geometry | None, progress: Progress | None = None
    ) -> Iterator[tuple[StoredRecord, memoryview]]:
        for node, names in self._names(_HEADERS_AT_ONCE, progress):
            records = self._headers(node, names)
            chosen = [
                (name, record)
                for name, record in zip(names, records, strict=True)
                if geometry is None or record.geometry == geometry
            ]
            for some in _batched(chosen, _VALUES_AT_ONCE):
                replies = self._ask(node, [("GET", name) for name, _ in some])
                for (_, record), value in zip(some, replies, strict=True):
                    yield self._verified(record, value)

    def clean(
        self, unwanted: Callable[[StoredRecord], str | None], progress: Progress | None = None
    ) -> Cleaned:
        cleaned = Cleaned(before=self.used_bytes)
        for node, names in self._names(_HEADERS_AT_ONCE, progress):
            gone = []
            for name, record in zip(names, self._headers(node, names), strict=True):
                reason = record.fault or ("expired" if record.remaining <= 0 else unwanted(record))
                if reason is None:
                    cleaned.kept += 1
                else:
                    cleaned.removed[reason] += 1
                    gone.append(name)
            if gone:
                self._ask(node, [("UNLINK", *gone)])
        cleaned.after = self.used_bytes
        return cleaned

    def _names(self, at_once: int, progress: Progress | None) -> Iterator[tuple[Node, tuple[bytes, ...]]]:
        """Names of blocks, some at a time, each once for each server that has it."""
        pattern = all_blocks(self._settings.prefix)
        seen_in_all = 0
        for node in self._servers.nodes:
            seen: set[bytes] = set()  # SCAN may give a name twice
            try:
                for page in scan(node, pattern, _PATIENCE):
                    fresh = [n for n in dict.fromkeys(page) if n not in seen and self._parsed(n) is not None]
                    seen.update(fresh)
                    for some in _batched(fresh, at_once):
                        yield node, some
                    seen_in_all += len(fresh)
                    if progress is not None:
                        progress(seen_in_all, seen_in_all)
            except ServerError as error:
                raise _told(error) from None

    def _headers(self, node: Node, names: tuple[bytes, ...]) -> list[StoredRecord]:
        words = [("GETRANGE", name, 0, _FIRST_BYTES - 1) for name in names]
        others = [word for name in names for word in (("STRLEN", name), ("PTTL", name))]
        replies = self._ask(node, [*words, *others])
        raws, facts = replies[: len(names)], replies[len(names) :]
        return [
            self._record(node, name, raw, length, left)
            for name, raw, length, left in zip(names, raws, facts[::2], facts[1::2], strict=True)
        ]

    def _record(self, node: Node, name: bytes, raw: Reply, length: Reply, left: Reply) -> StoredRecord:
        parsed = self._parsed(name)
        assert parsed is not None
        place = f"{node.name} {name.decode()}"
        header, size = self._header(node, name, raw)
        nbytes = length if isinstance(length, int) else 0
        if not isinstance(header, RecordHeader):
            geometry = Geometry(parsed.fingerprint, parsed.address.group, 1, nbytes)
            return StoredRecord(geometry, 0, None, header, place=place)
        geometry = Geometry(
            header.fingerprint, header.group, max(1, len(header.token_ids) // 4), header.payload_bytes
        )
        fault: MissReason | None = None
        if size + header.payload_bytes != nbytes:
            fault = "length"
        elif header.identity.address != parsed.address:
            fault = "address"
        remaining = header.lifetime.deadline(self._clocks) - self._clocks.monotonic()
        if isinstance(left, int) and left >= 0:
            remaining = min(remaining, left / 1e3)
        age = self._clocks.wall() - header.written
        return StoredRecord(geometry, 0, header, fault, age, remaining, place)

    def _header(self, node: Node, name: bytes, raw: Reply) -> tuple[RecordHeader | MissReason, int]:
        """The header in a value's first bytes, which are fetched anew if it is longer; and its size."""
        if not isinstance(raw, bytes) or len(raw) < FIXED_BYTES:
            return "length" if isinstance(raw, bytes) else "magic", 0
        (token_bytes,) = struct.unpack_from("<I", raw, _TOKEN_BYTES_AT)
        size = header_bytes(min(token_bytes // 4, 1 << 16))
        if size > len(raw):
            [raw] = self._ask(node, [("GETRANGE", name, 0, size - 1)])
            if not isinstance(raw, bytes):
                return "magic", size
        return decode_header(raw[:size]), size

    def _verified(self, record: StoredRecord, value: Reply) -> tuple[StoredRecord, memoryview]:
        if record.header is None or record.fault is not None:
            return record, memoryview(b"")
        raw = memoryview(value) if isinstance(value, bytes) else memoryview(b"")
        split = len(raw) - record.header.payload_bytes
        fault: MissReason | None = "absent"
        if split > 0:
            fault = check_payload(record.header, raw[:split], raw[split:], self._settings.signing_key)
        if fault is None:
            return record, raw[split:]
        changed = StoredRecord(record.geometry, 0, record.header, fault, place=record.place)
        return changed, memoryview(b"")

    def _parsed(self, name: bytes) -> BlockName | None:
        return parse_block(name, self._settings.prefix)

    def _ask(self, node: Node, commands: list[tuple[str | bytes | int, ...]]) -> list[Reply]:
        try:
            with node.transfer(time.monotonic() + _PATIENCE) as connection:
                connection.begin(time.monotonic() + 6 * _PATIENCE, _PATIENCE)
                connection.send(commands)
                return [connection.reply() for _ in commands]
        except ServerError as error:
            raise _told(error) from None


def _batched(items: Sequence[T], size: int) -> Iterator[tuple[T, ...]]:
    for begin in range(0, len(items), size):
        yield tuple(items[begin : begin + size])


def _told(error: ServerError) -> ConfigError:
    return ConfigError(f"valkey server {error.server}: {error.reason}; what is left of it was not looked at")
