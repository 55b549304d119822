"""What `/metrics` tells: the right figures under the names that people know, at any moment."""

from __future__ import annotations

import threading
from typing import Any

from faulty_tier import FaultyTier
from metric_text import scrape, value
from served import START, toy_server
from speculating import layers

from kvstrata.tiers.ram import RamTier

VLLM_NAMES = {  # its counters' samples end in _total, as these
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "e2e_request_latency_seconds_count",
    "request_queue_time_seconds_count",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "kv_block_lifetime_seconds_count",
    "kv_block_idle_before_evict_seconds_count",
    "kv_block_reuse_gap_seconds_count",
}
PROMPT = "a prompt of four blocks and a bit"


def ram_tier(context: Any, clock: Any) -> list[RamTier]:
    return [RamTier(context, 1 << 20, clock=clock)]


def test_names_that_vllm_has_are_there():
    with toy_server() as server:
        assert {name for name, _ in scrape(server)} >= VLLM_NAMES


def test_requests_tokens_and_hits_add_up():
    with toy_server() as server:
        for _ in range(3):
            server.post(prompt=PROMPT, max_tokens=5, ignore_eos=True)
        server.post(prompt="")
        server.post("/v1/nothing/at/all")
        server.until_idle()
        told = scrape(server)
    length, found = len(PROMPT), len(PROMPT) // 4 * 4
    assert value(told, "request_success_total", finished_reason="length") == 3
    assert value(told, "request_success_total") == 3
    assert value(told, "prompt_tokens_total") == value(told, "prefix_cache_queries_total") == 3 * length
    assert value(told, "prefix_cache_hits_total") == 2 * found
    assert value(told, "prompt_tokens_cached_by_source_total", source="pool") == 2 * found
    assert value(told, "prompt_tokens_cached_by_source_total", source="computed") == 3 * length - 2 * found
    assert value(told, "prefix_cache_hit_ratio") == 2 * found / (3 * length)
    assert value(told, "generation_tokens_total") == 15
    assert value(told, "inter_token_latency_seconds_count") == 12
    assert value(told, "prefill_tokens_total") == 3 * length - 2 * found
    assert value(told, "decode_tokens_total") == 12
    assert value(told, "http_requests_total", path="/v1/completions", status="200") == 3
    assert value(told, "http_requests_total", path="/v1/completions", status="400") == 1
    assert value(told, "http_requests_total", path="other", status="404") == 1


def test_proposed_and_accepted_tokens_are_told_by_place():
    with toy_server(speculate=layers(3)) as server:
        server.post(prompt=PROMPT, max_tokens=9, ignore_eos=True)
        server.until_idle()
        told = scrape(server)
    # One token by the prompt's step, then 3 + 1 and 3 + 1, all of them right.
    assert value(told, "generation_tokens_total") == 9
    assert value(told, "spec_decode_num_drafts_total") == 2
    assert value(told, "spec_decode_num_draft_tokens_total") == 6
    assert value(told, "spec_decode_num_accepted_tokens_total") == 6
    for place in "012":
        assert value(told, "spec_decode_num_accepted_tokens_per_pos_total", position=place) == 2
    assert value(told, "spec_decode_draft_acceptance_rate") == 1


def test_histograms_are_cumulative_and_end_in_their_count():
    with toy_server() as server:
        server.post(prompt=PROMPT, max_tokens=5)
        told = scrape(server)
    for name in ("time_to_first_token_seconds", "kv_block_reuse_gap_seconds", "inter_token_latency_seconds"):
        buckets = sorted(
            (float(dict(labels)["le"]), count)
            for (sample, labels), count in told.items()
            if sample == f"{name}_bucket"
        )
        counts = [count for _, count in buckets]
        assert counts == sorted(counts)
        assert counts[-1] == value(told, f"{name}_count")


def test_what_is_evicted_is_told_by_place_policy_and_reason():
    with toy_server(blocks=12, policy="lru") as server:
        for number in range(6):
            server.post(prompt=str(number) * 30, max_tokens=1)
        told = scrape(server)
        evicted = value(told, "kv_evictions_total", tier="pool", policy="lru", reason="space")
        assert evicted == sum(server.toy.cache.stats().groups[0].evictions.values()) > 0
        assert value(told, "kv_block_lifetime_seconds_count") == evicted
        server.service.serving.call(server.toy.engine.reset_cache).result(START)
        assert value(scrape(server), "kv_evictions_total", reason="reset") > 0


def test_tiers_are_told_each_by_its_name():
    def two(context: Any, clock: Any) -> list[RamTier]:
        return ram_tier(context, clock) + ram_tier(context, clock)

    with toy_server(tiers=two) as server:
        server.post(prompt=PROMPT, max_tokens=1)
        server.until(lambda: not server.toy.engine.settling)
        server.service.serving.call(server.toy.engine.reset_cache).result(START)
        server.post(prompt=PROMPT, max_tokens=1)
        told = scrape(server)
    for name in ("ram", "ram-2"):
        assert value(told, "tier_stores_total", tier=name) == 8
        assert 0 < value(told, "tier_usage_bytes", tier=name) <= value(told, "tier_capacity_bytes", tier=name)
        assert value(told, "tier_state", tier=name, state="closed") == 1
        assert value(told, "kv_evictions_total", tier=name, policy="lrfu", reason="space") == 0
    assert value(told, "tier_loads_total", tier="ram") == 8
    assert value(told, "prompt_tokens_cached_by_source_total", source="ram") == 32


def test_without_tiers_there_is_nothing_about_them():
    with toy_server() as server:
        names = {name for name, _ in scrape(server)}
    assert not {name for name in names if name.startswith(("tier_usage", "tier_state", "audit"))}


def test_they_are_told_while_a_step_hangs():
    with toy_server(gated=True) as server:
        asking = threading.Thread(target=lambda: server.post(prompt=PROMPT, max_tokens=2))
        asking.start()
        assert server.gate is not None
        server.until(lambda: server.gate.arrived == 1)
        told = scrape(server)  # the engine's thread waits at the gate
        assert value(told, "num_requests_running") == 1
        assert value(told, "kv_cache_usage_perc") > 0
        server.gate.open()
        asking.join(START)


def test_they_are_told_while_a_tier_hangs_or_fails():
    made: list[FaultyTier] = []

    def faulty(context: Any, clock: Any) -> list[FaultyTier]:
        made.append(FaultyTier(context, clock))
        return made

    with toy_server(tiers=faulty) as server:
        made[0].failing = True
        for number in range(6):
            server.post(prompt=f"{number}{PROMPT}", max_tokens=1)
        server.until(lambda: value(scrape(server), "tier_state", tier="faulty", state="closed") == 0)
        told = scrape(server)
        assert value(told, "tier_breaker_trips_total", tier="faulty") >= 1
        assert value(told, "tier_queue_drops_total", tier="faulty") > 0


def test_clients_cannot_make_new_series():
    with toy_server() as server:
        before = len(scrape(server))
        for number in range(20):
            server.post(f"/v1/{number}", prompt="a")
            with server.client() as client:
                client.get(f"/v1/models/{number}", headers={"x-request-id": str(number)})
        after = len(scrape(server))
    assert after - before <= 3  # 404s of "other" and of models, and /metrics itself
