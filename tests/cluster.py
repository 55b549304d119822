"""Several toy engines in one process that share a place with leases, and the time that computing takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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

    def lead(self, engine: int) -> None:
        """Step one engine until it has computed something."""
        self.until(lambda: self.step(engine) > 0)

    def follow(self, engine: int) -> None:
        """Step one engine until it has seen that another leads."""
        self.until(lambda: self.step(engine) >= 0 and self.counts(engine).waits > 0)

    def until(self, done: Callable[[], bool]) -> None:
        """Try until something is so."""
        for _ in range(1000):
            if done():
                return
        raise AssertionError("it never came to that")

    def step(self, engine: int, seconds: float = 0.0) -> int:
        """Step one engine, while others wait, and let some time pass besides; tokens that it computed."""
        computed = self._step(engine)
        self.clock.now += computed * TOKEN_SECONDS + seconds
        return computed

    def _step(self, engine: int) -> int:
        toy = self.toys[engine]
        before = toy.model.tokens_computed
        for delta in toy.step():
            if delta.result is not None:
                self.results[delta.request_id] = delta.result
        toy.engine.drain(10.0)
        return toy.model.tokens_computed - before

    def run(self, *, stopped: frozenset[int] = frozenset()) -> None:
        """Step all engines side by side until they are idle."""
        for _ in range(5000):
            busy = [n for n, toy in enumerate(self.toys) if n not in stopped and toy.engine.has_unfinished]
            if not busy:
                return
            self.round(busy)
        raise AssertionError("not idle")

    def round(self, engines: Sequence[int]) -> None:
        """A step of each of these engines; time passes as the slowest takes."""
        self.clock.now += max(self._step(engine) for engine in engines) * TOKEN_SECONDS + 0.002

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
