"""The order in which waiting sequences are looked at: priority, then fair between users, then arrival.

Fairness is by service received: among users who wait at the same priority, the one who has been served the
fewest tokens goes first (the virtual token counter of Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024). A user who comes back from idleness starts at the least counter of those present, so that
idle time earns no credit.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator

from kvstrata.engine.request import Sequence


class WaitingQueue:
    """Sequences that wait for a place: new ones, and preempted ones, which go first at their priority."""

    def __init__(self) -> None:
        self._waiting: dict[Sequence, None] = {}
        self._served: Counter[str] = Counter()  # tokens, of users with work in the engine
        self._active: Counter[str] = Counter()  # requests a user has in the engine

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting

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
        self._waiting[sequence] = None

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence, if it waits."""
        self._waiting.pop(sequence, None)

    def serve(self, user: str, tokens: int) -> None:
        """Count tokens computed for a user."""
        if self._active[user]:
            self._served[user] += tokens

    def in_order(self) -> Iterator[Sequence]:
        """The waiting sequences, first to be served first; serving while iterating re-orders what is left."""
        classes: defaultdict[tuple[int, bool], defaultdict[str, deque[Sequence]]] = defaultdict(
            lambda: defaultdict(deque)
        )
        for sequence in sorted(self._waiting, key=lambda s: s.rank):
            request = sequence.request
            classes[request.options.priority, request.first_scheduled is None][request.options.user].append(
                sequence
            )
        for key in sorted(classes):
            users = classes[key]
            while users:
                user = min(users, key=lambda u: (self._served[u], users[u][0].rank))
                first = users[user].popleft()
                if not users[user]:
                    del users[user]
                if first in self._waiting:
                    yield first
