"""Found, then gone: after a positive look-up block 2 of 5 vanishes; the contiguous loaded part is used."""

from __future__ import annotations

import pytest
from faulty_tier import FaultyTier
from toy import FakeClock, make_toy

from kvstrata import SamplingParams
from kvstrata.cache.keys import Extras
from kvstrata.tiers.tier import Address, StoreContext, Tier

BLOCK = 4
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [1 + i * 5 % 90 for i in range(5 * BLOCK + 1)]


@pytest.mark.parametrize("windows", [(None,), (None, 100), (None, 6)])
@pytest.mark.parametrize("lost", range(5))
def test_exactly_the_contiguous_loaded_part_is_used(lost: int, windows: tuple[int | None, ...]) -> None:
    made: list[FaultyTier] = []

    def make(context: StoreContext, clock: FakeClock) -> list[Tier]:
        made.append(FaultyTier(context, clock))
        return list(made)

    toy = make_toy(block_size=BLOCK, windows=windows, tiers=make)
    toy.engine.add_request("first", PROMPT, GREEDY)
    first = toy.run()["first"]
    toy.settle()
    toy.engine.reset_cache()
    made[0].vanished = {Address(toy.cache.chain(PROMPT, Extras()).keys[lost], 0)}
    computed = toy.model.tokens_computed

    toy.engine.add_request("again", PROMPT, GREEDY)
    again = toy.run()["again"]
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    hit = again.usage.cached_by_source.get("faulty", 0)
    assert hit <= lost * BLOCK
    if 6 not in windows:  # a window's blocks before the gap were not asked for
        assert hit == lost * BLOCK
    assert toy.model.tokens_computed - computed == len(PROMPT) - hit + GREEDY.max_tokens - 1
    assert again.timings.recomputed["failed"] == 5 * BLOCK - hit
    toy.assert_idle()
