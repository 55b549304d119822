"""What proposes tokens, as the speculator sees it."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import Protocol

from kvstrata.engine.request import Sequence
from kvstrata.engine.settle import Verdict
from kvstrata.engine.speculation.costs import StepCosts
from kvstrata.engine.work import Work


class Drafter(Protocol):
    """Proposes the tokens that come next in running sequences, whose last token is yet to be computed.

    costs: what one token for each of some sequences takes; None where proposals cost nothing to speak of.
    """

    costs: StepCosts | None

    def outlook(self, sequence: Sequence, most: int) -> list[float]:
        """The chance that each of the next tokens is right if those before it are; of at most `most`.

        Empty where there is nothing to propose.
        """

    def draft(self, works: Listed[Work]) -> list[tuple[int, ...]]:
        """Tokens for each work: at most its room."""

    def learn(self, works: Listed[Work], verdicts: Listed[Verdict]) -> None:
        """Take note of what became of the tokens proposed in this step."""

    def tidy(self) -> None:
        """Let go of what is held for sequences that do not run any more."""

    def reset(self) -> None:
        """Forget what is cached of earlier requests."""
