"""`kvstrata top`: figures from two readings, the page in 80 x 24, and the way out of it."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
from fcntl import ioctl

import pytest
from rich.console import Console
from served import START, toy_server

from kvstrata.cli.app import main
from kvstrata.cli.top_figures import Figures
from kvstrata.cli.top_samples import growth, quantiles, rate, read
from kvstrata.cli.top_view import bar_of, page, plain, sparkline

URL = "http://127.0.0.1:8000"
# Where the suite runs in the background its children ignore SIGINT; those of a terminal do not.
HEEDS_INTERRUPTS = """
import signal
from kvstrata.cli.app import main
signal.signal(signal.SIGINT, signal.default_int_handler)
raise SystemExit(main())
"""


def metrics(second: int) -> str:
    """What a busy server with two tiers tells after so many seconds."""
    return f"""# HELP kvstrata:info What is served.
kvstrata:info{{model="m",version="1"}} 1.0
kvstrata:up 1.0
kvstrata:num_requests_running 12.0
kvstrata:num_requests_waiting 3.0
kvstrata:request_success_total{{finished_reason="stop"}} {4 * second}.0
kvstrata:request_success_total{{finished_reason="length"}} {second}.0
kvstrata:time_to_first_token_seconds_bucket{{le="0.1"}} {5 * second}.0
kvstrata:time_to_first_token_seconds_bucket{{le="0.5"}} {10 * second}.0
kvstrata:time_to_first_token_seconds_bucket{{le="+Inf"}} {10 * second}.0
kvstrata:decode_tokens_total {340 * second}.0
kvstrata:prefix_cache_queries_total {2000 * second}.0
kvstrata:prefix_cache_hits_total {500 * second}.0
kvstrata:kv_pool_bytes{{state="held"}} 3e+08
kvstrata:kv_pool_bytes{{state="cached"}} 5e+08
kvstrata:kv_pool_bytes{{state="free"}} 2e+08
kvstrata:tier_usage_bytes{{tier="ram"}} 1e+09
kvstrata:tier_capacity_bytes{{tier="ram"}} 4e+09
kvstrata:tier_state{{tier="ram",state="closed"}} 0.0
kvstrata:tier_state{{tier="ram",state="open"}} 1.0
kvstrata:kv_evictions_total{{tier="pool",policy="lru",reason="space"}} {7 * second}.0
kvstrata:kv_evictions_total{{tier="ram",policy="lru",reason="expired"}} 4.0
kvstrata:a_name_of_tomorrow nonsense
"""


def watched(seconds: int) -> Figures:
    figures = Figures()
    for second in range(1, seconds + 1):
        figures.add(read(metrics(second), float(second)), {"hit_ratio": 0.25})
    return figures


def drawn(view: object, width: int = 80) -> list[str]:
    console = Console(width=width, height=24, file=io.StringIO(), record=True)
    console.print(view)
    return console.export_text().splitlines()


def test_rates_and_times_are_of_the_readings_between() -> None:
    told = watched(30).now()
    assert told["requests"]["running"] == 12
    assert told["requests"]["finished_per_second"] == pytest.approx(5.0)
    assert told["tokens_per_second"]["decode"] == pytest.approx(340.0)
    assert told["tokens_per_second"]["prefill"] is None  # not told
    assert told["ttft_ms"]["p50"] == pytest.approx(100.0)
    assert told["ttft_ms"]["p90"] == pytest.approx(420.0)
    assert told["hit_ratio"]["now"] == pytest.approx(0.25)
    assert told["evictions"]["total"] == {"space": 210.0, "expired": 4.0}
    assert told["evictions"]["per_second"] == pytest.approx(7.0)


def test_places_are_the_pool_and_the_tiers_with_their_state() -> None:
    pool, ram = watched(2).now()["places"]
    assert (pool["held_share"], pool["used_share"]) == (pytest.approx(0.3), pytest.approx(0.8))
    assert (ram["name"], ram["used_share"], ram["state"]) == ("ram", 0.25, "open")


def test_a_server_started_anew_is_no_negative_rate() -> None:
    old, new = read(metrics(100), 1.0), read(metrics(2), 2.0)
    assert rate(old, new, "decode_tokens_total") == 680.0
    assert growth(old, new, "request_success_total") == 10.0
    assert quantiles(old, new, "time_to_first_token_seconds", (0.5,)) == (pytest.approx(0.1),)


def test_without_observations_there_are_no_times() -> None:
    assert (
        quantiles(read(metrics(3), 1.0), read(metrics(3), 2.0), "time_to_first_token_seconds", (0.5,)) is None
    )
    assert quantiles(None, read("", 2.0), "time_to_first_token_seconds", (0.5,)) is None


def test_what_a_build_does_not_tell_is_taken_from_the_cache_page_or_left_out() -> None:
    group = {"held_blocks": 2, "cached_blocks": 3, "total_blocks": 10, "evictions": {"space": 3}}
    figures = Figures()
    for second in (1.0, 2.0):
        figures.add(read("", second), {"pool": [group], "requests_running": 1, "hit_ratio": None})
    told = figures.now()
    assert told["requests"]["running"] == 1
    assert told["evictions"]["total"] == {"space": 3}
    assert told["places"][0]["used_share"] == 0.5
    assert told["ttft_ms"]["p50"] is None
    assert drawn(page(URL, told, figures.course, 80))


def test_the_page_fits_80_by_24() -> None:
    figures = watched(200)
    lines = drawn(page(URL, figures.now(), figures.course, 80, trouble="no server answers"))
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "no server answers" in text
    assert "running 12" in text
    assert "now 25.0 %" in text
    assert "ram" in text


def test_the_plain_page_is_ascii() -> None:
    figures = watched(20)
    lines = drawn(plain(page(URL, figures.now(), figures.course, 80)))
    assert all(line.isascii() for line in lines)


def test_bars_and_courses_are_as_long_as_their_room() -> None:
    assert bar_of(0.25, 0.5, 8).plain == "██▒▒░░░░"
    assert bar_of(1.0, 1.0, 8).plain == "█" * 8
    assert bar_of(0.0, 7.0, 4).plain == "▒▒▒▒"
    assert sparkline([0.0, None, 1.0], 5) == "  ▁·█"
    assert len(sparkline([0.5] * 100, 20)) == 20


def test_once_tells_a_real_server_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with toy_server() as server:
        server.post(prompt="A prompt of some blocks", max_tokens=3).raise_for_status()
        code = main(["top", "--url", server.url, "--once", "--json", "--interval", "0.05"])
    told = json.loads(capsys.readouterr().out)
    assert code == 0
    assert told["url"] == server.url
    assert told["requests"]["running"] == 0
    assert told["places"][0]["name"] == "pool"
    assert told["places"][0]["used_share"] > 0


def test_without_a_server_there_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", "http://127.0.0.1:9"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: no server answers at http://127.0.0.1:9 (")
    assert told.count("\n") == 1


@pytest.mark.parametrize("url", ["http://a b", "http://a..b", "http://127.0.0.1:99999", "http://[x"])
def test_an_address_that_is_none_is_told_in_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", url]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert "internal error" not in told


@pytest.mark.parametrize("reply", [b"SSH-2.0-x\r\n", b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}"])
def test_what_is_no_http_server_is_told_in_one_line(reply: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(4096)
                client.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        assert main(["top", "--once", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}"]) == 1
        thread.join()
    told = capsys.readouterr().err
    assert told.startswith("error: no server answers at http://127.0.0.1:")
    assert told.count("\n") == 1


def test_a_wrong_key_is_told(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    from kvstrata.server.keys import load_keys

    (tmp_path / "keys").write_text("someone:0123456789abcdef0123\n")
    with toy_server(keys=load_keys(str(tmp_path / "keys"), None, "", "")) as server:
        assert main(["top", "--once", "--url", server.url]) == 1
    assert "KVSTRATA_API_KEY" in capsys.readouterr().err


def test_a_live_view_needs_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", "http://127.0.0.1:9"]) == 1
    assert "--once" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["q", "interrupt"])
def test_the_live_view_ends_when_asked_and_leaves_the_terminal_as_it_was(way: str) -> None:
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    with toy_server() as server:
        process = subprocess.Popen(
            [sys.executable, "-c", HEEDS_INTERRUPTS, "top", "--url", server.url, "--interval", "0.1"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "PYTHONUTF8": "1"},
        )
        try:
            seen = _until(ours, b"hit ratio")
            if way == "q":
                os.write(ours, b"q")
            else:
                process.send_signal(signal.SIGINT)
            assert process.wait(START) == 0, seen
        finally:
            process.kill()
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


def _until(terminal: int, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        assert select.select([terminal], [], [], START)[0], seen
        seen += os.read(terminal, 65536)
    return seen
