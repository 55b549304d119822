"""Keys, limits and their errors, on a toy engine behind real sockets."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from served import request_bytes, toy_server

from kvstrata.errors import ConfigError
from kvstrata.server.keys import ApiKey, KeyRing, load_keys, parse_keys

ALICE, BOB, ADMIN = "alice-secret", "bob-secret", "admin-secret"


def ring(*, admin: bool = True) -> KeyRing:
    keys = parse_keys([f"alice:{ALICE}", f"bob:{BOB}"], "test")
    return KeyRing(keys, parse_keys([ADMIN], "test", "admin")[0] if admin else None)


def test_without_a_right_key_nothing_is_served_but_health_and_docs():
    with toy_server(keys=ring()) as server:
        for path in ("/v1/models", "/v1/cache", "/nothing"):
            for key in ("wrong-secret", ""):
                with server.client(key) as client:
                    answer = client.get(path)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        assert server.post(key="wrong-secret", prompt="abc").status_code == 401
        assert server.post(key=ALICE, prompt="abc").status_code == 200
        with server.client("") as client:
            for path in ("/health", "/ready", "/docs", "/openapi.json"):
                assert client.get(path).status_code == 200
        names = [entry.get("key") for entry in server.entries() if entry["status"] == 200]
        assert "alice" in names
        assert ALICE not in server.log.getvalue()


def cached(answer) -> int:
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_key_cannot_find_what_another_has_cached_even_with_its_salt():
    prompt = "a prompt of some length, long enough to fill blocks"
    with toy_server(keys=ring()) as server:
        assert cached(server.post(key=ALICE, prompt=prompt, cache_salt="s")) == 0
        assert cached(server.post(key=ALICE, prompt=prompt, cache_salt="s")) > 0
        assert cached(server.post(key=ALICE, prompt=prompt)) == 0
        assert cached(server.post(key=BOB, prompt=prompt, cache_salt="s")) == 0
        known = ApiKey("alice", hashlib.sha256(ALICE.encode()).digest()).salted("s")
        assert cached(server.post(key=BOB, prompt=prompt, cache_salt=known)) == 0


def test_keys_share_the_cache_where_the_operator_says_so():
    with toy_server(keys=ring(), settings={"share_cache": True}) as server:
        server.post(key=ALICE, prompt="a prompt of some length")
        assert cached(server.post(key=BOB, prompt="a prompt of some length")) > 0


def test_only_the_admin_key_resets_the_cache():
    with toy_server(keys=ring()) as server:
        server.post(key=ALICE, prompt="a prompt of some length")
        assert server.post("/v1/cache/reset", key=ALICE).status_code == 403
        assert cached(server.post(key=ALICE, prompt="a prompt of some length")) > 0
        assert server.post("/v1/cache/reset", key=ADMIN).json()["tiers"] is False
        assert cached(server.post(key=ALICE, prompt="a prompt of some length")) == 0


def test_metrics_need_a_key_of_their_own_where_there_are_api_keys():
    metrics = parse_keys(["scrape-secret"], "test", "metrics")[0]
    admin = parse_keys([ADMIN], "test", "admin")[0]
    keys = KeyRing(parse_keys([f"alice:{ALICE}"], "test"), admin, metrics)
    expected = {"": 401, "wrong-secret": 401, ALICE: 403, ADMIN: 200, "scrape-secret": 200}
    with toy_server(keys=keys) as server:
        for key, status in expected.items():
            with server.client(key) as client:
                assert client.get("/metrics").status_code == status
        with server.client("scrape-secret") as client:
            assert client.get("/v1/models").status_code == 403
            assert client.get("/health").status_code == 200
        assert server.post(key="scrape-secret", prompt="abc").status_code == 403


def test_metrics_are_open_without_api_keys_or_by_the_operators_word():
    with toy_server() as server, server.client("") as client:
        assert client.get("/metrics").status_code == 200
    with toy_server(keys=ring(), settings={"open_metrics": True}) as server:
        for key in ("", ALICE):
            with server.client(key) as client:
                assert client.get("/metrics").status_code == 200


def test_a_metrics_key_guards_them_even_without_api_keys():
    keys = KeyRing((), None, parse_keys(["scrape-secret"], "test", "metrics")[0])
    with toy_server(keys=keys) as server:
        with server.client("") as client:
            assert client.get("/metrics").status_code == 401
        assert server.post(key="", prompt="abc").status_code == 200


def test_a_keys_priority_has_a_floor():
    with toy_server(keys=ring()) as server:
        assert server.post(key=ALICE, prompt="abc", priority=-1).status_code == 400
        assert server.post(key=ALICE, prompt="abc", priority=1).status_code == 200
    with toy_server() as server:
        assert server.post(prompt="abc", priority=-1).status_code == 200


def test_a_body_over_the_limit_is_413_by_its_length_and_by_its_bytes():
    with toy_server(settings={"max_body": 1000}) as server:
        assert server.post(prompt="a" * 2000).status_code == 413
        with server.client() as client:
            answer = client.post("/v1/completions", content=(b"x" * 100 for _ in range(50)))
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        assert server.post(prompt="abc").status_code == 200


def test_a_body_of_more_values_than_prompts_can_need_is_413_before_it_is_parsed():
    with toy_server(settings={"max_n": 2}) as server:
        room = (1 << 16) + 2 * server.service.usual_prompt_tokens
        # As many marks as values, the fields' names included: {"prompt": [[], ... has 2 each and 3 more.
        fits, not_any_more = (room - 2) // 2, (room - 2) // 2 + 1
        assert server.post(prompt=[[]] * fits).json()["error"]["code"] == "invalid_value"
        answer = server.post(prompt=[[]] * not_any_more)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"


def test_an_unknown_field_is_named_with_its_place():
    with toy_server() as server:
        error = server.post(prompt="a", bogus=1).json()["error"]
        assert (error["param"], error["message"]) == ("bogus", "bogus: there is no such field")
        error = server.post(prompt="a", kvstrata={"bogus": 1}).json()["error"]
        assert error["param"] == "kvstrata.bogus"


def test_a_body_that_does_not_come_is_408():
    with toy_server(settings={"body_timeout": 0.05}) as server:
        with server.connect() as connection:
            connection.sendall(request_bytes(b'{"prompt": "abc"}')[:-5])
            assert b"408" in connection.recv(100)
        assert server.post(prompt="abc").status_code == 200


def test_limits_of_prompt_and_n_name_themselves():
    with toy_server(settings={"max_prompt_tokens": 10, "max_n": 2}) as server:
        long = server.post(prompt="a" * 11).json()["error"]
        assert (long["code"], "11" in long["message"]) == ("context_length_exceeded", True)
        assert "max_n" in server.post(prompt="a", n=3).json()["error"]["message"]
        assert "max_n" in server.post(prompt=["a", "b", "c"]).json()["error"]["message"]
        assert server.post(prompt="a" * 10, n=2).status_code == 200


def test_more_requests_than_a_key_may_have_open_are_429_with_a_time_to_wait():
    with toy_server(keys=ring(), gated=True, settings={"max_requests_per_key": 1}) as server:
        assert server.gate is not None
        with ThreadPoolExecutor() as pool:
            first = pool.submit(server.post, key=ALICE, prompt="abc")
            server.until(lambda: server.service.admission.open == 1)
            refused = server.post(key=ALICE, prompt="abc")
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
            second = pool.submit(server.post, key=BOB, prompt="abc")
            server.gate.open()
            assert first.result().status_code == second.result().status_code == 200
        assert server.post(key=ALICE, prompt="abc").status_code == 200


def test_a_full_queue_is_429_and_the_others_are_served():
    with toy_server(gated=True, settings={"max_queue": 0}) as server, ThreadPoolExecutor(16) as pool:
        assert server.gate is not None
        running = [pool.submit(server.post, prompt=f"{n}") for n in range(16)]
        server.until(lambda: server.service.admission.open == 16)
        refused = server.post(prompt="x")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        server.gate.open()
        assert {answer.result().status_code for answer in running} == {200}
        server.until_idle()


def test_unusable_keys_are_refused_without_being_shown(tmp_path):
    file = tmp_path / "keys"
    for text in ("", "# only words\n", "name:short\n", "a:with a space in it\n"):
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_keys(str(file), None)
        assert "short" not in str(caught.value).replace("shorter", "")
    file.write_text("alice:alice-secret\nalice:other-secret\n")
    with pytest.raises(ConfigError, match="twice"):
        load_keys(str(file), None)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_keys(str(tmp_path / "none"), None)


def test_keys_come_from_files_and_the_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\n\nalice:alice-secret\n")
    keys = load_keys(str(file), None, "bob:bob-secret, carol:carol-secret", "admin-secret")
    for name in ("alice", "bob", "carol"):
        found = keys.find(f"{name}-secret")
        assert found is not None
        assert found.name == name
    assert keys.find("dave-secret") is None
    admin = keys.find("admin-secret")
    assert admin is not None
    assert admin.admin
