"""How long leases last, how often followers look, and what they risk: by what steps take on this machine."""

from __future__ import annotations

from kvstrata.engine.cost import PrefillMeter
from kvstrata.tiers.lease_desk import LeaseDesk

_ROUND_TRIPS = 20.0  # a prompt that is computed in less than so many of them is not worth a lease
_MOST_RISK = 1.5  # times what computing alone takes, or a lease lasts, that a follower may lose by waiting
_LEAST_SECONDS, _MOST_SECONDS = 0.5, 30.0  # of a lease
_LEAST_INTERVAL, _MOST_INTERVAL = 0.005, 0.1  # seconds between two looks of a follower
_RENEW_AT = 0.4  # share of a lease's time after which it is renewed
_KEEP = 0.9  # of the slowest step, at each new one


class LeasePace:
    """Times in seconds. token_budget: of a step."""

    def __init__(self, desk: LeaseDesk, prefill: PrefillMeter, block_size: int, token_budget: int) -> None:
        self._desk = desk
        self._prefill = prefill
        self._block_size = block_size
        self._token_budget = token_budget
        self._slowest_step = 0.0

    def stepped(self, prefill_tokens: int, seconds: float) -> None:
        """A step was run."""
        if prefill_tokens:
            self._slowest_step = max(seconds, _KEEP * self._slowest_step)

    @property
    def block_seconds(self) -> float:
        """To compute a block."""
        return (self._prefill.seconds_per_token or 0.0) * self._block_size

    @property
    def lease_seconds(self) -> float:
        """That a lease lasts: longer than a step, since leases are renewed between steps."""
        return min(max(2 * self.step_seconds, _LEAST_SECONDS), _MOST_SECONDS)

    @property
    def renew_seconds(self) -> float:
        """After which it is renewed."""
        return _RENEW_AT * self.lease_seconds

    @property
    def interval(self) -> float:
        """Between two looks of a follower."""
        return min(max(self.step_seconds / 20, _LEAST_INTERVAL, self._desk.round_trip), _MOST_INTERVAL)

    def next_look(self, now: float, moved: float, missing: int) -> float:
        """When to look again, of who looks now, saw blocks appear last at `moved`, and lacks so many more.

        More has often appeared with it by the next interval; then a step passes until the leader's next
        blocks, which are looked for half-way to that moment, again half-way from there, and so on. What may
        be the last of it is wanted at once.
        """
        left = moved + self.step_seconds - now
        if now <= moved or missing * self._block_size <= self._token_budget:
            left = 0.0
        return now + max(self.interval, left / 2)

    def patience(self, blocks: int) -> float:
        """What who lacks so many blocks may lose by waiting for them, against computing them at once.

        Long enough to see a leader's lease lapse and to take over, where the prompt is worth that.
        """
        return _MOST_RISK * min(blocks * self.block_seconds, self.lease_seconds) + 2 * self.interval

    def worth(self, blocks: int, load_seconds: float) -> bool:
        """Whether computing is dear enough to ask first, and loading a block is cheaper."""
        alone = blocks * self.block_seconds
        return alone > _ROUND_TRIPS * self._desk.round_trip and load_seconds < self.block_seconds

    @property
    def step_seconds(self) -> float:
        """Of a whole step."""
        return max(self._slowest_step, self._token_budget * (self._prefill.seconds_per_token or 0.0))
