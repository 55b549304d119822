"""Toy engines over Valkey servers, and prompts for them."""

from __future__ import annotations

import time

from toy import FakeClock, Toy, make_toy

from kvstrata import RequestOptions, SamplingParams
from kvstrata.tiers.lifetime import Clocks
from kvstrata.tiers.tier import StoreContext, Tier
from kvstrata.tiers.url import parse_tier_url
from kvstrata.tiers.valkey.settings import ValkeySettings
from kvstrata.tiers.valkey.tier import ValkeyTier

BLOCK = 4
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[1 + (start * 7 + i * 3) % 90 for i in range(70)] for start in range(10)]


def answers(toy: Toy, prompts: list[list[int]], options: RequestOptions | None = None) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        toy.engine.add_request(str(number), prompt, GREEDY, options=options)
    results = toy.run(max_steps=10_000_000)  # a step that waits for a server counts too
    return [results[str(number)].outputs[0].token_ids for number in range(len(prompts))]


def toy_over(url: str) -> Toy:
    def make(context: StoreContext, clock: FakeClock) -> list[Tier]:
        settings = ValkeySettings.from_url(parse_tier_url(url))
        return [ValkeyTier(settings, context, clocks=Clocks(clock, time.time))]

    return make_toy(block_size=BLOCK, blocks=128, tiers=make)
