from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvstrata.cache.policies import make_policy
from kvstrata.cache.policy import EvictionPolicy, Meta
from kvstrata.errors import ConfigError

NAMES = ("lru", "lrfu", "fifo", "ttl")


def drain(policy: EvictionPolicy, now: float = 100.0, pinned: frozenset[bytes] = frozenset()) -> str:
    return b"".join(policy.victims(99, pinned, now)).decode()


def script(name: str) -> EvictionPolicy:
    """Four entries published as a, b, c, d; a used again last; b expires first of all, then d."""
    policy = make_policy(name)
    for born, (key, deadline) in enumerate([(b"a", 500.0), (b"b", 200.0), (b"c", 400.0), (b"d", 300.0)]):
        policy.insert(key, Meta(parent=b"root", born=born, deadline=deadline), float(born))
    policy.touch([b"c"], 10.0)
    policy.touch([b"a"], 11.0)
    return policy


GOLDEN = {"lru": "cadb", "lrfu": "cabd", "fifo": "abcd", "ttl": "dbac"}


@pytest.mark.parametrize("name", NAMES)
def test_the_policies_differ_on_one_script(name: str) -> None:
    policy = make_policy(name)
    for born, (key, deadline) in enumerate([(b"a", 400.0), (b"b", 300.0), (b"c", 500.0), (b"d", 200.0)]):
        policy.insert(key, Meta(parent=b"root", born=born, deadline=deadline), float(born))
    for now, key in enumerate([b"a", b"d", b"b"], 10):
        policy.touch([key], float(now))
    assert drain(policy) == GOLDEN[name]


@pytest.mark.parametrize("name", NAMES)
def test_tails_go_before_heads_whatever_the_policy(name: str) -> None:
    policy = make_policy(name)
    chain = [b"root", b"h", b"m", b"t"]
    for depth, (parent, key) in enumerate(itertools.pairwise(chain)):
        policy.insert(key, Meta(parent=parent, depth=depth, born=depth, deadline=200.0 + depth), float(depth))
    policy.touch([b"t"], 50.0)  # the tail is the most recently used, latest published, last to expire
    policy.insert(b"x", Meta(parent=b"h", depth=1, born=60.0, deadline=290.0), 60.0)
    order = drain(policy)
    assert order.index("t") < order.index("m") < order.index("h")
    assert order.index("x") < order.index("h")


def test_without_the_chain_rule_heads_may_go_first() -> None:
    policy = make_policy("lru", chained=False)
    policy.insert(b"h", Meta(parent=b"root", depth=0), 1.0)
    policy.insert(b"t", Meta(parent=b"h", depth=1), 2.0)
    assert drain(policy) == "ht"


@pytest.mark.parametrize("name", NAMES)
def test_slipped_entries_go_first(name: str) -> None:
    policy = make_policy(name, chained=False)
    policy.insert(b"a", Meta(parent=b"root", born=1.0, deadline=200.0), 1.0)
    policy.insert(b"b", Meta(parent=b"root", born=2.0, deadline=300.0, slipped=True), 2.0)
    assert drain(policy) == "ba"


@pytest.mark.parametrize("name", NAMES)
def test_expired_entries_go_before_all_others(name: str) -> None:
    policy = make_policy(name)
    policy.insert(b"a", Meta(parent=b"root", born=1.0), 1.0)
    policy.insert(b"b", Meta(parent=b"root", born=2.0, deadline=90.0), 2.0)
    policy.insert(b"c", Meta(parent=b"root", born=3.0, deadline=80.0), 3.0)
    assert policy.victims(1, frozenset([b"c"]), 100.0) == [b"b"]
    assert policy.expired(100.0) == [b"c"]
    assert policy.expired(100.0) == []
    assert drain(policy) == "a"


def test_use_does_not_put_off_expiry() -> None:
    policy = make_policy("ttl")
    policy.insert(b"a", Meta(parent=b"root", deadline=10.0), 0.0)
    policy.touch([b"a"], 9.0)
    assert policy.expired(9.9) == []
    assert policy.expired(10.0) == [b"a"]


@pytest.mark.parametrize("name", NAMES)
def test_pinned_entry_is_a_victim_again_once_touched(name: str) -> None:
    policy = script(name)
    first = policy.victims(4, frozenset([b"a", b"b"]), 20.0)
    assert sorted(first) == [b"c", b"d"]
    policy.touch([b"b", b"a"], 21.0)
    assert sorted(policy.victims(4, frozenset(), 22.0)) == [b"a", b"b"]


def test_pinning_does_not_change_the_place_in_fifo() -> None:
    policy = script("fifo")
    assert policy.victims(1, frozenset([b"a"]), 20.0) == [b"b"]
    policy.touch([b"a"], 21.0)
    assert drain(policy) == "acd"


def test_unknown_policy_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="'mru' is unknown: choose one of lru, lrfu, fifo, ttl"):
        make_policy("mru")


def decayed(uses: list[float]) -> float:
    """Half-lives times log2 of all uses, each weighed with 2 to the power of its time."""
    return 120.0 * math.log2(math.fsum(2.0 ** (use / 120.0) for use in uses))


def reference_victim(
    entries: dict[bytes, tuple[Meta, list[float]]], name: str, pinned: set[bytes]
) -> bytes | None:
    """The specification, by looking at all entries."""
    parents = {meta.parent for meta, _ in entries.values()}
    rank = {
        "lru": lambda meta, used: (used[-1],),
        "lrfu": lambda meta, used: (decayed(used),),
        "fifo": lambda meta, used: (meta.born,),
        "ttl": lambda meta, used: (meta.deadline, meta.born),
    }[name]
    open_ = [
        (not meta.slipped, *rank(meta, used), key)
        for key, (meta, used) in entries.items()
        if key not in parents and key not in pinned
    ]
    return min(open_)[-1] if open_ else None  # type: ignore[return-value]


@given(
    st.sampled_from(NAMES), st.lists(st.tuples(st.sampled_from("iturvp"), st.integers(0, 11)), max_size=120)
)
def test_lazy_heap_agrees_with_looking_at_all_entries(name: str, script: list[tuple[str, int]]) -> None:
    policy = make_policy(name)
    entries: dict[bytes, tuple[Meta, list[float]]] = {}
    pinned: set[bytes] = set()
    for tick, (what, number) in enumerate(script):
        now, key = float(tick), bytes([number])
        if what == "i":
            parent = bytes([number // 2]) if number else b"root"
            deadline = 1000.0 + (tick * 37) % 101 if number % 3 else math.inf
            meta = Meta(parent=parent, born=now, deadline=deadline, slipped=tick % 5 == 0)
            policy.insert(key, meta, now)
            known = decayed(entries[key][1]) if name == "lrfu" and key in entries else now
            entries[key] = (meta, [max(known, now)])
        elif what == "t" and key in entries:
            policy.touch([key], now)
            entries[key][1].append(now)
        elif what == "u" and key in pinned:
            pinned.remove(key)
            policy.touch([key], now)
            if key in entries:
                entries[key][1].append(now)
        elif what == "p":
            pinned.add(key)
        elif what == "r":
            policy.remove(key)
            entries.pop(key, None)
        elif what == "v":
            expected = reference_victim(entries, name, pinned)
            assert policy.victims(1, pinned, now) == ([] if expected is None else [expected])
            entries.pop(expected or b"", None)
        assert len(policy) == len(entries)
        assert (key in policy) == (key in entries)


def test_memory_follows_the_number_of_entries() -> None:
    policy = make_policy("lru")
    for tick in range(5000):
        policy.insert(b"a", Meta(parent=b"root", deadline=1e6 + tick), float(tick))
    assert len(policy._heap) < 200  # type: ignore[attr-defined]
    assert len(policy._deadlines) < 200  # type: ignore[attr-defined]


def test_lrfu_keeps_what_was_used_often_through_a_scan_and_lets_it_go_at_last() -> None:
    policy = make_policy("lrfu")
    policy.insert(b"hot", Meta(parent=b"root"), 0.0)
    for now in range(1, 51):
        policy.touch([b"hot"], float(now))
    for n in range(20):
        policy.insert(b"scan%d" % n, Meta(parent=b"root"), 100.0 + n)
    assert b"hot" not in policy.victims(20, frozenset(), 200.0)
    policy.insert(b"late", Meta(parent=b"root"), 10_000.0)
    assert policy.victims(1, frozenset(), 10_001.0) == [b"hot"]


@pytest.mark.parametrize("name", NAMES)
def test_more_important_entries_stay_longer_but_not_for_ever(name: str) -> None:
    policy = make_policy(name)
    policy.insert(b"a", Meta(parent=b"root", priority=1, born=0.0, deadline=1e5), 0.0)
    policy.insert(b"b", Meta(parent=b"root", born=100.0, deadline=1e5), 100.0)
    assert policy.victims(1, frozenset(), 200.0) == [b"b"]
    policy.insert(b"c", Meta(parent=b"root", born=9e4, deadline=2e5), 9e4)
    assert policy.victims(1, frozenset(), 9e4) == [b"a"]


@pytest.mark.parametrize("name", NAMES)
def test_dirty_entries_go_after_clean_ones(name: str) -> None:
    policy = make_policy(name)
    policy.insert(b"a", Meta(parent=b"root", born=1.0, deadline=300.0, dirty=True), 1.0)
    policy.insert(b"b", Meta(parent=b"root", born=2.0, deadline=400.0), 2.0)
    assert drain(policy) == "ba"
