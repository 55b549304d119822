"""A server that answers slowly: what it costs is measured, and it is left out where computing is quicker."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from bad_network import BadNetwork
from stored import CONTEXT, blocks
from valkey_servers import ValkeyServer, found, until

from kvstrata.cache.retention import FULL
from kvstrata.engine.cost import Costs, Present, plan
from kvstrata.tiers.open import open_tier
from kvstrata.tiers.stack import NOWHERE, TierStack
from kvstrata.tiers.tier import Record
from kvstrata.tiers.write_behind import Offer

SECONDS_PER_TOKEN = 1e-4  # a block is computed in 1.6 ms, and loaded from a quick server in far less
RECORDS = blocks(32)


@pytest.fixture
def slow(valkeys: list[ValkeyServer]) -> Iterator[tuple[TierStack, BadNetwork]]:
    with BadNetwork(valkeys[0].port) as network:
        tier = open_tier(f"valkey://127.0.0.1:{network.port}?timeout=1s&stall=5s", CONTEXT)
        stack = TierStack([tier], CONTEXT, timeout=30.0)
        yield stack, network
        network.delay = 0.0
        stack.close()


def load(stack: TierStack, records: list[Record]) -> None:
    into = [memoryview(bytearray(len(r.payload))) for r in records]
    loading = stack.load(0, [r.identity for r in records], into)
    until(lambda: loading.done)
    assert [outcome.miss for outcome in loading.outcomes()] == [None] * len(records)
    assert into == [r.payload for r in records]


def loaded_of(stack: TierStack) -> int:
    """How many of 32 blocks that are there would be loaded."""
    present = Present(0, ((0,) * len(RECORDS),), (FULL,), 16, CONTEXT.payload_bytes)
    return plan(present, Costs(SECONDS_PER_TOKEN, stack.speeds()), "auto").end


def store(stack: TierStack) -> None:
    offers = [Offer(r.identity, r.meta, np.frombuffer(r.payload, np.uint8)) for r in RECORDS]
    assert all(stack.offer(offers))
    stack.drain(30.0)


def test_the_cost_model_stops_using_it_and_comes_back_when_it_is_quick(
    slow: tuple[TierStack, BadNetwork],
) -> None:
    stack, network = slow
    store(stack)
    for count in (1, 4, 32, 8):
        load(stack, RECORDS[:count])
    assert loaded_of(stack) == 32
    network.delay, network.piece = 0.02, 4096  # a block takes over 20 ms now
    for count in (4, 1, 8):
        load(stack, RECORDS[:count])
    assert loaded_of(stack) == 0
    network.delay, network.piece = 0.0, 64 << 10
    until(lambda: load(stack, RECORDS) is None and loaded_of(stack) == 32)


def test_it_is_not_even_asked_where_the_answer_would_come_too_late(
    slow: tuple[TierStack, BadNetwork],
) -> None:
    stack, network = slow
    store(stack)
    addresses, segments = [r.identity.address for r in RECORDS], [r.identity.segment for r in RECORDS]

    def places(worth: float) -> set[int]:
        lookup = stack.lookup(addresses, segments, worth)
        assert lookup.wait(30.0)
        return set(lookup.places())

    assert places(10.0) == {0}
    network.delay = 0.2
    for _ in range(4):
        assert places(10.0) == {0}
    asked = [places(0.01) for _ in range(31)]
    assert asked == [{NOWHERE}] * 31
    assert places(10.0) == {0}, "a longer prompt is still worth it"
    network.delay = 0.0
    for _ in range(20):
        places(10.0)
    assert places(0.01) == {0}


def test_answers_that_come_too_late_open_its_breaker_and_a_probe_closes_it(
    valkeys: list[ValkeyServer],
) -> None:
    with BadNetwork(valkeys[0].port) as network:
        tier = open_tier(f"valkey://127.0.0.1:{network.port}", CONTEXT)
        tier.store(RECORDS).result()
        assert all(found(tier, RECORDS))
        network.holding.set()
        while tier.usage().servers[0].state == "closed":
            assert not any(found(tier, RECORDS))
        assert tier.usage().servers[0].errors["timeout"] >= 2
        network.holding.clear()
        until(lambda: all(found(tier, RECORDS)))
        tier.close()
