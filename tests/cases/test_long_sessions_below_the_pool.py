"""Six long sessions with a code planted in each, a RAM tier much smaller than the set, a large one below."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from faulty_tier import FaultyTier
from toy import FakeClock, make_toy

from kvstrata import SamplingParams
from kvstrata.tiers.disk import DiskOptions, DiskTier
from kvstrata.tiers.lifetime import Clocks
from kvstrata.tiers.ram import RamTier
from kvstrata.tiers.tier import StoreContext, Tier

SLOT = 4096
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("windows", [(None,), (None, 10)])
def test_each_session_gets_back_its_own_code(
    windows: tuple[int | None, ...], disk: bool, tmp_path: Path
) -> None:
    made: list[Tier] = []

    def make(context: StoreContext, clock: FakeClock) -> list[Tier]:
        made.append(RamTier(context, 10 * SLOT * len(windows), clock=clock))
        if disk:
            options = DiskOptions(tmp_path / "store", 16 << 20)
            made.append(DiskTier(options, context, clocks=Clocks(clock, time.time)))
        else:
            made.append(FaultyTier(context, clock, 16 << 20))
        return made

    toy = make_toy(blocks=30, windows=windows, tiers=make, queue_bytes=16 << 20)
    before, after = [1 + (i * 7 + i // 5) % 60 for i in range(20)], [1 + i % 50 for i in range(60)]
    sessions = [before + [61 + number] * 9 + after for number in range(6)]
    expected = []
    for turn in range(3):
        for number, session in enumerate(sessions):
            toy.clock.now += 1.0
            name = f"{turn}.{number}"
            toy.engine.add_request(name, session, GREEDY)
            answer = toy.run()[name]
            toy.settle()
            if turn == 0:
                alone = make_toy(blocks=64, windows=windows)
                alone.engine.add_request("x", session, GREEDY)
                expected.append(alone.run()["x"].outputs[0].token_ids)
            else:
                assert answer.usage.cached_tokens >= (len(session) - 1) // 4 * 4 - 4
            assert answer.outputs[0].token_ids == expected[number]
    lower = made[1]
    usage = lower.usage()
    assert usage.loads > 0
    if len(windows) == 1:  # else blocks of two sizes
        assert usage.loaded_bytes == usage.loads * (usage.stored_bytes // usage.stores)
    assert not usage.misses
    if isinstance(lower, FaultyTier):
        assert usage.loads == len(lower.loaded)
        assert set(lower.loaded) <= set(lower.stored)
    assert made[0].usage().evictions["space"] > 0
    toy.assert_idle()
    toy.engine.close()
