"""`kvstrata bench load` against a toy server behind real sockets: what is sent, counted and refused."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest
from served import TEMPLATE, ToyServer, toy_server
from toy import toy_tokenizer

from kvstrata.cli.app import main
from kvstrata.cli.bench import conversations as recorded
from kvstrata.cli.bench.lengths import Lengths
from kvstrata.cli.bench.load_client import Outcome, ask
from kvstrata.cli.bench.load_figures import Limits, figures
from kvstrata.cli.bench.load_plan import arrivals, from_trace, texts
from kvstrata.cli.remote import RemoteError, remote
from kvstrata.errors import ConfigError
from kvstrata.models.chat import ChatTemplate

ROOMY = {"blocks": 4000, "max_model_len": 4000, "token_budget": 512}


def test_load_tells_times_shares_and_goodput(capsys: pytest.CaptureFixture[str]) -> None:
    with toy_server(**ROOMY) as server:
        code = main(_load(server, "--requests", "12", "--rate", "200", "--longest", "60", "--shared", "20"))
        server.until_idle()
    result = json.loads(capsys.readouterr().out)
    assert code == 0
    assert result["requests"] == result["answered"] == 12
    assert result["errors"] == {}
    assert result["prompt_tokens"] > result["cached_tokens"] > 0
    assert result["cached_share"] == result["cached_tokens"] / result["prompt_tokens"]
    assert result["ttft_ms"]["p50"] <= result["ttft_ms"]["p99"] <= result["ttft_ms"]["max"]
    assert result["good_share"] == 1.0
    assert result["output_tok_s"] > 0


def test_errors_are_counted_and_do_not_count_as_good(capsys: pytest.CaptureFixture[str]) -> None:
    with toy_server(**ROOMY, settings={"max_prompt_tokens": 700}) as server:
        code = main(_load(server, "--requests", "30", "--rate", "500", "--longest", "300", "--shared", "0"))
    result = json.loads(capsys.readouterr().out)
    assert code == 0
    assert 0 < result["errors"]["400"] < 30
    assert result["answered"] == 30 - result["errors"]["400"]
    assert result["good_share"] == result["answered"] / 30


def test_a_run_without_one_answer_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with toy_server(**ROOMY, settings={"max_prompt_tokens": 1}) as server:
        assert main(_load(server, "--requests", "3", "--rate", "100")) == 1
    assert "none of 3 requests was answered" in capsys.readouterr().err


def test_without_a_server_there_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "load", "--url", "http://127.0.0.1:9"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: no server answers at http://127.0.0.1:9 (")
    assert told.count("\n") == 1


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://host:port", "http://host/v1"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url is"):
        remote(url)


def test_the_key_in_the_environment_is_sent_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_API_KEY", "secret")
    server = remote("http://127.0.0.1:1")
    assert server.headers == {"authorization": "Bearer secret"}
    assert "secret" not in repr(server)


def test_a_request_that_takes_too_long_is_given_up_and_its_blocks_come_back() -> None:
    body = {"prompt": "slow", "max_tokens": 5}
    with toy_server(gated=True) as server:
        outcome = asyncio.run(ask(remote(server.url), "/v1/completions", body, 0.2))
        assert server.gate is not None
        server.gate.open()
        server.until_idle()
    assert outcome.error == "timeout"
    assert outcome.ttft is None


def test_figures_count_only_what_was_answered_in_time() -> None:
    outcomes = [
        Outcome(
            ttft=0.1, gaps=[0.01, 0.03], total=0.2, prompt_tokens=10, cached_tokens=4, completion_tokens=3
        ),
        Outcome(ttft=2.0, gaps=[0.01], total=2.1, prompt_tokens=10, completion_tokens=2),
        Outcome(ttft=0.1, gaps=[0.5], total=0.6, prompt_tokens=10, completion_tokens=2),
        Outcome(error="429"),
    ]
    result = figures(outcomes, 2.0, Limits(ttft=1.0, itl=0.1))
    assert result["good_share"] == 0.25
    assert result["goodput_requests_per_second"] == 0.5
    assert result["output_tok_s"] == 3.5
    assert result["errors"] == {"429": 1}
    assert result["itl_ms"]["p50"] == pytest.approx(20.0)


def test_arrivals_come_at_the_rate_and_repeat_with_the_seed() -> None:
    times = arrivals(4000, 8.0, seed=1)
    assert times == arrivals(4000, 8.0, seed=1) != arrivals(4000, 8.0, seed=2)
    assert times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(8.0, rel=0.1)


def test_prompts_share_their_first_words_and_nothing_else() -> None:
    planned = texts([0.0, 1.0], [Lengths(40, 3), Lengths(60, 5)], shared=20, seed=0)
    words = [each.body["prompt"].split() for each in planned]
    assert [len(each) for each in words] == [40, 60]
    assert words[0][:20] == words[1][:20]
    assert words[0][20:] != words[1][20:40]
    assert [each.body["max_tokens"] for each in planned] == [3, 5]


def test_a_trace_gives_times_and_lengths(tmp_path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(
        gzip.compress(
            b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
            b"2023-11-16 18:15:46.6805900,374,44\n"
            b"2023-11-16 18:15:48.6805900,5000,20\n"
            b"2023-11-16 18:15:50.6805900,30,9000\n"
        )
    )
    times, lengths = from_trace(path, 10, 1000, None)
    assert times == pytest.approx([0.0, 2.0, 4.0])
    assert lengths[0] == Lengths(374, 44)
    assert all(each.total <= 1000 for each in lengths)
    stretched, _ = from_trace(path, 10, 1000, 3.0)
    assert stretched[-1] == pytest.approx(1.0)


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,2\n"])
def test_a_file_that_is_no_trace_is_refused(tmp_path, text: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--trace is"):
        from_trace(path, 10, 100, None)


def test_unlimited_hits_are_whole_leading_blocks_and_never_the_last_token() -> None:
    first = list(range(10))
    assert recorded.unlimited_hits([first], 4) == 0
    assert recorded.unlimited_hits([first, first], 4) == 8
    assert recorded.unlimited_hits([first, first[:8]], 4) == 4  # its last token has to be computed
    assert recorded.unlimited_hits([first, [99, *first[1:]]], 4) == 0  # the same second block, another parent
    assert recorded.unlimited_hits([first, [*first[:4], 7, 7, 7, 7, *first[8:]]], 4) == 4


def test_a_replay_finds_what_a_cache_without_limit_would(tmp_path) -> None:
    path = tmp_path / "runs.json"
    system = {"role": "system", "content": "policy " * 30}
    calls = [{"function": {"name": "look", "arguments": "{}"}}]
    runs = [
        [
            system,
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "content": "found", "name": "look", "tool_call_id": "1"},
            {"role": "assistant", "content": "done"},
        ]
        for number in range(4)
    ]
    path.write_text(json.dumps([{"traj": run} for run in runs]))
    conversations = recorded.read_conversations(path, 3)
    assert len(conversations) == 3
    assert conversations[0][2]["content"].endswith("look({})")
    assert {message["role"] for message in conversations[0]} == {"system", "user", "assistant"}
    # The toy's vocabulary has no line breaks.
    flat = [[{**m, "content": m["content"].strip()} for m in each] for each in conversations]
    turns = [recorded.turns_of(each, ChatTemplate(TEMPLATE), toy_tokenizer(), 1000) for each in flat]
    assert [len(each) for each in turns] == [2, 2, 2]
    asked: list[str] = []
    with toy_server(**ROOMY) as server:
        result = asyncio.run(_replay(server, turns, asked))
    # Two of the six, spread: one asked cold before its turn, one after.
    assert asked == ["cold", "replay", "replay", "replay", "replay", "cold", "replay", "replay"]
    assert result["of_unlimited"] == pytest.approx(1.0)
    assert 0.5 < result["cached_share"] < 1.0
    assert result["cold_requests"] == 2
    assert result["cold_cached_tokens"] == 0
    assert result["ttft_cold_p50_ms"] == result["cold_ttft_ms"]["p50"]


def test_what_was_asked_cold_leaves_the_replay_its_room_in_the_pool() -> None:
    # Prompts of 12 blocks: four of them and a cold one fit the pool, four and four cold ones do not.
    texts = [letter * 40 for letter in "abcd"] * 3
    turns = [recorded.Turn([{"role": "user", "content": text}], _tokens(text)) for text in texts]
    with toy_server(blocks=80, max_model_len=60) as server:
        result = asyncio.run(_replay(server, [turns], [], cold=12))
        server.until_idle()
    assert result["cold_requests"] == 12
    assert result["cold_cached_tokens"] == 0
    assert result["of_unlimited"] == pytest.approx(1.0)


def test_the_comparison_is_over_the_same_requests() -> None:
    pairs = [
        (Outcome(ttft=0.1, cached_tokens=9), Outcome(ttft=1.0)),
        (Outcome(ttft=0.3, cached_tokens=9), Outcome(ttft=0.9)),
        (Outcome(ttft=0.4, cached_tokens=9), Outcome(ttft=0.8)),
        (Outcome(ttft=9.0), Outcome(ttft=None)),  # has nothing to be compared with
    ]
    result = recorded.compared(pairs)
    assert result["cold_requests"] == 3
    assert result["ttft_warm_p50_ms"] == pytest.approx(300)
    assert result["ttft_cold_p50_ms"] == pytest.approx(900)
    assert result["ttft_p50_of_cold"] == pytest.approx(1 / 3)
    assert result["ttft_of_cold_paired"] == {"p50": pytest.approx(1 / 3), "max": pytest.approx(0.5)}


def test_places_are_spread_over_all_there_are() -> None:
    assert recorded.spread(3, 9) == [0, 3, 6]
    assert recorded.spread(4, 6) == [0, 1, 3, 4]
    assert recorded.spread(9, 3) == [0, 1, 2]


def test_a_replay_with_another_tokenizer_is_refused() -> None:
    turn = recorded.Turn([{"role": "user", "content": "hello"}], [1, 2])
    with toy_server(**ROOMY) as server, pytest.raises(RemoteError, match="give the model that it serves"):
        asyncio.run(_replay(server, [[turn]], []))


def _load(server: ToyServer, *arguments: str) -> list[str]:
    return [
        "bench",
        "load",
        "--url",
        server.url,
        "--json",
        "--ttft-limit",
        "100",
        "--itl-limit",
        "100",
        *arguments,
    ]


def _tokens(text: str) -> list[int]:
    return toy_tokenizer().encode(f"user: {text}/", parse_special=True)


async def _replay(
    server: ToyServer, turns: list[list[recorded.Turn]], asked: list[str], *, cold: int = 2
) -> dict:
    def advance(name: str) -> None:
        asked.append(name)
        server.toy.clock.now += 1.0

    return await recorded.replay(
        remote(server.url), turns, cold=cold, block_size=4, max_tokens=2, timeout=60.0, advance=advance
    )
