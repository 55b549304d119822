"""What the engine counts: each request once, each token where it belongs, and what becomes of blocks."""

from __future__ import annotations

import random

import numpy as np
import pytest
from toy import Toy, make_toy

from kvstrata import SamplingParams
from kvstrata.engine import block_life
from kvstrata.engine.block_life import GHOST_SECONDS
from kvstrata.engine.histogram import Histogram, Recent
from kvstrata.engine.telemetry import Telemetry
from kvstrata.tiers.ram import RamTier

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def ask(toy: Toy, name: str, tokens: list[int], params: SamplingParams = ONE) -> None:
    toy.engine.add_request(name, tokens, params)
    toy.run()
    toy.clock.now += 1.0


def prompt(seed: int, length: int = 25) -> list[int]:
    return random.Random(seed).choices(range(1, 90), k=length)


def test_a_request_counts_once_however_often_it_is_preempted():
    toy = make_toy(blocks=12)
    for number in range(6):
        toy.engine.add_request(
            str(number), prompt(number, 14), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        )
    results = toy.run()
    told = toy.engine.telemetry
    assert sum(result.timings.preemptions for result in results.values()) > 0
    assert dict(told.finished) == {"length": 6}
    assert told.prompt_tokens == told.queried == 6 * 14
    assert told.generation_tokens == 6 * 20
    assert told.hits == told.by_source.total() - told.by_source["computed"]
    assert told.by_source.total() == 6 * 14
    for values, count in (
        (told.first_token_seconds, 6),
        (told.request_seconds, 6),
        (told.queue_seconds, 6),
        (told.inter_token_seconds, 6 * 19),
    ):
        assert values.read().count == count
    assert told.prefill_tokens + told.decode_tokens == toy.model.tokens_computed


def test_a_request_that_ends_in_the_queue_has_no_queue_time_and_asked_for_nothing():
    toy = make_toy(blocks=8, max_num_seqs=1)
    toy.engine.add_request("runs", prompt(1), SamplingParams(max_tokens=3, ignore_eos=True))
    toy.engine.add_request("waits", prompt(2), ONE)
    toy.step()
    toy.engine.abort("waits")
    toy.run()
    told = toy.engine.telemetry
    assert dict(told.finished) == {"abort": 1, "length": 1}
    assert told.queue_seconds.read().count == 1
    assert told.queried == 25


def test_an_abort_before_the_first_token_counts_what_it_found_and_nothing_computed():
    toy = make_toy(token_budget=8)
    ask(toy, "first", prompt(1)[:13])
    told = toy.engine.telemetry
    before = told.by_source.copy()
    toy.engine.add_request("second", prompt(1), ONE)
    toy.step()
    toy.engine.abort("second")
    toy.run()
    assert told.by_source - before == {"pool": 12}
    assert told.finished["abort"] == 1


def test_hits_are_told_by_source_and_a_failing_model_is_an_error():
    toy = make_toy(tiers=lambda context, clock: [RamTier(context, 1 << 20, clock=clock)])
    ask(toy, "cold", prompt(1))
    ask(toy, "pool", prompt(1))
    toy.settle()
    toy.engine.reset_cache()
    ask(toy, "ram", prompt(1))
    told = toy.engine.telemetry
    assert dict(told.by_source) == {"computed": 25 + 1 + 1, "pool": 24, "shared": 0, "ram": 24}
    assert told.hit_ratio == pytest.approx(48 / 75)
    toy.model.fail_on = 95
    ask(toy, "nan", [95])
    assert told.finished["error"] == 1


def test_the_hit_ratio_is_of_the_last_minutes():
    toy = make_toy()
    ask(toy, "a", prompt(1))
    ask(toy, "b", prompt(1))
    assert toy.engine.telemetry.hit_ratio > 0.4
    toy.clock.now += 1000
    assert toy.engine.telemetry.hit_ratio == 0.0


def test_prompts_whose_logits_are_all_wanted_do_not_ask_the_cache():
    toy = make_toy()
    ask(toy, "a", prompt(1), SamplingParams(max_tokens=1, prompt_logprobs=1, ignore_eos=True))
    assert (toy.engine.telemetry.queried, toy.engine.telemetry.prompt_tokens) == (0, 25)


def test_blocks_live_lie_idle_and_are_used_again():
    toy = make_toy(blocks=7)
    life = toy.engine.telemetry.blocks
    ask(toy, "a", prompt(1))  # six blocks, released at 0
    ask(toy, "again", prompt(1))  # used after 1 second, released then
    assert life.reuse.read().total == pytest.approx(6 * 1.0)
    toy.clock.now = 11.0
    ask(toy, "b", prompt(2))  # evicts all: born at 0, last used at 1
    assert life.lifetime.read().count == 6
    assert life.lifetime.read().total == pytest.approx(6 * 11.0)
    assert life.idle.read().total == pytest.approx(6 * 10.0)
    assert life.evictions["space"] == 6
    assert toy.engine.telemetry.eviction_rate == pytest.approx(6 / 60)
    toy.clock.now += 120
    assert toy.engine.telemetry.eviction_rate == 0


def test_what_is_computed_again_soon_after_its_eviction_is_thrashing():
    toy = make_toy(blocks=7)
    life = toy.engine.telemetry.blocks
    ask(toy, "a", prompt(1))
    ask(toy, "b", prompt(2))
    assert life.thrashed == 0
    ask(toy, "a again", prompt(1))
    assert life.thrashed == 24
    toy.clock.now += GHOST_SECONDS + 1
    ask(toy, "b much later", prompt(2))
    assert life.thrashed == 24


def test_what_comes_back_from_a_tier_was_not_computed_again():
    toy = make_toy(blocks=7, tiers=lambda context, clock: [RamTier(context, 1 << 20, clock=clock)])
    for name, seed in (("a", 1), ("b", 2), ("a again", 1)):
        ask(toy, name, prompt(seed))
        toy.settle()
    assert toy.engine.telemetry.by_source["ram"] == 24
    assert toy.engine.telemetry.blocks.thrashed == 0


def test_windows_that_move_on_do_not_count_as_thrashing():
    toy = make_toy(blocks=[64, 14], windows=(None, 8))
    for number in range(4):
        ask(toy, str(number), prompt(number, 40))
    life = toy.engine.telemetry.blocks
    assert life.evictions["space"] > 0
    assert life.thrashed == 0


def test_a_reset_leaves_no_ghosts_and_no_prefixes():
    toy = make_toy()
    ask(toy, "a", prompt(1))
    ask(toy, "b", prompt(1))
    life = toy.engine.telemetry.blocks
    assert [each.hits for each in life.top_prefixes(9)] == [1]
    toy.engine.reset_cache()
    assert life.top_prefixes(9) == []
    ask(toy, "c", prompt(1))
    assert (life.thrashed, life.lifetime.read().count) == (0, 0)


def test_ghosts_and_prefixes_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(block_life, "_MOST_GHOSTS", 10)
    monkeypatch.setattr(block_life, "_MOST_PREFIXES", 5)
    toy = make_toy(blocks=16)
    life = toy.engine.telemetry.blocks
    for _ in range(20):
        ask(toy, "often", prompt(999))
        for number in range(6):
            ask(toy, str(number), prompt(number))
            ask(toy, f"{number} again", prompt(number))
    assert len(life._ghosts) == 10
    assert len(life._prefixes) == 5
    assert sum(len(used) for used in life._used) <= 16


def test_the_prefixes_found_most_often_are_told_with_their_beginning():
    toy = make_toy()
    system = prompt(7, 16)
    for number in range(9):
        ask(toy, str(number), system + prompt(number, 6))
    ask(toy, "twice", prompt(50))
    ask(toy, "twice again", prompt(50))
    first, second = toy.engine.telemetry.blocks.top_prefixes(2)
    assert (first.tokens, first.hits, first.first[:16]) == (16, 8, system)
    assert second.hits == 1


def test_the_time_of_mixed_steps_is_divided_by_what_decode_takes_alone():
    telemetry = Telemetry(make_toy().cache)
    telemetry.step(100, 0, 1.0)
    assert (telemetry.prefill_seconds, telemetry.decode_seconds) == (1.0, 0.0)
    telemetry.step(30, 10, 0.4)  # nothing known of decode yet: by tokens
    assert telemetry.decode_seconds == pytest.approx(0.1)
    telemetry.step(0, 10, 0.05)
    telemetry.step(100, 10, 1.05)
    assert telemetry.decode_seconds == pytest.approx(0.2)
    assert telemetry.prefill_seconds == pytest.approx(2.3)
    assert (telemetry.prefill_tokens, telemetry.decode_tokens, telemetry.steps) == (230, 30, 4)


def test_one_value_at_a_time_or_many_at_once_count_alike():
    draw = random.Random(0)
    values = [draw.choice([0.0, 0.5, 1.0, draw.random() * 9]) for _ in range(500)]
    one, many = Histogram((0.5, 1.0, 5.0)), Histogram((0.5, 1.0, 5.0))
    for value in values:
        one.observe(value)
    many.observe_all(np.array(values))
    assert one.read().counts == many.read().counts
    assert one.read().counts[0] == sum(value <= 0.5 for value in values)
    assert one.read().total == pytest.approx(many.read().total)
    assert one.read().count == 500


def test_recent_sums_forget_what_is_older_than_their_window():
    recent = Recent(20.0)
    for second in range(100):
        recent.add(2, second + 0.5)
        assert recent.total(second + 0.5) == 2 * min(second + 1, 20)
    assert recent.total(110.5) == 2 * 9
    assert recent.total(1e6) == 0
