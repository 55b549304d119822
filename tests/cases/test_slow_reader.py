"""A client that does not read its long stream holds up nobody, and gets all of it in the end."""

from __future__ import annotations

import json

from served import request_bytes, toy_server

TOKENS = 3000
ANSWERS = 3  # with log-probabilities some 15 MB: more than the system's buffers take


def test_a_stream_that_nobody_reads_is_computed_to_its_end_and_kept_merged_until_it_is_read():
    body = {
        "prompt": "abc",
        "n": ANSWERS,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": 20,
    }
    with toy_server(blocks=2400, max_model_len=3100) as server, server.connect(4096) as connection:
        asked = json.dumps({**body, "stream": True}).encode()
        connection.sendall(request_bytes(asked, headers="connection: close\r\n"))
        server.until(lambda: server.service.serving.open_requests == 1)
        for _ in range(20):  # others are served meanwhile
            assert server.post(prompt="xyz", max_tokens=5).status_code == 200
        server.until(lambda: server.service.serving.open_requests == 0)
        assert server.service.admission.open == 1  # computed, but not yet told
        with connection.makefile("rb") as stream:
            events = [line[6:] for line in stream if line.startswith(b"data: ")]
        assert events.pop() == b"[DONE]\n"
        whole = server.post(**body).json()["choices"]
        texts, told, chunks = [""] * ANSWERS, [0] * ANSWERS, 0
        for event in events:
            for choice in json.loads(event)["choices"]:
                texts[choice["index"]] += choice["text"]
                told[choice["index"]] += len(choice["logprobs"]["tokens"])
                chunks += 1
        assert texts == [choice["text"] for choice in whole]
        assert told == [TOKENS] * ANSWERS
        assert chunks < TOKENS * ANSWERS  # what waited was merged
        server.until_idle()
