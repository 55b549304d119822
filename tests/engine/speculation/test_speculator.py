"""How far the engine looks ahead: budgets, ends, what pays and what does not, and what is tried again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Listed

import pytest
from speculating import WAYS, flat_costs, layers, ngram
from toy import MakeSpeculator, Toy, ToyModel, make_toy

from kvstrata import SamplingParams
from kvstrata.cache.manager import KVCache
from kvstrata.engine.request import Sequence
from kvstrata.engine.settle import Verdict
from kvstrata.engine.speculation import speculator as under_test
from kvstrata.engine.speculation.costs import Point, StepCosts
from kvstrata.engine.speculation.speculator import Speculator
from kvstrata.engine.work import Work

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


class Scripted:
    """Always offers the same chances, and proposes token 1; notes how many it was asked for."""

    def __init__(self, chance: float, cost: float | None) -> None:
        self.costs = None if cost is None else StepCosts([Point(1, cost, cost)], 1)
        self.chance = chance
        self.rooms: list[int] = []

    def outlook(self, sequence: Sequence, most: int) -> list[float]:
        return [self.chance] * most

    def draft(self, works: Listed[Work]) -> list[tuple[int, ...]]:
        self.rooms += [work.room for work in works if work.sequence.output_ids]
        return [(1,) * work.room for work in works]

    def learn(self, works: Listed[Work], verdicts: Listed[Verdict]) -> None:
        pass

    def tidy(self) -> None:
        pass

    def reset(self) -> None:
        pass


def rising_costs() -> StepCosts:
    return StepCosts([Point(n, 1.0 + 0.3 * n, 1.0 + 0.3 * n) for n in (1, 2, 4, 8, 16)], 1)


def scripted(chance: float, cost: float | None = None) -> tuple[Scripted, MakeSpeculator]:
    drafter = Scripted(chance, cost)

    def make(model: ToyModel, cache: KVCache, token_budget: int) -> Speculator:
        return Speculator(drafter, rising_costs(), most=6)

    return drafter, make


def ask(toy: Toy, count: int = 1, params: SamplingParams = GREEDY) -> None:
    for number in range(count):
        toy.engine.add_request(str(number), [number + 1, 5, 9], params)
    toy.run()


def test_what_is_likely_is_proposed_and_what_is_not_is_left() -> None:
    for chance, proposes in ((0.95, True), (0.05, False)):
        drafter, make = scripted(chance)
        ask(make_toy(speculate=make))
        assert any(drafter.rooms) == proposes


def test_what_does_not_pay_is_tried_once_in_a_while_and_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(under_test, "_LEAST_PATIENCE", 8)
    drafter, make = scripted(0.05, cost=0.01)
    ask(make_toy(speculate=make), params=SamplingParams(temperature=0, max_tokens=120, ignore_eos=True))
    tries = [place for place, room in enumerate(drafter.rooms) if room]
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert len(tries) > 2
    assert gaps == sorted(gaps)
    assert gaps[-1] > gaps[0]


def test_what_could_never_pay_is_never_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "_LEAST_PATIENCE", 2)
    drafter, make = scripted(0.9, cost=5.0)
    ask(make_toy(speculate=make))
    assert not any(drafter.rooms)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_stays_within_its_token_budget(way: str) -> None:
    toy = make_toy(token_budget=10, blocks=128, speculate=WAYS[way])
    widest = []
    forward = toy.model.forward

    def noted(batch):  # type: ignore[no-untyped-def]
        widest.append(len(batch.token_ids))
        return forward(batch)

    toy.model.forward = noted  # type: ignore[method-assign]
    ask(toy, count=6)
    assert max(widest) <= 10


def test_prompts_that_wait_have_half_of_what_decodes_leave() -> None:
    toy = make_toy(token_budget=9, blocks=128, speculate=layers(64))
    toy.engine.add_request("first", [1, 2, 3], GREEDY)
    toy.step()
    toy.engine.add_request("second", [4] * 40, GREEDY)
    works: list[Work] = []
    schedule = toy.engine.scheduler.schedule
    toy.engine.scheduler.schedule = lambda: works.extend(found := schedule()) or found  # type: ignore[method-assign, func-returns-value]
    toy.step()
    assert [(work.count, work.room) for work in works] == [(1, 4), (4, 0)]


def test_no_more_is_proposed_than_the_answer_may_have() -> None:
    toy = make_toy(speculate=layers(16))
    ask(toy, params=SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert toy.engine.telemetry.speculation.draft_tokens == 2  # 1 by the prompt's step, 1 without a proposal


def test_tables_give_back_what_was_covered_for_rejected_tokens() -> None:
    toy = make_toy(speculate=layers(16, wrong_one_in=2))
    toy.engine.add_request("x", [1, 2, 3], GREEDY)
    while toy.engine.has_unfinished:
        toy.step()
        for sequence in toy.engine.scheduler.running:
            assert sequence.cache is not None
            assert len(sequence.cache.tables[0]) <= -(-sequence.num_tokens // 4)
            assert sequence.num_computed == sequence.num_tokens - 1


@pytest.mark.parametrize("way", WAYS)
def test_counts_of_requests_add_up_to_the_engines(way: str) -> None:
    toy = make_toy(blocks=200, speculate=WAYS[way])
    for number in range(4):
        toy.engine.add_request(str(number), [1 + number, 2, 3] * 4, GREEDY)
    results = toy.run()
    counts = [result.timings.speculation for result in results.values()]
    told = toy.engine.telemetry.speculation
    assert told.drafts == sum(each.drafts for each in counts)
    assert told.draft_tokens == sum(each.draft_tokens for each in counts)
    assert (
        told.accepted_tokens == sum(each.accepted_tokens for each in counts) == sum(told.accepted_by_position)
    )


def test_the_last_tokens_of_a_prompt_are_not_gone_beyond() -> None:
    """Proposals follow answers only: the prompt's last row forks them first."""
    toy = make_toy(speculate=ngram())
    toy.engine.add_request("a", [1, 2, 3, 4] * 4, GREEDY)
    toy.run()
    toy.engine.add_request("b", [1, 2, 3, 4] * 4, SamplingParams(temperature=0.9, seed=1, max_tokens=9, n=3))
    before = toy.engine.telemetry.speculation.drafts
    toy.step()  # all but the last token of the prompt is found
    assert toy.engine.telemetry.speculation.drafts == before
    toy.run()
    toy.assert_idle()


def test_costs_are_learnt_from_decode_steps_only() -> None:
    seen: list[int] = []
    costs = flat_costs()
    costs.observe = lambda spans, seconds: seen.append(len(spans))  # type: ignore[method-assign]
    drafter = Scripted(0.05, None)

    def make(model: ToyModel, cache: KVCache, token_budget: int) -> Speculator:
        return Speculator(drafter, costs, most=3)

    toy = make_toy(speculate=make)
    toy.engine.add_request("x", [1, 2, 3], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    toy.run()
    assert seen == [1, 1]
