"""Engines that share a place compute a prefix once: one leads, the others load what it has stored."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from leased import MemoryLeases, SharedTier
from toy import FakeClock, Toy, make_toy

from kvstrata import RequestOptions, SamplingParams
from kvstrata.engine.election import LeaseCounts
from kvstrata.engine.outputs import RequestOutput
from kvstrata.tiers.tier import StoreContext, Tier

BLOCK, BUDGET = 4, 64
TOKEN_SECONDS = 0.01
ONE = SamplingParams(temperature=0, max_tokens=1)
PREFIX = [1 + (i * 7 + i // 11) % 90 for i in range(400)]


class Prefill:
    """Prefill takes the same each time."""

    seconds_per_token = TOKEN_SECONDS

    def add(self, prefill_tokens: int, decode_tokens: int, seconds: float) -> None:
        """Known already."""


@dataclass
class Cluster:
    """Engines with a place in common, and a clock that goes on with what they compute."""

    size: int = 2
    windows: tuple[int | None, ...] = (None,)
    lease: bool = True
    clock: FakeClock = field(default_factory=FakeClock)
    place: SharedTier | None = None

    def __post_init__(self) -> None:
        self.leases = MemoryLeases(self.clock)
        self.toys = [self._toy() for _ in range(self.size)]
        self.results: dict[str, RequestOutput] = {}

    def _toy(self) -> Toy:
        toy = make_toy(
            blocks=400,
            block_size=BLOCK,
            windows=self.windows,
            token_budget=BUDGET,
            max_num_seqs=64,
            tiers=self._tiers,
            queue_bytes=64 << 20,
            clock=self.clock,
        )
        tiering = toy.engine.tiering
        assert tiering is not None
        tiering.loads.prefill = Prefill()  # type: ignore[assignment]
        if tiering.loads.election is not None:
            tiering.loads.election.pace._prefill = Prefill()  # type: ignore[assignment]
        return toy

    def _tiers(self, context: StoreContext, clock: FakeClock) -> list[Tier]:
        self.place = self.place or SharedTier(context, clock, self.leases if self.lease else None)
        return [self.place]

    def ask(self, engine: int, name: str, prompt: list[int], options: RequestOptions | None = None) -> None:
        self.toys[engine].engine.add_request(name, prompt, ONE, options=options)

    def step(self, engine: int) -> int:
        """Step one engine; tokens that it computed, for which time passes."""
        toy = self.toys[engine]
        before = toy.model.tokens_computed
        for delta in toy.step():
            if delta.result is not None:
                self.results[delta.request_id] = delta.result
        toy.engine.drain(10.0)
        computed = toy.model.tokens_computed - before
        self.clock.now += computed * TOKEN_SECONDS
        return computed

    def run(self, *, stopped: frozenset[int] = frozenset()) -> None:
        """Step all engines in turn until they are idle; some time passes in each round."""
        for _ in range(5000):
            busy = [n for n, toy in enumerate(self.toys) if n not in stopped and toy.engine.has_unfinished]
            if not busy:
                return
            for engine in busy:
                self.step(engine)
            self.clock.now += 0.002
        raise AssertionError("not idle")

    @property
    def computed(self) -> int:
        return sum(toy.model.tokens_computed for toy in self.toys)

    def counts(self, engine: int) -> LeaseCounts:
        election = self.toys[engine].engine.tiering.loads.election  # type: ignore[union-attr]
        assert election is not None
        return election.counts


def alone(prompt: list[int], windows: tuple[int | None, ...] = (None,)) -> list[int]:
    toy = make_toy(blocks=400, windows=windows, token_budget=BUDGET)
    toy.engine.add_request("alone", prompt, ONE)
    return toy.run()["alone"].outputs[0].token_ids


@pytest.mark.parametrize("windows", [(None,), (None, 24)])
def test_a_prefix_is_computed_once_by_all_engines_together(windows: tuple[int | None, ...]) -> None:
    cluster = Cluster(4, windows)
    for n in range(32):
        cluster.ask(n % 4, f"r{n}", [*PREFIX, 1 + n])
    cluster.run()
    assert cluster.computed == len(PREFIX) + 32
    for n in range(32):
        assert cluster.results[f"r{n}"].outputs[0].token_ids == alone([*PREFIX, 1 + n], windows)
    assert sum(cluster.counts(n).wins for n in range(4)) == 1
    assert sum(cluster.counts(n).waits for n in range(4)) == 3
    assert sum(cluster.counts(n).avoided for n in range(4)) == 3
    assert 2 * len(PREFIX) < sum(cluster.counts(n).avoided_tokens for n in range(4)) <= 3 * len(PREFIX)
    assert not cluster.leases.names()
    for toy in cluster.toys:
        toy.assert_idle()


def test_without_leases_every_engine_computes_it() -> None:
    cluster = Cluster(2, lease=False)
    for n in range(2):
        cluster.ask(n, f"r{n}", [*PREFIX, 1 + n])
    cluster.run()
    assert cluster.computed > 1.5 * len(PREFIX)


def test_a_follower_s_first_token_comes_soon_after_the_leader_s() -> None:
    cluster = Cluster(2)
    for n in range(2):
        cluster.ask(n, f"r{n}", [*PREFIX, 1 + n])
    cluster.run()
    took = sorted(cluster.results[f"r{n}"].timings.ttft for n in range(2))
    assert took[1] - took[0] <= 0.2
    assert cluster.results["r1"].usage.cached_by_source["shared"] == len(PREFIX) or (
        cluster.results["r1"].usage.cached_by_source["shared"] == 0
    )
