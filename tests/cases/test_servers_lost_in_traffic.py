"""Servers killed, hung or cut off while engines store and load: every answer is right, and hits come back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from bad_network import BadNetwork
from shared_store import BLOCK, GREEDY, PROMPTS, answers, toy_over
from toy import make_toy
from valkey_servers import ValkeyServer, until

from kvstrata.tiers.valkey.tier import ValkeyTier


def alone() -> list[list[int]]:
    return answers(make_toy(block_size=BLOCK, blocks=128), PROMPTS)


@contextmanager
def networks(servers: list[ValkeyServer]) -> Iterator[list[BadNetwork]]:
    found = [BadNetwork(server.port) for server in servers]
    try:
        yield found
    finally:
        for network in found:
            network.__exit__(None, None, None)


def break_and_mend(kind: str, server: ValkeyServer, network: BadNetwork) -> tuple[Callable[[], None], ...]:
    match kind:
        case "killed":
            return server.kill, server.start
        case "hung":
            return server.stop, server.resume
        case "held back":
            return network.holding.set, network.holding.clear
    return network.cut, lambda: None


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", ["killed", "hung", "held back", "cut off"])
def test_answers_stay_right_and_hits_resume(kind: str, replicas: int, valkeys: list[ValkeyServer]) -> None:
    right = alone()
    with networks(valkeys) as between:
        names = ",".join(f"127.0.0.1:{network.port}" for network in between)
        toy = toy_over(f"valkey://{names}?replicas={replicas}&stall=200ms")
        assert answers(toy, PROMPTS) == right
        toy.settle()
        rng = random.Random(kind)
        for _ in range(2):
            hurt, mend = break_and_mend(kind, valkeys[1], between[1])
            toy.engine.reset_cache()
            for number, prompt in enumerate(PROMPTS):
                toy.engine.add_request(str(number), prompt, GREEDY)
            for _ in range(rng.randrange(4)):
                toy.step()
            hurt()
            results = {d.request_id: d.result for d in toy.step() if d.result} | toy.run(10_000_000)
            told = [results[str(number)] for number in range(len(PROMPTS))]
            assert [result.outputs[0].token_ids for result in told if result] == right
            mend()

        def all_hit() -> bool:
            toy.engine.reset_cache()
            for number, prompt in enumerate(PROMPTS):
                toy.engine.add_request(str(number), prompt, GREEDY)
            again = toy.run(10_000_000)
            assert [again[str(n)].outputs[0].token_ids for n in range(len(PROMPTS))] == right
            toy.settle()
            hits = [again[str(n)].usage.cached_by_source.get("valkey", 0) for n in range(len(PROMPTS))]
            return hits == [68] * len(PROMPTS)

        until(all_hit)
        toy.assert_idle()
        toy.engine.close()


def test_joining_and_leaving_under_load_never_changes_an_answer(valkeys: list[ValkeyServer]) -> None:
    right = alone()
    toy = toy_over(f"valkey://{valkeys[0].name},{valkeys[1].name}")
    assert toy.stack is not None
    [tier] = toy.stack.tiers
    assert isinstance(tier, ValkeyTier)
    for members in ([0, 1], [0, 1, 2], [1, 2], [2, 0], [0, 1, 2]):
        toy.engine.reset_cache()
        for number, prompt in enumerate(PROMPTS):
            toy.engine.add_request(str(number), prompt, GREEDY)
        toy.step()
        tier.set_servers(",".join(valkeys[number].name for number in members))
        results = toy.run(10_000_000)
        assert [results[str(n)].outputs[0].token_ids for n in range(len(PROMPTS))] == right
        toy.settle()
    toy.engine.reset_cache()
    assert answers(toy, PROMPTS) == right
    toy.engine.close()
