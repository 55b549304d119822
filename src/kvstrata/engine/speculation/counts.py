"""What was proposed and what came of it, of one request or of all."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DraftCounts:
    """drafts: runs of proposed tokens. accepted_by_position: of all runs, how often the token at each place
    was right and all before it.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)

    @property
    def acceptance(self) -> float | None:
        """Share of the proposed tokens that were right; None where there were none."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    def add(self, length: int, accepted: int) -> None:
        """A run of so many tokens was proposed, and so many of them were right."""
        self.drafts += 1
        self.draft_tokens += length
        self.accepted_tokens += accepted
        places = self.accepted_by_position
        places.extend([0] * (length - len(places)))
        for place in range(accepted):
            places[place] += 1
