"""The official client against a real server: what it asks for, it gets, in the shapes that it knows."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from served import START, ServerProcess

CAPITAL = [
    {"role": "system", "content": "You are a helpful assistant. Answer clearly and briefly."},
    {"role": "user", "content": "What is the capital of France?"},
]


@pytest.fixture
def ask(client: openai.OpenAI, server: ServerProcess) -> Any:
    def ask(messages: Any = CAPITAL, **more: Any) -> Any:
        return client.chat.completions.create(
            **{"model": server.model, "messages": messages, "temperature": 0, "max_tokens": 12, **more}
        )

    return ask


@pytest.fixture
def complete(client: openai.OpenAI, server: ServerProcess) -> Any:
    def complete(prompt: Any = "The capital of France is", **more: Any) -> Any:
        return client.completions.create(
            **{"model": server.model, "prompt": prompt, "temperature": 0, "max_tokens": 8, **more}
        )

    return complete


def test_the_answer_names_paris(ask):
    answer = ask(max_tokens=None, max_completion_tokens=40)
    assert isinstance(answer, ChatCompletion)
    [choice] = answer.choices
    assert "Paris" in choice.message.content
    assert (choice.message.role, choice.finish_reason, choice.index) == ("assistant", "stop", 0)
    assert answer.object == "chat.completion"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_adds_up_to_the_whole_answer(ask, complete):
    whole = ask(max_tokens=6)
    chunks = list(ask(max_tokens=6, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == whole.choices[0].message.content
    assert len([text for text in texts if text]) > 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    streamed = "".join(chunk.choices[0].text for chunk in complete(stream=True))
    assert streamed == complete().choices[0].text


def test_the_last_chunk_tells_the_usage_where_asked(ask, complete):
    for chunks in (
        list(ask(stream=True, stream_options={"include_usage": True})),
        list(complete(stream=True, stream_options={"include_usage": True})),
    ):
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens > 0
        assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_prompt_asked_again_is_found_in_the_cache(ask):
    messages = [{"role": "user", "content": "Tell me about lighthouses. " * 20}]
    salt = {"cache_salt": "found again"}
    cold = ask(messages, extra_body=salt).usage
    warm = ask(messages, extra_body=salt).usage
    assert cold.prompt_tokens_details.cached_tokens == 0
    assert warm.prompt_tokens_details.cached_tokens >= warm.prompt_tokens - 16
    other = ask(messages, extra_body={"cache_salt": "another"}).usage
    assert other.prompt_tokens_details.cached_tokens == 0


def test_n_answers_have_their_indices_whole_and_streamed(ask, complete):
    drawn = ask(n=3, temperature=1, seed=5)
    assert [choice.index for choice in drawn.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in drawn.choices]
    assert len(set(texts)) > 1
    streamed = ["", "", ""]
    for chunk in ask(n=3, temperature=1, seed=5, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    many = complete(["One two", "The sea"], n=2, temperature=1, seed=5)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]


def test_a_seed_repeats_and_may_be_negative(ask):
    texts = [ask(temperature=1, seed=-3).choices[0].message.content for _ in range(2)]
    assert texts[0] == texts[1]


def test_stop_texts_end_the_answer_and_are_left_out(ask, complete):
    whole = complete(max_tokens=16).choices[0].text
    stop = whole[6:9]
    choice = complete(max_tokens=16, stop=[stop]).choices[0]
    assert choice.text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"
    assert "".join(c.choices[0].text for c in complete(max_tokens=16, stop=stop, stream=True)) == choice.text


def test_chat_logprobs_tell_each_token_of_the_text(ask):
    choice = ask(logprobs=True, top_logprobs=3, max_tokens=40).choices[0]
    content = choice.logprobs.content
    assert choice.finish_reason == "stop"
    assert b"".join(bytes(token.bytes) for token in content).decode() == choice.message.content
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == max(t.logprob for t in token.top_logprobs)
        assert token.logprob == token.top_logprobs[0].logprob  # greedy takes the likeliest
    streamed = [
        token
        for chunk in ask(logprobs=True, top_logprobs=3, max_tokens=40, stream=True)
        for token in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert streamed == content
    assert ask(logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_completion_logprobs_tell_tokens_and_where_they_are(complete):
    choice = complete(logprobs=2).choices[0]
    told = choice.logprobs
    assert (
        len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == 8
    )
    assert "".join(told.tokens) == choice.text
    for token, offset in zip(told.tokens, told.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)


def test_echo_gives_the_prompt_back_with_its_logprobs(complete):
    prompt = "The capital of France is"
    choice = complete(prompt, echo=True, logprobs=1).choices[0]
    assert choice.text.startswith(prompt)
    assert choice.logprobs.token_logprobs[0] is None
    assert "".join(choice.logprobs.tokens) == choice.text
    alone = complete(prompt, echo=True, max_tokens=0, logprobs=1)
    assert alone.choices[0].text == prompt
    assert alone.usage.completion_tokens == 0
    assert len(alone.choices[0].logprobs.tokens) == alone.usage.prompt_tokens
    streamed = "".join(chunk.choices[0].text for chunk in complete(prompt, echo=True, stream=True))
    assert streamed == choice.text


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_a_streamed_echo_has_the_logprobs_of_a_whole_one(complete, max_tokens: int):
    asked = {"echo": True, "logprobs": 1, "n": 2, "max_tokens": max_tokens}
    whole = complete(["The capital of France is", "Two"], **asked)
    parts: dict[int, list] = {index: [] for index in range(4)}
    for chunk in complete(["The capital of France is", "Two"], stream=True, **asked):
        for choice in chunk.choices:
            parts[choice.index].append(choice)
    for choice in whole.choices:
        told = [part.logprobs for part in parts[choice.index] if part.logprobs is not None]
        assert "".join(part.text for part in parts[choice.index]) == choice.text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [entry for each in told for entry in getattr(each, name)] == getattr(choice.logprobs, name)


def test_prompts_may_be_token_ids(complete):
    assert complete([504, 3575, 282, 4649, 314]).choices[0].text == complete().choices[0].text
    both = complete([[504, 3575], [282, 4649, 314]], max_tokens=2)
    assert [choice.index for choice in both.choices] == [0, 1]


def test_penalties_change_what_is_said(complete):
    plain = complete("la la la la la la", max_tokens=16).choices[0].text
    assert complete("la la la la la la", max_tokens=16, frequency_penalty=2).choices[0].text != plain
    assert complete("la la la la la la", max_tokens=16, presence_penalty=2).choices[0].text != plain


def test_fields_beyond_the_fields_are_taken(ask):
    extra = {"priority": 3, "top_k": 5, "min_p": 0.1, "cache_salt": "s", "kvstrata": {"ttl": 60}}
    assert ask(user="someone", extra_body=extra).choices[0].message.content


def test_the_model_is_listed_and_found(client, server):
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).owned_by == "kvstrata"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


@pytest.mark.parametrize(
    ("wrong", "kind", "param"),
    [
        ({"model": "another"}, openai.NotFoundError, "model"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        ({"temperature": 1000}, openai.BadRequestError, "temperature"),
        ({"top_p": 0}, openai.BadRequestError, "top_p"),
        ({"n": 1000}, openai.BadRequestError, "n"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "user"}]}, openai.BadRequestError, "messages[0].content"),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "tools"),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format"),
        ({"logit_bias": {"5": 1}}, openai.BadRequestError, "logit_bias"),
        ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs"),
        ({"extra_body": {"bogus": 1}}, openai.BadRequestError, "bogus"),
        (
            {"extra_body": {"kvstrata": {"retention": "sinks:-1"}}},
            openai.BadRequestError,
            "kvstrata.retention",
        ),
        ({"extra_body": {"chat_template_kwargs": {"messages": 1}}}, openai.BadRequestError, "messages"),
    ],
)
def test_mistakes_are_the_clients_errors_and_name_the_field(ask, wrong, kind, param):
    with pytest.raises(kind) as caught:
        ask(**wrong)
    assert caught.value.param == param
    assert caught.value.body["type"] in ("invalid_request_error", "not_found_error")
    assert str(wrong.get(param, "")) in caught.value.body["message"] or param in caught.value.body["message"]


def test_a_request_chooses_what_its_queries_see(complete):
    prompt = "The lighthouse keeper wrote the same sentence into his book every evening. " * 4
    answers = {
        retention: complete(prompt, extra_body={"kvstrata": {"retention": retention}}).choices[0].text
        for retention in ("full", "window:2", "sinks:4+200", None)
    }
    assert answers[None] == answers["full"] == answers["sinks:4+200"]
    assert answers["window:2"] != answers["full"]


def test_a_prompt_that_is_too_long_is_told_with_the_limit(ask, complete):
    for call in (lambda: ask([{"role": "user", "content": "a " * 3000}]), lambda: complete("a " * 3000)):
        with pytest.raises(openai.BadRequestError, match="1023") as caught:
            call()
        assert caught.value.code == "context_length_exceeded"


def test_the_cache_tells_its_usage_and_is_not_for_everyone_to_change(server: ServerProcess):
    with httpx2.Client(base_url=server.url, timeout=START) as http:
        told = http.get("/v1/cache").json()
        assert 0 <= told["usage"] <= told["filled"] <= 1
        assert told["usage"] == 0
        assert told["hit_ratio"] is None or 0 <= told["hit_ratio"] <= 1
        for what in ("reset", "pin", "unpin"):
            answer = http.post(f"/v1/cache/{what}", json={})
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "admin_key_needed"


def test_the_docs_are_a_page_that_loads_nothing(server: ServerProcess):
    page = httpx2.get(f"{server.url}/docs")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "/v1/chat/completions" in page.text
    for loading in ("src=", "<script", "<link", "@import", "url(", "http://", "https://"):
        assert loading not in page.text


def test_health_and_readiness_are_told(server: ServerProcess):
    assert httpx2.get(f"{server.url}/health").json() == {"status": "ok"}
    assert httpx2.get(f"{server.url}/ready").json() == {"status": "ready"}


def test_errors_of_routing_have_the_fields_shape(server: ServerProcess):
    for method, path, status in (("GET", "/nothing", 404), ("GET", "/v1/completions", 405)):
        answer = httpx2.request(method, server.url + path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_each_request_is_one_line_in_the_log_without_its_prompt(ask, server: ServerProcess):
    name = "a-request-of-its-own"
    ask([{"role": "user", "content": "xyzzy"}], extra_headers={"x-request-id": name})
    for _ in range(1000):
        found = [line for line in server.logged() if line["id"] == name]
        if found:
            break
        httpx2.get(f"{server.url}/health")
    [line] = found
    assert line["status"] == 200
    assert line["prompt_tokens"] == sum(line["cached"].values())
    assert line["completion_tokens"] == 12
    assert line["finish_reason"] == "length"
    assert line["ttft_ms"] > 0
    assert not any("xyzzy" in text for text in server.lines)


def test_completions_parse_as_the_clients_own_type(complete):
    answer = complete()
    assert isinstance(answer, Completion)
    assert answer.object == "text_completion"
