"""Prompts that nobody shares, in a pool that is too small for them: no hits, and gauges in bounds."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

from metric_text import Samples, scrape, value
from served import toy_server

REQUESTS = 60
SHARES = ("kv_cache_usage_perc", "memory_pressure", "prefix_cache_hit_ratio")
AT_REST = ("kv_cache_usage_perc", "memory_pressure", "num_requests_running", "num_requests_waiting")


def assert_in_bounds(samples: Samples) -> None:
    for name in SHARES:
        assert 0 <= value(samples, name) <= 1
    states = [value(samples, "kv_pool_bytes", state=state) for state in ("held", "cached", "free")]
    assert min(states) >= 0
    assert all(number >= 0 for number in samples.values())


def test_nothing_is_found_and_gauges_stay_within_bounds_and_are_zero_when_idle():
    draw = random.Random(3)

    with toy_server(blocks=24) as server, ThreadPoolExecutor(12) as clients:

        def ask(number: int) -> int:
            tokens = random.Random(number).choices(range(1, 90), k=draw.randint(8, 30))
            return server.post(prompt=tokens, max_tokens=20, ignore_eos=True).status_code

        pending = [clients.submit(ask, number) for number in range(REQUESTS)]
        while not all(each.done() for each in pending):
            assert_in_bounds(scrape(server))
        assert [each.result() for each in pending] == [200] * REQUESTS
        server.until_idle()
        samples = scrape(server)
        assert_in_bounds(samples)
        for name in AT_REST:
            assert value(samples, name) == 0
        assert value(samples, "num_preemptions_total") > 0
        assert value(samples, "prefix_cache_hits_total") < 0.05 * value(samples, "prefix_cache_queries_total")
        assert value(samples, "request_success_total") == REQUESTS
        assert value(samples, "e2e_request_latency_seconds_count") == REQUESTS
        states = [value(samples, "kv_pool_bytes", state=state) for state in ("held", "cached", "free")]
        assert sum(states) == value(samples, "kv_pool_capacity_bytes")
