"""What operators see of the cache and do to it, on a toy engine behind real sockets."""

from __future__ import annotations

import json
from typing import Any

from faulty_tier import FaultyTier
from served import START, ToyServer, request_bytes, toy_server

from kvstrata.server.keys import KeyRing, parse_keys
from kvstrata.tiers.ram import RamTier

ALICE, ADMIN = "alice-secret", "admin-secret"
PROMPT = "a prompt that the operator wants to keep, whatever comes; " * 2


def ring(*, tenants: bool = True) -> KeyRing:
    return KeyRing(
        parse_keys([f"alice:{ALICE}"], "test") if tenants else (), parse_keys([ADMIN], "test", "admin")[0]
    )


def ram_tier(context: Any, clock: Any) -> list[RamTier]:
    return [RamTier(context, 1 << 20, clock=clock)]


def cached(answer: Any) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def flood(server: ToyServer, key: str = ADMIN) -> None:
    """Prompts of others, more than the pool holds."""
    for number in range(12):
        assert server.post(key=key, prompt=str(number) * 100, max_tokens=1).status_code == 200


def test_a_pinned_prompt_outlives_a_flood_and_an_unpinned_one_does_not():
    with toy_server(keys=ring(tenants=False), blocks=80) as server:
        pinned = server.post("/v1/cache/pin", key=ADMIN, prompt=PROMPT).json()
        assert pinned == {"status": "ok", "tokens": len(PROMPT) // 4 * 4}
        flood(server)
        kept = cached(server.post(key=ADMIN, prompt=PROMPT + "?", max_tokens=1))
        assert kept == pinned["tokens"]
        assert server.post("/v1/cache/unpin", key=ADMIN, prompt=PROMPT).json()["found"]
        flood(server)
        assert cached(server.post(key=ADMIN, prompt=PROMPT + "?", max_tokens=1)) == 0
        assert not server.post("/v1/cache/unpin", key=ADMIN, prompt=PROMPT).json()["found"]
        server.until_idle()


def test_the_operator_pins_for_a_tenant_by_the_keys_name():
    with toy_server(keys=ring()) as server:
        assert server.post("/v1/cache/pin", key=ALICE, prompt=PROMPT).status_code == 403
        server.post("/v1/cache/pin", key=ADMIN, prompt=PROMPT)
        assert cached(server.post(key=ALICE, prompt=PROMPT)) == 0
        server.post("/v1/cache/reset", key=ADMIN)
        with server.client(ADMIN) as client:
            body = {"prompt": PROMPT, "key": "alice"}
            assert client.post("/v1/cache/pin", json=body).status_code == 200
            assert client.post("/v1/cache/pin", json={**body, "key": "bob"}).status_code == 400
        assert cached(server.post(key=ALICE, prompt=PROMPT)) > 0


def test_what_cannot_be_pinned_is_named():
    with toy_server(keys=ring(), blocks=16) as server:
        for body, param in (
            ({}, "prompt"),
            ({"prompt": "a", "messages": []}, "prompt"),
            ({"prompt": ""}, "prompt"),
            ({"prompt": [1, 5000]}, "prompt"),
            ({"prompt": [-1]}, "prompt"),
            ({"prompt": "a" * 500}, None),
            ({"messages": [{"role": "user"}], "ttl": -1}, "ttl"),
        ):
            answer = server.post("/v1/cache/pin", key=ADMIN, **body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param
        server.until_idle()


def test_a_reset_says_whether_the_tiers_were_cleared_too():
    with toy_server(keys=ring(tenants=False), tiers=ram_tier) as server:

        def warm() -> int:
            server.post(key=ADMIN, prompt=PROMPT, max_tokens=1)
            server.until(lambda: not server.toy.engine.settling)
            assert server.post("/v1/cache/reset", key=ADMIN).json()["tiers"] is False
            return cached(server.post(key=ADMIN, prompt=PROMPT, max_tokens=1))

        assert warm() > 0  # from the tier
        assert server.post("/v1/cache/reset", key=ADMIN, tiers=True).json()["tiers"]
        assert server.toy.stack is not None
        server.until(lambda: server.toy.stack.stats()[0].usage.records == 0)
        assert cached(server.post(key=ADMIN, prompt=PROMPT, max_tokens=1)) == 0
    with toy_server(keys=ring(tenants=False)) as server:
        assert not server.post("/v1/cache/reset", key=ADMIN, tiers=True).json()["tiers"]


def test_a_reset_lets_go_of_pins():
    with toy_server(keys=ring(tenants=False), blocks=64) as server:
        server.post("/v1/cache/pin", key=ADMIN, prompt=PROMPT)
        server.post("/v1/cache/reset", key=ADMIN)
        server.until_idle()
        with server.client(ADMIN) as client:
            assert client.get("/v1/cache").json()["pool"][0]["free_blocks"] == 64


def test_tiers_are_told_and_the_most_used_prompts_without_their_words_unless_allowed():
    for shown in (False, True):
        with toy_server(tiers=ram_tier, settings={"show_prefixes": shown}) as server:
            for number in range(5):
                server.post(prompt=PROMPT + str(number), max_tokens=1)
            server.until(lambda: not server.toy.engine.settling)
            with server.client() as client:
                told = client.get("/v1/cache").json()
            assert told["tiers"][0]["name"] == "ram"
            assert told["tiers"][0]["blocks"] > 0
            [top] = told["top_prefixes"]
            assert (top["hits"], top["tokens"]) == (4, len(PROMPT) // 4 * 4)
            assert ("first_words" in top) is shown
            if shown:
                assert PROMPT.replace(" ", "").startswith(top["first_words"].replace(" ", ""))


def test_tenants_do_not_see_what_others_ask_for():
    with toy_server(keys=ring(), settings={"show_prefixes": True}) as server:
        for _ in range(3):
            server.post(key=ALICE, prompt=PROMPT)
        with server.client(ALICE) as client:
            assert "top_prefixes" not in client.get("/v1/cache").json()
        with server.client(ADMIN) as client:
            assert client.get("/v1/cache").json()["top_prefixes"][0]["hits"] == 2


def test_an_idle_engine_tends_its_tiers():
    with toy_server(tiers=ram_tier, audit=1.0) as server:
        server.post(prompt=PROMPT, max_tokens=1)
        server.until(lambda: not server.toy.engine.settling)
        server.service.serving.call(server.toy.engine.reset_cache).result(START)
        assert cached(server.post(prompt=PROMPT, max_tokens=1)) > 0
        tiering = server.toy.engine.tiering
        assert tiering is not None
        server.until(lambda: tiering.audit.counts.checked > 0 and not tiering.audit.pending)


def test_unpinning_what_is_no_prompt_is_the_clients_mistake():
    with toy_server(keys=ring()) as server:
        for prompt in ([-1], [5000], [2**70]):
            answer = server.post("/v1/cache/unpin", key=ADMIN, prompt=prompt)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "prompt"


def test_blocks_that_a_slow_tier_was_filling_come_back_while_the_engine_is_idle():
    made: list[FaultyTier] = []

    def slow(context: Any, clock: Any) -> list[FaultyTier]:
        made.append(FaultyTier(context, clock))
        return made

    with toy_server(tiers=slow) as server:
        server.post(prompt=PROMPT, max_tokens=1)
        server.until(lambda: not server.toy.engine.settling)
        server.service.serving.call(server.toy.engine.reset_cache).result(START)
        made[0].gate.clear()
        connection = server.connect()
        connection.sendall(request_bytes(json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()))
        server.until(lambda: server.toy.engine.scheduler.loading)
        connection.close()  # the client leaves while its blocks are being loaded
        server.until(lambda: not server.toy.engine.has_unfinished)
        assert server.toy.cache.stats().groups[0].held > 0
        made[0].gate.set()
        server.until(lambda: server.toy.cache.pools[0].num_held == 0)
        server.until_idle()
