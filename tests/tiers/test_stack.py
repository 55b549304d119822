"""Several tiers behind one face: looked up together, skipped when they fail, never waited for."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from faulty_tier import FaultyTier

from kvstrata.cache.policy import Meta
from kvstrata.tiers.breaker import Breaker
from kvstrata.tiers.stack import NOWHERE, TierStack
from kvstrata.tiers.tier import Address, Identity, StoreContext
from kvstrata.tiers.worker import Worker
from kvstrata.tiers.write_behind import Offer

PAYLOAD = 4096
CONTEXT = StoreContext(b"f" * 32, 4, (PAYLOAD,))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def stack(count: int = 2, queue: int = 8) -> tuple[TierStack, list[FaultyTier], Clock]:
    clock = Clock()
    tiers = [FaultyTier(CONTEXT, clock) for _ in range(count)]
    return TierStack(tiers, CONTEXT, queue_bytes=queue * PAYLOAD, clock=clock), tiers, clock


def offer(number: int) -> Offer:
    key = b"%032d" % number
    identity = Identity(Address(key, 0), CONTEXT.fingerprint, bytes(16), b"")
    return Offer(identity, Meta(parent=CONTEXT.fingerprint), np.full(PAYLOAD, number % 256, dtype=np.uint8))


def places(stack: TierStack, *numbers: int) -> list[int]:
    lookup = stack.lookup([offer(number).identity.address for number in numbers])
    assert lookup.wait(10.0)
    return lookup.places()


def test_the_nearest_tier_that_has_a_block_is_named() -> None:
    both, tiers, _ = stack()
    assert both.offer([offer(1)]) == [True]
    assert both.offer([offer(2)], above=1) == [True]
    both.drain(10.0)
    tiers[0].delete([offer(1).identity.address])
    assert places(both, 1, 2, 3) == [1, 0, NOWHERE]
    both.close()


def test_the_payload_may_change_as_soon_as_it_was_offered() -> None:
    one, tiers, _ = stack(1)
    tiers[0].gate.clear()
    given = offer(7)
    one.offer([given])
    given.payload[:] = 0
    tiers[0].gate.set()
    one.drain(10.0)
    memory = bytearray(PAYLOAD)
    load = one.load(0, [given.identity], [memoryview(memory)])
    while not load.done:
        one.wait(1.0)
        one.collect()
    assert bytes(memory) == bytes([7]) * PAYLOAD


def test_a_tier_that_hangs_takes_only_its_share_of_the_queue() -> None:
    both, tiers, _ = stack(2, queue=8)
    tiers[1].gate.clear()
    for number in range(20):
        assert both.offer([offer(number)]) == [True]
        while len(tiers[0].stored) <= number:
            both.wait(0.01)
            both.collect()
        both.collect()
    drops = {stats.name: stats.queue_drops for stats in both.stats()}
    assert len(tiers[0].stored) == 20
    assert drops["faulty"]["queue_full"] == 16
    tiers[1].gate.set()
    both.close()


def test_what_is_not_taken_is_told() -> None:
    one, tiers, _ = stack(1, queue=4)
    tiers[0].gate.clear()
    assert one.offer([offer(number) for number in range(6)]) == [True] * 4 + [False] * 2
    assert not one.has_room(0)
    tiers[0].gate.set()
    settled = one.drain(10.0)
    assert [done.dropped for done in settled] == [None] * 4
    assert one.has_room(0)


def test_a_call_that_takes_too_long_opens_the_breaker() -> None:
    one, tiers, clock = stack(1)
    one.offer([offer(1)])
    one.drain(10.0)
    tiers[0].gate.clear()
    memory = bytearray(PAYLOAD)
    load = one.load(0, [offer(1).identity], [memoryview(memory)])
    one.collect()
    assert not load.done
    clock.now = 60.0
    one.collect()
    assert load.done
    assert load.touches_memory
    assert [outcome.miss for outcome in load.outcomes()] == ["io_error"]
    assert places(one, 1) == [NOWHERE]
    tiers[0].gate.set()


@pytest.mark.parametrize("good", [True, False])
def test_a_breaker_tries_once_after_its_pause(good: bool) -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(3):
        assert breaker.allows()
        breaker.failed()
    assert (breaker.state, breaker.allows()) == ("open", False)
    clock.now = 6.0
    assert breaker.state == "half-open"
    assert (breaker.allows(), breaker.allows()) == (True, False)
    if good:
        breaker.succeeded()
        assert (breaker.state, breaker.allows()) == ("closed", True)
    else:
        breaker.failed()
        clock.now = 12.0
        assert breaker.state == "open", "the second pause is twice as long"
        clock.now = 17.0
        assert breaker.state == "half-open"


def test_a_worker_keeps_order_and_tells_errors() -> None:
    worker = Worker("test")
    seen: list[int] = []
    futures = [worker.submit(seen.append, n) for n in range(50)]
    broken = worker.submit(lambda: 1 // 0)
    assert isinstance(broken.exception(10), ZeroDivisionError)
    assert [future.result(10) for future in futures] == [None] * 50
    assert seen == list(range(50))
    assert worker.close(10.0)
    assert worker.submit(seen.append, 1).cancelled()


def test_closing_a_worker_that_hangs_returns_in_time() -> None:
    worker, gate = Worker("test"), threading.Event()
    worker.submit(gate.wait)
    assert not worker.close(0.05)
    gate.set()


def test_tiers_are_known_by_some_reads_before_the_first_load() -> None:
    both, tiers, _ = stack()
    tiers[1].raising = True
    both.probe(10.0)
    first, second = both.speeds()
    assert first is not None
    assert first.bandwidth > 0
    assert second is None, "one that cannot read is judged by its first load"
    assert [stats.usage.loads for stats in both.stats()] == [0, 0]
    both.close()
