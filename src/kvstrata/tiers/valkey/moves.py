"""Batched look-ups, loads and stores over several servers, in rounds: who is asked next for what the first
did not have, and who keeps what the first could not take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

from kvstrata.tiers.tier import Address, DropReason, Identity, Loaded, Record, Stored
from kvstrata.tiers.valkey.copying import Copying, Hints
from kvstrata.tiers.valkey.errors import ServerError
from kvstrata.tiers.valkey.names import Names
from kvstrata.tiers.valkey.node import Node
from kvstrata.tiers.valkey.servers import Servers
from kvstrata.tiers.valkey.values import Outgoing, Values, Wanted, held

_RESERVE = 0.1  # of a look-up's time is kept for what comes after the servers' answers
_GONE = frozenset(("absent", "unavailable"))  # another server may have it all the same


class _Storing:
    """One batch on its way. answered: by which servers, of which blocks. keepers: of each block that is kept,
    one that has it.
    """

    def __init__(self, outgoing: list[Outgoing]) -> None:
        self.outgoing = outgoing
        self.answered: set[tuple[str, int]] = set()
        self.keepers: dict[int, str] = {}
        self._refused: dict[int, DropReason] = {}

    def note(self, node: Node, number: int, why: DropReason | None) -> None:
        """A server's answer about a block."""
        self.answered.add((node.name, number))
        if why is None:
            self.keepers[number] = node.name
        else:
            self._refused[number] = why

    def outcomes(self) -> list[DropReason | None]:
        """Of each block."""
        return [
            None if each.number in self.keepers else self._refused.get(each.number, "unavailable")
            for each in self.outgoing
        ]


class Moves:
    """Spreads batches over servers and gathers what they say. Any thread may use it.

    movers: for servers beside the first of a batch, which the caller's thread sees to; askers: the same for
    small calls, which must not wait for values.
    """

    def __init__(
        self,
        servers: Servers,
        names: Names,
        values: Values,
        copying: Copying,
        *,
        movers: ThreadPoolExecutor,
        askers: ThreadPoolExecutor,
    ) -> None:
        self._servers = servers
        self._names = names
        self._values = values
        self._copying = copying
        self._movers = movers
        self._askers = askers
        self.hints = Hints()

    def lookup(self, addresses: Sequence[Address], segments: Sequence[bytes], timeout: float) -> list[bool]:
        """Which blocks some server has, as far as they say so within so many seconds."""
        end = time.monotonic() + timeout * (1 - _RESERVE)
        found = [False] * len(addresses)

        def ask(node: Node, numbers: list[int]) -> None:
            names = [self._names.block(addresses[n], segments[n]) for n in numbers]
            for number, there in zip(numbers, held(node, names, end - time.monotonic()), strict=True):
                found[number] = there

        for by_node in _rounds(segments, self._sources(segments), lambda number: not found[number]):
            if time.monotonic() >= end:
                break
            self._each(self._askers, by_node, ask)
        return found

    def load(self, wanted: Sequence[Identity], into: Sequence[memoryview]) -> list[Loaded]:
        """Read blocks from the first server that has each, and have those copied that came from another."""
        outcomes = [Loaded("unavailable")] * len(wanted)
        segments = [identity.segment or own_segment(identity.address) for identity in wanted]
        asked = [
            Wanted(number, self._names.block(identity.address, segment), identity, memory)
            for number, (identity, segment, memory) in enumerate(zip(wanted, segments, into, strict=True))
        ]
        sources = self._sources(segments)
        bad: dict[Node, list[bytes]] = {}
        rounds = _rounds(segments, sources, lambda number: outcomes[number].miss is not None)
        for turn, by_node in enumerate(rounds):
            self._each(self._movers, by_node, partial(self._load_from, asked, outcomes))
            for node, numbers in by_node.items():
                hits = [number for number in numbers if outcomes[number].miss is None]
                if turn and hits:
                    self._copy_back(node, hits, asked, segments, sources)
                wrong = [asked[n].name for n in numbers if outcomes[n].miss not in {None, *_GONE}]
                if wrong:
                    bad.setdefault(node, []).extend(wrong)
        for node, names in bad.items():
            self._remove(node, names)
        return outcomes

    def store(self, records: Sequence[Record]) -> list[Stored]:
        """Keep blocks on as many servers as there should be, of those that are up."""
        segments = [r.identity.segment or own_segment(r.identity.address) for r in records]
        storing = _Storing(
            [
                Outgoing(number, self._names.block(record.identity.address, segment), record)
                for number, (record, segment) in enumerate(zip(records, segments, strict=True))
            ]
        )
        for _ in range(2):  # a second time for what a server could not take that failed just then
            targets = {segment: self._servers.keepers(segment) for segment in set(segments)}
            by_node: dict[Node, list[int]] = {}
            for number, segment in enumerate(segments):
                for node in targets[segment]:
                    if (node.name, number) not in storing.answered:
                        by_node.setdefault(node, []).append(number)
            if not by_node or self._each(self._movers, by_node, partial(self._store_to, storing)):
                break
        for number, keeper in storing.keepers.items():
            for name in self._servers.nominal(segments[number]):
                if (name, number) not in storing.answered:
                    self.hints.add(name, storing.outgoing[number].name, keeper)
        return [Stored(why) for why in storing.outcomes()]

    def touch(self, addresses: Sequence[Address], segments: Sequence[bytes]) -> None:
        """Note a use, later on, where each block should be."""
        by_node: dict[Node, list[bytes]] = {}
        for address, segment in zip(addresses, segments, strict=True):
            for node in self._servers.keepers(segment):
                by_node.setdefault(node, []).append(self._names.block(address, segment))
        for node, names in by_node.items():
            self._copying.touch(node, names)

    def delete(self, addresses: Sequence[Address], segments: Sequence[bytes], timeout: float) -> int:
        """Remove blocks from every server, also from those where they should not be."""
        names = [self._names.block(a, s) for a, s in zip(addresses, segments, strict=True)]
        there = [False] * len(names)

        def remove(node: Node, numbers: list[int]) -> None:
            replies = node.execute([("UNLINK", names[n]) for n in numbers], timeout)
            for number, reply in zip(numbers, replies, strict=True):
                there[number] = there[number] or reply == 1

        everywhere = {node: list(range(len(names))) for node in self._servers.nodes if node.is_up}
        if everywhere:
            self._each(self._askers, everywhere, remove)
        return sum(there)

    def repair(self, node: Node) -> None:
        """A server is back: have it given what it missed."""
        for name, keeper in self.hints.take(node.name):
            try:
                source = self._servers.node(keeper)
            except ServerError:
                continue  # it has left since
            self._copying.add(source, node, [name], repair=True)

    def _sources(self, segments: Sequence[bytes]) -> dict[bytes, list[Node]]:
        return {segment: self._servers.sources(segment) for segment in dict.fromkeys(segments)}

    def _each(
        self,
        threads: ThreadPoolExecutor,
        by_node: dict[Node, list[int]],
        work: Callable[[Node, list[int]], None],
    ) -> bool:
        """Do the work of all servers at once; False if one failed, which its node has noted."""
        (first, numbers), *others = by_node.items()
        futures = [threads.submit(_done, work, node, numbers) for node, numbers in others]
        try:
            went_well = _done(work, first, numbers)
        finally:
            wait(futures)  # whatever happens: nobody touches the caller's memory any more
        return all([went_well, *(future.result() for future in futures)])

    def _load_from(self, asked: list[Wanted], outcomes: list[Loaded], node: Node, numbers: list[int]) -> None:
        def note(number: int, outcome: Loaded) -> None:
            # What was found damaged is told, whatever the next server says.
            if outcome.miss is None or outcomes[number].miss in _GONE:
                outcomes[number] = outcome

        self._values.load(node, [asked[n] for n in numbers], note)

    def _copy_back(
        self,
        node: Node,
        hits: list[int],
        asked: list[Wanted],
        segments: list[bytes],
        sources: dict[bytes, list[Node]],
    ) -> None:
        by_target: dict[Node, list[bytes]] = {}
        for number in hits:
            by_target.setdefault(sources[segments[number]][0], []).append(asked[number].name)
        for target, names in by_target.items():
            if target.is_up:
                self._copying.add(node, target, names, repair=False)

    def _store_to(self, storing: _Storing, node: Node, numbers: list[int]) -> None:
        self._values.store(node, [storing.outgoing[n] for n in numbers], partial(storing.note, node))

    def _remove(self, node: Node, names: list[bytes]) -> None:
        """Values that are not what they should be are not found again."""
        _done(lambda node, _: node.execute([("UNLINK", name) for name in names]), node, [])


def _rounds(
    segments: Sequence[bytes], sources: dict[bytes, list[Node]], missing: Callable[[int], bool]
) -> Iterator[dict[Node, list[int]]]:
    """Whom to ask for which blocks, round after round: of each the next source, while it is `missing`."""
    for turn in range(max(map(len, sources.values()), default=0)):
        by_node: dict[Node, list[int]] = {}
        for number, segment in enumerate(segments):
            if missing(number) and turn < len(sources[segment]):
                by_node.setdefault(sources[segment][turn], []).append(number)
        if not by_node:
            return
        yield by_node


def own_segment(address: Address) -> bytes:
    """The segment of a block of which nobody said it: one of its own."""
    return address.key[:8]


def _done(work: Callable[[Node, list[int]], object], node: Node, numbers: list[int]) -> bool:
    """Do a server's work; False if it failed."""
    try:
        work(node, numbers)
    except ServerError:
        return False
    return True
