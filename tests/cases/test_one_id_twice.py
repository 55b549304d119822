"""Two requests that call themselves the same are two requests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from served import toy_server


def test_two_requests_with_one_id_at_once_are_both_served_as_alone():
    with toy_server(gated=True) as server, ThreadPoolExecutor() as pool:
        assert server.gate is not None

        def ask(prompt: str):
            with server.client() as client:
                return client.post(
                    "/v1/completions",
                    json={"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True},
                    headers={"x-request-id": "the-same"},
                )

        both = [pool.submit(ask, prompt) for prompt in ("abc", "xyz")]
        server.until(lambda: server.service.serving.open_requests == 2)
        server.gate.open()
        answers = [answer.result() for answer in both]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert [answer.headers["x-request-id"] for answer in answers] == ["the-same"] * 2
        assert len({answer.json()["id"] for answer in answers}) == 2
        alone = [ask(prompt).json()["choices"] for prompt in ("abc", "xyz")]
        assert [answer.json()["choices"] for answer in answers] == alone
        server.until_idle()
