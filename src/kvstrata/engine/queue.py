"""The order in which waiting sequences are looked at: priority, then fair between users, then arrival.

Fairness is by service received: among users who wait at the same priority, the one who has been served the
fewest tokens goes first (the virtual token counter of Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024). A user who comes back from idleness starts at the least counter of those present, so that
idle time earns no credit.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator

from kvstrata.engine.request import Sequence

_Class = tuple[int, bool]


class WaitingQueue:
    """Sequences that wait for a place: new ones, and preempted ones, which go first at their priority.

    They are kept in order, by class (priority, new or preempted) and user, so that a step looks at no more of
    them than it needs, however many wait.
    """

    def __init__(self) -> None:
        self._lines: dict[_Class, dict[str, list[Sequence]]] = {}  # each sorted by rank
        self._length = 0
        self._served: Counter[str] = Counter()  # tokens, of users with work in the engine
        self._active: Counter[str] = Counter()  # requests a user has in the engine

    def __len__(self) -> int:
        return self._length

    def __contains__(self, sequence: Sequence) -> bool:
        line = self._lines.get(_class(sequence), {}).get(sequence.request.options.user, [])
        place = bisect_left(line, sequence.rank, key=_rank)
        return place < len(line) and line[place] is sequence

    def arrive(self, user: str) -> None:
        """A user's request enters the engine; called once a request."""
        if not self._active[user]:
            self._served[user] = min(self._served.values(), default=0)
        self._active[user] += 1

    def depart(self, user: str) -> None:
        """A user's request has left the engine; called once a request."""
        self._active[user] -= 1
        if not self._active[user]:
            del self._active[user], self._served[user]

    def push(self, sequence: Sequence) -> None:
        """Add a sequence that waits."""
        users = self._lines.setdefault(_class(sequence), {})
        insort(users.setdefault(sequence.request.options.user, []), sequence, key=_rank)
        self._length += 1

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence, if it waits; to be called before anything that its place depends on changes."""
        if sequence not in self:
            return
        user, users = sequence.request.options.user, self._lines[_class(sequence)]
        line = users[user]
        del line[bisect_left(line, sequence.rank, key=_rank)]
        self._length -= 1
        if not line:
            del users[user]
            if not users:
                del self._lines[_class(sequence)]

    def serve(self, user: str, tokens: int) -> None:
        """Count tokens computed for a user."""
        if self._active[user]:
            self._served[user] += tokens

    def in_order(self) -> Iterator[Sequence]:
        """The waiting sequences, first to be served first.

        The one just given may be removed and its user served: that counts for those that are left.
        """
        for key in sorted(self._lines):
            users = self._lines.get(key, {})
            turns = [(self._served[user], line[0].rank, user, 0) for user, line in users.items()]
            heapq.heapify(turns)
            while turns:
                _, _, user, place = heapq.heappop(turns)
                line = users[user]
                given = line[place]
                yield given
                if place < len(line) and line[place] is given:
                    place += 1
                if place < len(line):
                    heapq.heappush(turns, (self._served[user], line[place].rank, user, place))


def _class(sequence: Sequence) -> _Class:
    return sequence.request.options.priority, sequence.request.first_scheduled is None


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank
