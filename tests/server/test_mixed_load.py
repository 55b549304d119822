"""Many clients at once, some of whom leave and some of whom send nonsense: nothing leaks, none gets 5xx."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections import Counter

import pytest
from metric_text import scrape, value
from scale import scaled
from served import START, ToyServer, request_bytes, toy_server

CONCURRENT = 64
MOST_GROWTH = 16 << 20  # bytes, of the process: caches of the interpreter, and this test's own log
NONSENSE = [
    b"",
    b"{",
    b'{"prompt": ""}',
    b'{"prompt": "a", "n": -1}',
    b'{"prompt": "\xff"}',
    b'{"prompt": 5}',
]


async def ask(server: ToyServer, number: int, statuses: Counter[str]) -> None:
    draw = random.Random(number)
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    kind = draw.choices(["whole", "stream", "leave", "nonsense"], [3, 3, 3, 1])[0]
    body = {
        "prompt": draw.choice(["shared prefix " * 3, "another beginning "]) + str(number),
        "max_tokens": draw.randint(1, 60),
        "n": draw.choice([1, 1, 3]),
        "temperature": draw.choice([0, 1]),
        "stream": kind == "stream" or (kind == "leave" and draw.random() < 0.5),
        "ignore_eos": True,
    }
    sent = draw.choice(NONSENSE) if kind == "nonsense" else json.dumps(body).encode()
    try:
        writer.write(request_bytes(sent, headers="connection: close\r\n"))
        if kind == "leave":
            await asyncio.sleep(draw.random() * 0.03)
            statuses["left"] += 1
        else:
            answer = await asyncio.wait_for(reader.read(), START)
            statuses[answer[9:12].decode()] += 1
    finally:
        writer.close()


@pytest.mark.slow
def test_mixed_requests_leave_nothing_behind_and_are_all_in_the_log_and_the_metrics():
    total = scaled(1000, 150)
    statuses: Counter[str] = Counter()

    async def all_of_them(server: ToyServer, numbers: range) -> None:
        places = asyncio.Semaphore(CONCURRENT)

        async def one(number: int) -> None:
            async with places:
                await ask(server, number, statuses)

        await asyncio.gather(*(one(number) for number in numbers))

    # A pool that 16 running answers do not fit: preemptions are part of the mix.
    with toy_server(blocks=90, settings={"max_queue": 40}) as server:
        asyncio.run(all_of_them(server, range(total // 2)))
        server.until_idle()
        gc.collect()
        resident = value(scrape(server), "process_resident_memory_bytes")
        asyncio.run(all_of_them(server, range(total // 2, total)))
        server.until_idle()
        gc.collect()
        assert not server.service.calls
        server.until(lambda: len(server.entries()) == total)
        samples = scrape(server)
        logged = Counter(str(entry["status"]) for entry in server.entries())
        assert server.service.serving.healthy
        finished = [entry for entry in server.entries() if "finish_reason" in entry]
    assert sum(statuses.values()) == total
    assert set(statuses) <= {"200", "400", "429", "left"}
    assert statuses["200"] > total / 10
    assert set(logged) <= {"200", "400", "429", "499"}
    assert logged["400"] >= statuses["400"] > 0
    assert value(samples, "process_resident_memory_bytes") - resident < MOST_GROWTH
    path = "/v1/completions"
    for status, count in logged.items():
        assert value(samples, "http_requests_total", path=path, status=status) == count
    assert value(samples, "http_requests_total", path=path) == total
    # What reached the engine: requests whose result is in the log, and those whose client left before.
    ended = value(samples, "request_success_total")
    assert len(finished) <= ended <= len(finished) + logged["499"]
    assert value(samples, "e2e_request_latency_seconds_count") == ended
    assert value(samples, "request_success_total", finished_reason="error") == 0
    whole = sum("abort" not in entry["finish_reason"] for entry in finished)
    answered = value(samples, "request_success_total", finished_reason="length") + value(
        samples, "request_success_total", finished_reason="stop"
    )
    assert whole <= answered <= whole + logged["499"]
    assert value(samples, "num_preemptions_total") > 0
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "memory_pressure"):
        assert value(samples, name) == 0
