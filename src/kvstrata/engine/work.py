"""What one step computes: tokens of some sequences, within a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstrata.engine.request import Sequence


@dataclass(frozen=True)
class Work:
    """Tokens `start` to `start + count` of a sequence, to be computed in this step.

    room: tokens that may be proposed after them, for which there are blocks. draft: those that are, computed
    in the same step to be accepted or not.
    """

    sequence: Sequence
    start: int
    count: int
    room: int = 0
    draft: tuple[int, ...] = ()

    @property
    def samples(self) -> bool:
        """Whether the last of its tokens is the last one known: the next is then to be sampled."""
        return self.start + self.count == self.sequence.num_tokens

    @property
    def is_prefill(self) -> bool:
        return self.start < len(self.sequence.request.prompt_token_ids)


# From a step's decodes and the most that may be proposed to how many tokens are to be, for each.
Allot = Callable[[list[Work], int], list[int]]


class Step:
    """The work of one step as it is put together. left: tokens of the budget that nobody has yet.

    rooms: tokens to be proposed for a sequence.
    """

    def __init__(self, budget: int) -> None:
        self.works: dict[Sequence, Work] = {}
        self.rooms: dict[Sequence, int] = {}
        self.left = budget

    def count(self, sequence: Sequence) -> int:
        """Tokens of a sequence that are to be computed."""
        work = self.works.get(sequence)
        return 0 if work is None else work.count

    def put(self, work: Work) -> None:
        """Add a work, in place of an earlier one of its sequence."""
        self.left -= work.count - self.count(work.sequence)
        self.works[work.sequence] = work

    def drop(self, sequence: Sequence) -> None:
        """Take out a sequence's work, if it has any."""
        self.left += self.count(sequence)
        self.works.pop(sequence, None)
