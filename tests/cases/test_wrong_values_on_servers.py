"""A value that another model wrote, cut short, changed by a bit or evicted meanwhile is a miss."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest
from stored import CONTEXT, HIT, blocks, drops, misses, payload_of
from toy import FakeClock, make_toy
from valkey_servers import ValkeyServer, found, url_of

from kvstrata import SamplingParams
from kvstrata.cache.keys import Extras
from kvstrata.tiers.lifetime import Clocks
from kvstrata.tiers.open import open_tier
from kvstrata.tiers.tier import Identity, Loaded, Record, StoreContext, Tier
from kvstrata.tiers.url import parse_tier_url
from kvstrata.tiers.valkey.settings import ValkeySettings
from kvstrata.tiers.valkey.tier import ValkeyTier

BLOCK = 4
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [1 + i * 5 % 90 for i in range(6 * BLOCK + 1)]
Damage = Callable[[ValkeyServer, bytes, bytes], object]


def flip(server: ValkeyServer, name: bytes, value: bytes, place: int) -> None:
    server.call("SETRANGE", name, place, bytes([value[place] ^ 1]))


DAMAGES: dict[str, tuple[Damage, str]] = {
    "cut short": (lambda s, n, v: s.call("SET", n, v[:-1]), "length"),
    "empty": (lambda s, n, v: s.call("SET", n, b""), "length"),
    "longer": (lambda s, n, v: s.call("APPEND", n, b"x"), "length"),
    "no record": (lambda s, n, v: s.call("SET", n, bytes(len(v))), "magic"),
    "another version": (lambda s, n, v: flip(s, n, v, 24), "version"),
    "a bit of the header": (lambda s, n, v: flip(s, n, v, 70), "header_checksum"),
    "a bit of the payload": (lambda s, n, v: flip(s, n, v, len(v) - 1), "payload_checksum"),
    "a list": (lambda s, n, v: (s.call("DEL", n), s.call("RPUSH", n, v)), "magic"),
    "evicted": (lambda s, n, v: s.call("DEL", n), "absent"),
}


def home_of(servers: list[ValkeyServer], key: bytes) -> tuple[ValkeyServer, bytes, bytes]:
    [(server, name)] = [(s, n) for s in servers for n in s.call("KEYS", f"*{key.hex()}*")]  # type: ignore[attr-defined]
    value = server.call("GET", name)
    assert isinstance(value, bytes)
    return server, name, value


@pytest.mark.parametrize("kind", DAMAGES)
def test_it_is_a_miss_by_its_reason_and_can_be_stored_anew(kind: str, valkeys: list[ValkeyServer]):
    damage, reason = DAMAGES[kind]
    tier = open_tier(url_of(valkeys), CONTEXT)
    records = blocks(6)
    drops(tier, records)
    server, name, value = home_of(valkeys, records[2].identity.address.key)
    damage(server, name, value)
    assert misses(tier, records) == [HIT, HIT, reason, HIT, HIT, HIT]
    assert found(tier, [records[2]]) == [False], "what is wrong was removed"
    assert drops(tier, records) == [None] * 6
    assert misses(tier, records) == [HIT] * 6
    tier.close()


@pytest.mark.parametrize("whose", ["model", "key", "tokens", "parent"])
def test_another_blocks_record_under_this_name_is_a_miss(whose: str, valkeys: list[ValkeyServer]):
    tier = open_tier(url_of(valkeys), CONTEXT)
    [wanted] = blocks(1)
    other = {
        "model": lambda: (replace(CONTEXT, fingerprint=CONTEXT.fingerprint[:8] + b"x" * 24), wanted.identity),
        "key": lambda: (CONTEXT, replace(blocks(1, chain=3)[0].identity, segment=wanted.identity.segment)),
        "tokens": lambda: (CONTEXT, replace(wanted.identity, token_ids=bytes(64))),
        "parent": lambda: (CONTEXT, replace(wanted.identity, parent=b"p" * 32)),
    }
    context, identity = other[whose]()
    foreign = open_tier(url_of(valkeys), context)
    drops(foreign, [Record(identity, wanted.meta, payload_of(77))])
    foreign.close()
    server, name, value = home_of(valkeys, identity.address.key)
    right = tier.names.block(wanted.identity.address, wanted.identity.segment)  # type: ignore[attr-defined]
    server.call("DEL", name)
    server.call("SET", right, value)
    reasons = {"model": "fingerprint", "key": "address", "tokens": "content", "parent": "parent"}
    assert misses(tier, [wanted]) == [reasons[whose]]
    tier.close()


@pytest.mark.parametrize("kind", DAMAGES)
def test_an_answer_is_right_whatever_became_of_a_value_after_the_look_up(
    kind: str, valkeys: list[ValkeyServer]
):
    spoil: list[Callable[[], object]] = []

    class Spoiled(ValkeyTier):
        def load(self, wanted: Sequence[Identity], into: Sequence[memoryview]) -> Future[list[Loaded]]:
            spoil.pop()()
            return super().load(wanted, into)

    def make(context: StoreContext, clock: FakeClock) -> list[Tier]:
        settings = ValkeySettings.from_url(parse_tier_url(url_of(valkeys)))
        return [Spoiled(settings, context, clocks=Clocks(clock, time.time))]

    toy = make_toy(block_size=BLOCK, tiers=make)
    toy.engine.add_request("first", PROMPT, GREEDY)
    first = toy.run()["first"]
    toy.settle()
    toy.engine.reset_cache()
    key = toy.cache.chain(PROMPT, Extras()).keys[3]
    damage, _ = DAMAGES[kind]
    spoil.append(lambda: damage(*home_of(valkeys, key)))
    toy.engine.add_request("again", PROMPT, GREEDY)
    again = toy.run()["again"]
    assert not spoil
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.usage.cached_by_source.get("valkey", 0) == 3 * BLOCK
    assert again.timings.recomputed["failed"] == 3 * BLOCK
    toy.settle()
    toy.assert_idle()
    toy.engine.close()
