"""Found, then gone: after a positive look-up block 2 of 5 vanishes; the contiguous loaded part is used."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
from faulty_tier import FaultyTier
from toy import FakeClock, make_toy

from kvstrata import SamplingParams
from kvstrata.cache.keys import Extras
from kvstrata.tiers.disk import DiskOptions, DiskTier
from kvstrata.tiers.lifetime import Clocks
from kvstrata.tiers.tier import Address, Identity, Loaded, StoreContext, Tier

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


@pytest.mark.parametrize("lost", range(5))
def test_a_block_deleted_from_the_disk_after_the_look_up_ends_the_hit(lost: int, tmp_path: Path) -> None:
    gone: list[Address] = []

    class Vanishing(DiskTier):
        def load(self, wanted: Sequence[Identity], into: Sequence[memoryview]) -> Future[list[Loaded]]:
            assert self.delete(gone) == 1
            return super().load(wanted, into)

    def make(context: StoreContext, clock: FakeClock) -> list[Tier]:
        options = DiskOptions(tmp_path / "store", 1 << 20)
        return [Vanishing(options, context, clocks=Clocks(clock, time.time))]

    toy = make_toy(block_size=BLOCK, tiers=make)
    toy.engine.add_request("first", PROMPT, GREEDY)
    first = toy.run()["first"]
    toy.settle()
    toy.engine.reset_cache()
    gone.append(Address(toy.cache.chain(PROMPT, Extras()).keys[lost], 0))
    computed = toy.model.tokens_computed

    toy.engine.add_request("again", PROMPT, GREEDY)
    again = toy.run()["again"]
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.usage.cached_by_source.get("disk", 0) == lost * BLOCK
    assert toy.model.tokens_computed - computed == len(PROMPT) - lost * BLOCK + GREEDY.max_tokens - 1
    toy.settle()
    toy.assert_idle()
    toy.engine.close()
