"""A tier that fails, hangs or is left in the middle costs hits, never answers, and gives all memory back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest
from faulty_tier import FaultyTier
from toy import FakeClock, MakeTiers, Toy, make_toy

from kvstrata import SamplingParams
from kvstrata.engine.outputs import RequestOutput
from kvstrata.tiers.tier import Record, StoreContext, Stored, Tier
from kvstrata.tiers.worker import completed

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = [1 + i * 3 % 90 for i in range(33)]


def faulty(made: list[FaultyTier]) -> MakeTiers:
    def make(context: StoreContext, clock: FakeClock) -> list[Tier]:
        made.append(FaultyTier(context, clock))
        return list(made)

    return make


def ask(toy: Toy, name: str, prompt: list[int] = PROMPT) -> RequestOutput:
    toy.engine.add_request(name, prompt, GREEDY)
    return toy.run()[name]


def stored(made: list[FaultyTier], **settings: int) -> tuple[Toy, RequestOutput]:
    """A toy whose pool has forgotten what its tier has."""
    toy = make_toy(tiers=faulty(made), **settings)
    first = ask(toy, "first")
    toy.settle()
    toy.engine.reset_cache()
    return toy, first


def fail(tier: FaultyTier) -> None:
    tier.failing = True


def raise_(tier: FaultyTier) -> None:
    tier.raising = True


@pytest.mark.parametrize("fault", [fail, raise_])
def test_a_failing_tier_costs_hits_only_and_is_left_alone_after_some_failures(
    fault: Callable[[FaultyTier], None],
) -> None:
    made: list[FaultyTier] = []
    toy, first = stored(made)
    fault(made[0])
    assert toy.stack is not None
    for number in range(5):
        result = ask(toy, str(number))
        assert result.outputs[0].token_ids == first.outputs[0].token_ids
        assert result.usage.cached_by_source.get("faulty", 0) == 0
        toy.engine.reset_cache()
        toy.settle()
    assert toy.stack.stats()[0].state == "open"
    toy.assert_idle()


def test_a_tier_that_recovers_is_used_again() -> None:
    made: list[FaultyTier] = []
    toy, _ = stored(made)
    assert toy.stack is not None
    made[0].failing = True
    for number in range(5):
        ask(toy, f"failing {number}")
        toy.settle()
        toy.engine.reset_cache()
    made[0].failing = False
    toy.clock.now += 120.0
    assert ask(toy, "after").usage.cached_by_source["faulty"] == 32
    assert toy.stack.stats()[0].state == "closed"


def test_a_tier_that_hangs_is_given_up_and_its_memory_waits_for_it() -> None:
    made: list[FaultyTier] = []
    toy, first = stored(made)
    made[0].gate.clear()
    toy.engine.add_request("hung", PROMPT, GREEDY)
    for _ in range(3):
        toy.step()
    assert len(toy.engine.scheduler.loading) == 1
    toy.clock.now += 60.0
    result = toy.run()["hung"]
    assert result.outputs[0].token_ids == first.outputs[0].token_ids
    assert result.timings.recomputed["failed"] == 32
    assert toy.stack is not None
    assert toy.stack.stats()[0].state == "open"
    assert toy.cache.stats().groups[0].held > 0, "the tier may still write there"
    made[0].gate.set()
    while toy.cache.stats().groups[0].held:
        toy.stack.wait(0.1)
        toy.step()
    toy.assert_idle()


def test_others_run_while_one_waits_for_its_load() -> None:
    made: list[FaultyTier] = []
    toy, _ = stored(made)
    made[0].gate.clear()
    toy.engine.add_request("loads", PROMPT, GREEDY)
    toy.engine.add_request("computes", PROMPT[5:20], GREEDY)
    finished = set()
    for _ in range(30):
        finished |= {d.request_id for d in toy.step() if d.result is not None}
    assert finished == {"computes"}
    made[0].gate.set()
    assert toy.run()["loads"].usage.cached_by_source["faulty"] == 32


def test_an_aborted_load_gives_its_blocks_back_when_the_tier_is_done() -> None:
    made: list[FaultyTier] = []
    toy, first = stored(made)
    made[0].gate.clear()
    toy.engine.add_request("gone", PROMPT, GREEDY)
    while not toy.engine.scheduler.loading:
        toy.step()
    assert toy.engine.abort("gone")
    toy.cache.check_integrity()
    assert toy.cache.stats().groups[0].held == 8
    made[0].gate.set()
    result = ask(toy, "next")
    assert result.outputs[0].token_ids == first.outputs[0].token_ids
    while toy.cache.stats().groups[0].held:
        toy.step()
    toy.assert_idle()


def test_a_request_that_needs_memory_a_dead_tier_holds_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstrata.engine.engine._STARVED", 0.0)
    made: list[FaultyTier] = []
    toy, _ = stored(made, blocks=12)
    made[0].gate.clear()
    toy.engine.add_request("hung", PROMPT, GREEDY)
    for _ in range(3):
        toy.step()
    toy.clock.now += 60.0
    result = toy.run()["hung"]
    assert result.outputs[0].finish_reason == "error"
    assert "does not answer" in (result.error or "")
    made[0].gate.set()


def test_closing_does_not_wait_for_ever_for_a_tier_that_hangs() -> None:
    made: list[FaultyTier] = []
    toy = make_toy(tiers=faulty(made))
    made[0].gate.clear()
    ask(toy, "a")
    closing = threading.Thread(target=toy.engine.close, args=(0.5,), daemon=True)
    closing.start()
    closing.join(20.0)
    assert not closing.is_alive()
    made[0].gate.set()


class Elsewhere(FaultyTier):
    """A tier on other machines. gone: all of them are; known: that is known before a store meets it. refused:
    stores that met it.
    """

    gone = False
    known = True
    refused = 0

    @property
    def available(self) -> bool:
        return not (self.gone and self.known)

    def store(self, records: Sequence[Record]) -> Future[list[Stored]]:
        if self.gone:
            self.refused += 1
            return completed([Stored("unavailable")] * len(records))
        return super().store(records)


def without_servers(*, known: bool = True, **settings: int) -> tuple[Toy, Elsewhere]:
    """A toy over such a tier while all of its machines are gone."""
    made: list[Elsewhere] = []

    def make(context: StoreContext, clock: FakeClock) -> list[Tier]:
        made.append(Elsewhere(context, clock))
        return list(made)

    toy = make_toy(tiers=make, **settings)
    made[0].gone, made[0].known = True, known
    return toy, made[0]


@pytest.mark.parametrize("known", [True, False])
def test_what_was_computed_while_all_servers_were_down_is_offered_when_one_is_back(known: bool) -> None:
    toy, tier = without_servers(known=known)
    first = ask(toy, "first")
    toy.engine.drain(10.0)
    assert toy.engine.tiering is not None
    assert toy.engine.tiering.offload.dirty == 9
    refused = tier.refused
    assert (refused == 0) == known
    for _ in range(50):  # all this in no time: it is not asked again and again
        toy.engine.tend()
        toy.engine.drain(10.0)
    assert tier.refused == refused
    tier.gone = False
    toy.clock.now += 1.5
    for _ in range(4):
        toy.engine.tend()
        toy.engine.drain(10.0)
    assert toy.engine.tiering.offload.dirty == 0
    toy.engine.reset_cache()
    again = ask(toy, "again")
    assert again.usage.cached_by_source["faulty"] == 32
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_a_tier_lost_between_question_and_offer_is_offered_the_same_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy, _ = without_servers()
    assert toy.stack is not None
    assert toy.engine.tiering is not None
    ask(toy, "first")
    monkeypatch.setattr(toy.stack, "has_room", lambda group: True)
    toy.engine.tend()
    assert toy.engine.tiering.offload.dirty == 9


def test_draining_passes_over_what_has_left_the_pool_meanwhile() -> None:
    toy, tier = without_servers(known=False, blocks=48)
    assert toy.engine.tiering is not None
    prompts = [[start, *PROMPT] for start in range(1, 10)]
    for number, prompt in enumerate(prompts):
        ask(toy, str(number), prompt)
    tier.gone = False
    toy.clock.now += 1.5
    toy.engine.drain(10.0)
    assert toy.engine.tiering.offload.dirty == 0
    toy.engine.reset_cache()
    assert ask(toy, "again", prompts[-1]).usage.cached_by_source["faulty"] == 32


@pytest.mark.parametrize("known", [True, False])
def test_closing_does_not_wait_for_a_tier_that_takes_nothing(known: bool) -> None:
    toy, _ = without_servers(known=known)
    ask(toy, "first")
    closing = threading.Thread(target=toy.engine.close, args=(600.0,), daemon=True)
    closing.start()
    closing.join(60.0)
    assert not closing.is_alive()
