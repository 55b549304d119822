"""What HTTP costs: tokens a second of `kvstrata serve`, streamed to many clients, against `LLM.generate`.

Both do the same work on the same settings, round by round in turns: token ids as prompts, greedy answers of
a fixed length. The client is this process, on bare sockets, as light as it gets: it runs on the same cores.

    python benchmarks/server_overhead.py --streams 32 --tokens 128 --rounds 3 [--model FILE]

Prints one JSON object; `ratio` is the median over rounds of served / direct, `event_loop_us_per_token`
the CPU time of the server's event loop.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import time
from statistics import median
from typing import Any

_KV_MEMORY = "1GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--direct", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.direct:
        _direct(args)
        return
    print(json.dumps(compare(args)))


def compare(args: argparse.Namespace) -> dict[str, Any]:
    settings = ["--kv-memory", _KV_MEMORY, *(["--model", args.model] if args.model else [])]
    server = subprocess.Popen(
        [sys.executable, "-m", "kvstrata", "serve", "--port", "0", "--json", *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    direct = subprocess.Popen(
        [sys.executable, __file__, "--direct", *sys.argv[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    assert direct.stdout is not None
    assert direct.stdin is not None
    try:
        url = json.loads(server.stdout.readline())["url"]
        direct.stdout.readline()  # it is there
        pairs: list[tuple[float, float]] = []
        cpu = 0.0
        for number in range(-1, args.rounds):  # the first is a warm-up
            prompts = _prompts(number, args.streams, args.prompt_tokens)
            before = _loop_seconds(server.pid)
            served = _served(url, prompts, args.tokens)
            cpu = _loop_seconds(server.pid) - before
            direct.stdin.write(f"{number}\n")
            direct.stdin.flush()
            pairs.append((served, float(direct.stdout.readline())))
    finally:
        server.send_signal(signal.SIGTERM)
        direct.stdin.close()
        server.wait(60)
        direct.wait(60)
    pairs = pairs[1:]
    tokens = args.streams * args.tokens
    return {
        "streams": args.streams,
        "prompt_tokens": args.prompt_tokens,
        "tokens": args.tokens,
        "served_tok_s": tokens / median(served for served, _ in pairs),
        "direct_tok_s": tokens / median(own for _, own in pairs),
        "ratio": median(own / served for served, own in pairs),
        "ratios": [own / served for served, own in pairs],
        "event_loop_us_per_token": cpu / tokens * 1e6,
    }


def _prompts(number: int, streams: int, length: int) -> list[list[int]]:
    """Other ids each round, so that nothing is cached."""
    rng = random.Random(number)
    return [[rng.randrange(100, 40_000) for _ in range(length)] for _ in range(streams)]


def _loop_seconds(pid: int) -> float:
    """CPU seconds of a process's first thread."""
    with open(f"/proc/{pid}/task/{pid}/schedstat", encoding="ascii") as file:
        return int(file.read().split()[0]) / 1e9


def _served(url: str, prompts: list[list[int]], tokens: int) -> float:
    """Seconds until the last stream's end; every answer has to have all its tokens."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    selector = selectors.DefaultSelector()
    for _ in prompts:
        connection = socket.create_connection((host, int(port)))
        selector.register(connection, selectors.EVENT_READ, bytearray())
    began = time.perf_counter()
    for key, prompt in zip(list(selector.get_map().values()), prompts, strict=True):
        key.fileobj.sendall(_request(prompt, tokens))  # type: ignore[union-attr]
    open_streams = len(prompts)
    tails: list[bytes] = []
    while open_streams:
        for key, _ in selector.select():
            part = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            key.data.extend(part)
            if not part or key.data.endswith(b"0\r\n\r\n"):
                open_streams -= 1
                tails.append(bytes(key.data[-1000:]))
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
    seconds = time.perf_counter() - began
    for tail in tails:
        if f'"completion_tokens": {tokens},'.encode() not in tail:
            raise SystemExit(f"an answer is not whole: {tail!r}")
    return seconds


def _request(prompt: list[int], tokens: int) -> bytes:
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: kvstrata\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def _direct(args: argparse.Namespace) -> None:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # what the command line does for the server
    from kvstrata import LLM, SamplingParams  # noqa: PLC0415  (loads torch)

    llm = LLM(args.model, kv_memory=_KV_MEMORY)
    print("ready", flush=True)
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    for line in sys.stdin:
        prompts = _prompts(int(line), args.streams, args.prompt_tokens)
        began = time.perf_counter()
        llm.generate(prompts, params)
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()
