"""kill -9 of the process that leads, in the middle of a prompt: another takes over where its blocks end."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from valkey_servers import ValkeyServer, url_of

from kvstrata import LLM, SamplingParams
from kvstrata.cli.cluster import engine_processes

TOKENS = 2400
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@pytest.mark.slow
def test_the_follower_has_its_answer(smollm2_path: Path, valkeys: list[ValkeyServer]) -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(100, 40_000) for _ in range(TOKENS)]
    settings = {
        "model": str(smollm2_path),
        "kv_memory": "128MiB",
        "max_model_len": TOKENS + 64,
        "max_num_batched_tokens": 64,
        "threads": 1,
        "load_mode": "always",
    }
    with LLM(**settings) as alone:
        [expected] = alone.generate([prompt], ONE)
    shared = {**settings, "tiers": [url_of(valkeys, timeout="1s")]}
    with engine_processes(shared, 2) as (leader, follower):
        leader.send({"ask": [prompt]})
        while sum(int(str(server.call("DBSIZE"))) for server in valkeys) < 20:
            pass  # its first blocks
        follower.send({"ask": [prompt]})
        leader.kill()
        answer = follower.receive()
    assert answer["token_ids"] == [expected.outputs[0].token_ids]
    leases = answer["leases"]
    assert leases["takeovers"] + leases["wins"] + leases["unavailable"] >= 1, leases
    assert leases["timeouts"] == 0, leases
    assert answer["computed_tokens"] <= TOKENS - 16
    assert answer["computed_tokens"] + answer["cached_by_source"]["valkey"] == TOKENS
