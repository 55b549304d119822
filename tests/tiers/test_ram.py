"""The RAM tier: verified loads, room by policy, time to live, quotas, pins, readers."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import stored

from kvstrata.cache.keys import Extras
from kvstrata.cache.policy import Meta
from kvstrata.errors import ConfigError
from kvstrata.tiers.open import open_tier
from kvstrata.tiers.ram import RamTier
from kvstrata.tiers.tier import Address, Identity, Loaded, Record, StoreContext, Stored
from kvstrata.tiers.url import parse_tier_url

PAYLOADS = (5000, 3000)
SLOT = 8192 + 4096  # both groups' pages
CONTEXT = StoreContext(b"f" * 32, 4, PAYLOADS)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def identity(number: int, group: int = 0, parent: int | None = None, salt: str = "") -> Identity:
    key = b"%032d" % number
    above = CONTEXT.fingerprint if parent is None else b"%032d" % parent
    return Identity(Address(key, group), above, number.to_bytes(16, "little"), Extras(salt).encode())


def record(one: Identity, *, deadline: float = math.inf, **meta: float) -> Record:
    payload = np.random.default_rng(int(one.address.key) * 2 + one.address.group).integers(
        0, 256, PAYLOADS[one.address.group], dtype=np.uint8
    )
    return Record(one, Meta(parent=one.parent, deadline=deadline, **meta), payload.data)  # type: ignore[arg-type]


def store(tier: RamTier, *records: Record) -> list[Stored]:
    return tier.store(records).result(10)


def load(tier: RamTier, *wanted: Identity) -> tuple[list[Loaded], list[bytes]]:
    memory = [bytearray(PAYLOADS[one.address.group]) for one in wanted]
    outcomes = tier.load(wanted, [memoryview(part) for part in memory]).result(10)
    return outcomes, [bytes(part) for part in memory]


def misses(tier: RamTier, *wanted: Identity) -> list[str | None]:
    return [outcome.miss for outcome in load(tier, *wanted)[0]]


def test_what_was_stored_comes_back_to_the_byte_in_both_groups() -> None:
    tier = RamTier(CONTEXT, 8 * SLOT)
    records = [record(identity(n, group)) for n in range(4) for group in (0, 1)]
    assert store(tier, *records) == [Stored()] * 8
    outcomes, memory = load(tier, *(r.identity for r in records))
    assert [outcome.miss for outcome in outcomes] == [None] * 8
    assert memory == [bytes(r.payload) for r in records]
    usage = tier.usage()
    assert (usage.records, usage.stores, usage.loads) == (8, 8, 8)
    assert usage.stored_bytes == usage.loaded_bytes == 4 * sum(PAYLOADS)
    tier.close()


def test_anything_else_under_the_same_address_is_a_miss_and_stays_out() -> None:
    tier = RamTier(CONTEXT, 8 * SLOT)
    one = identity(1)
    store(tier, record(one))
    assert misses(tier, replace(one, parent=b"p" * 32)) == ["parent"]
    assert misses(tier, replace(one, token_ids=b"x" * 16)) == ["content"]
    assert misses(tier, replace(one, extras=Extras("other").encode())) == ["content"]
    assert misses(tier, identity(2), identity(1, group=1), one) == ["absent", "absent", None]
    assert tier.usage().misses == {"parent": 1, "content": 2, "absent": 2}


def test_a_payload_of_another_length_is_not_kept() -> None:
    tier = RamTier(CONTEXT, 8 * SLOT)
    assert store(tier, replace(record(identity(1)), payload=memoryview(b"short"))) == [Stored("too_big")]


def test_the_same_block_twice_is_kept_once() -> None:
    tier = RamTier(CONTEXT, 8 * SLOT)
    store(tier, record(identity(1)), record(identity(1)))
    assert (tier.usage().records, tier.usage().stores) == (1, 1)


@pytest.mark.parametrize("policy", ["lru", "lrfu", "fifo"])
def test_the_oldest_chain_s_tail_makes_room_and_the_cap_holds(policy: str) -> None:
    clock = Clock()
    tier = RamTier(CONTEXT, 3 * SLOT, policy=policy, clock=clock)
    for n in range(3):
        clock.now += 1.0
        store(tier, record(identity(n, parent=n - 1 if n else None), depth=n, born=clock.now))
    clock.now += 1.0
    store(tier, record(identity(10), born=clock.now))
    assert misses(tier, identity(0), identity(1, parent=0), identity(2, parent=1), identity(10)) == [
        None,
        None,
        "absent",
        None,
    ]
    usage = tier.usage()
    assert usage.evictions == {"space": 1}
    assert usage.capacity_bytes == 3 * SLOT
    assert usage.used_bytes <= 3 * SLOT


def test_a_window_group_s_oldest_block_goes_though_others_build_on_it() -> None:
    clock = Clock()
    context = replace(CONTEXT, chained=(True, False))
    tier = RamTier(context, 3 * SLOT, policy="lru", clock=clock)
    for n in range(3):
        clock.now += 1.0
        store(tier, record(identity(n, 1, parent=n - 1 if n else None), group=1, depth=n, born=clock.now))
    clock.now += 1.0
    store(tier, record(identity(10, 1), group=1, born=clock.now))
    assert misses(tier, *(identity(n, 1, parent=n - 1 if n else None) for n in range(3))) == [
        "absent",
        None,
        None,
    ]


def test_random_stores_loads_and_deletes_never_serve_wrong_bytes() -> None:
    rng = random.Random(0)
    clock = Clock()
    tier = RamTier(CONTEXT, 5 * SLOT, clock=clock)
    for _ in range(600):
        clock.now += 1.0
        one = identity(rng.randrange(12), rng.randrange(2))
        what = rng.random()
        if what < 0.5:
            store(tier, record(one, deadline=clock.now + rng.randrange(1, 40)))
        elif what < 0.9:
            [outcome], [memory] = load(tier, one)
            assert outcome.miss is not None or memory == bytes(record(one).payload)
        elif what < 0.95:
            tier.pin([one.address], clock.now + 5)
        else:
            tier.delete([one.address])
        usage = tier.usage()
        assert usage.used_bytes <= 5 * SLOT
        assert usage.capacity_bytes is not None


def test_the_deadline_is_the_sooner_of_the_block_s_and_the_tier_s() -> None:
    clock = Clock()
    tier = RamTier(CONTEXT, 8 * SLOT, ttl=50.0, clock=clock)
    store(tier, record(identity(1), deadline=20.0), record(identity(2)))
    [first, second], _ = load(tier, identity(1), identity(2))
    assert (first.deadline, second.deadline) == (20.0, 50.0)
    clock.now = 20.0
    assert tier.lookup([identity(1).address, identity(2).address]) == [False, True]
    assert misses(tier, identity(1), identity(2)) == ["expired", None]
    clock.now = 50.0
    assert misses(tier, identity(2)) == ["expired"]
    assert tier.usage().evictions["expired"] == 2
    assert tier.usage().used_bytes == 0


def test_a_salt_keeps_to_its_quota_by_its_own_blocks() -> None:
    clock = Clock()
    tier = RamTier(CONTEXT, 20 * SLOT, quota=2 * 8192, clock=clock)
    store(tier, record(identity(100, salt="other")))
    for n in range(4):
        clock.now += 1.0
        store(tier, record(identity(n, salt="greedy")))
    assert misses(tier, *(identity(n, salt="greedy") for n in range(4))) == ["absent", "absent", None, None]
    assert misses(tier, identity(100, salt="other")) == [None]
    assert tier.usage().evictions == {"quota": 2}


def test_a_quota_smaller_than_a_block_keeps_nothing() -> None:
    tier = RamTier(CONTEXT, 20 * SLOT, quota=100)
    assert store(tier, record(identity(1, salt="a"))) == [Stored("quota")]


def test_pinned_blocks_stay_until_their_time_or_unpin() -> None:
    clock = Clock()
    tier = RamTier(CONTEXT, 2 * SLOT, policy="lru", clock=clock)
    store(tier, record(identity(1)), record(identity(2)))
    assert tier.pin([identity(1).address, identity(9).address], 100.0) == [True, False]
    assert tier.pin([identity(2).address], math.inf) == [True]
    clock.now = 1.0
    assert store(tier, record(identity(3))) == [Stored("full")]
    clock.now = 100.0
    assert store(tier, record(identity(4))) == [Stored()]
    assert misses(tier, identity(1), identity(2), identity(4)) == ["absent", None, None]
    tier.unpin([identity(2).address])
    clock.now = 200.0
    store(tier, record(identity(5)))
    clock.now = 300.0
    store(tier, record(identity(6)))
    assert misses(tier, identity(2)) == ["absent"]


def test_a_reader_s_slot_is_not_used_again_before_it_has_read() -> None:
    """What expires, or is deleted, while it is copied keeps its bytes until that is done."""
    clock = Clock()
    tier = RamTier(CONTEXT, SLOT, clock=clock)
    one = identity(1)
    store(tier, record(one, deadline=0.05))
    entry = tier._verified(one, 0.0)
    clock.now = 0.1
    assert store(tier, record(identity(2))) == [Stored("full")], "the only slot is being read"
    assert not isinstance(entry, str)
    assert bytes(tier._arena.view(0, entry.slot)) == bytes(record(one).payload)
    tier._done_reading(one, entry)
    assert store(tier, record(identity(2))) == [Stored()]


def test_after_close_all_are_misses_and_nothing_is_kept() -> None:
    tier = RamTier(CONTEXT, 8 * SLOT)
    store(tier, record(identity(1)))
    tier.close()
    tier.close()
    assert misses(tier, identity(1)) == ["closed"]
    assert store(tier, record(identity(1))) == [Stored("closed")]
    assert tier.lookup([identity(1).address]) == [False]


def test_a_url_says_it_all() -> None:
    tier = open_tier("ram://?size=1MiB&policy=lru&ttl=15m&quota=512KiB", CONTEXT)
    assert tier.name == "ram"
    assert tier.usage().capacity_bytes == (1 << 20) // SLOT * SLOT
    tier.close()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ram://?size=1KiB", "one block takes 12288"),
        ("ram://?size=big", "give a size such as"),
        ("ram://?size=1MiB&policy=mru", "choose one of lru"),
        ("ram://?size=1MiB&ttl=-1", "give a time such as"),
        ("ram://?size=1MiB&sync=batch", "takes size, policy"),
        ("ram:///somewhere?size=1MiB", "names a place"),
        ("tape:///x", "the kinds are disk, ram"),
    ],
)
def test_what_cannot_be_used_is_told(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_tier(url, CONTEXT)


def test_parse_keeps_the_text() -> None:
    assert parse_tier_url("ram://?size=1MiB").options == {"size": "1MiB"}


def test_storing_again_prolongs_a_life_of_which_less_than_half_is_left() -> None:
    time = stored.Time()
    tier = RamTier(stored.CONTEXT, 1 << 20, ttl=100.0, clock=time.clocks.monotonic)
    records = stored.blocks(2)
    stored.drops(tier, records)
    time.pass_by(40.0)
    stored.drops(tier, records[:1])
    time.pass_by(30.0)
    stored.drops(tier, records[1:])
    time.pass_by(40.0)
    assert stored.misses(tier, records) == ["expired", stored.HIT]
    tier.close()
