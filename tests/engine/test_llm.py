"""The front door, on the default model: prompts in every form, streams, chats, and mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from real import bits

from kvstrata import LLM, RequestOptions, SamplingParams
from kvstrata.errors import ConfigError, ModelError, RequestError
from kvstrata.kernels import backend

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_path), kv_memory="256MiB", max_model_len=1024) as llm:
        yield llm


@pytest.fixture(autouse=True)
def integrity(llm: LLM) -> Iterator[None]:
    yield
    llm.engine.cache.check_integrity()
    assert not llm.engine.has_unfinished
    assert all(group.held == 0 for group in llm.engine.cache.stats().groups)


def test_the_answer_names_paris(llm: LLM) -> None:
    messages = [
        {"role": "system", "content": "You are a helpful assistant. Answer clearly and briefly."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    [result] = llm.chat(messages, GREEDY)
    assert "Paris" in result.outputs[0].text
    assert result.outputs[0].finish_reason == "stop"


def test_prompts_in_every_form_give_the_same_answer(llm: LLM) -> None:
    text = "The capital of France is"
    ids = llm.tokenizer.encode(text)
    forms = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
    results = [llm.generate(form, GREEDY)[0] for form in forms] + llm.generate(forms, GREEDY)
    assert len({tuple(r.outputs[0].token_ids) for r in results}) == 1
    assert [r.prompt for r in results[:4]] == [text, None, text, None]


def test_ids_may_come_from_arrays_tuples_and_generators(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The capital of France is")
    lists = [tuple(ids), np.array(ids), torch.tensor(ids), list(np.array(ids)), iter(ids)]
    results = [llm.generate(form, GREEDY)[0] for form in lists]
    results += llm.generate((form for form in (ids, np.array(ids))), GREEDY)
    results += llm.generate(np.array([ids, ids]), GREEDY)
    assert len({tuple(r.outputs[0].token_ids) for r in results}) == 1
    assert len(results) == len(lists) + 4


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["One two three", "Once upon a time there was", "x"]
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (9, 1, 5)]
    done: list[int] = []
    results = llm.generate(prompts, params, progress=lambda finished, total: done.append(finished))
    assert [r.prompt for r in results] == prompts
    assert [len(r.outputs[0].token_ids) for r in results] == [9, 1, 5]
    assert done == [1, 2, 3]


def test_no_prompts_no_results(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_streams_read_in_turn_equal_their_results(llm: LLM) -> None:
    streams = [llm.stream(text, GREEDY) for text in ("The sea is", "My name is")]
    texts, results = ["", ""], {}
    open_streams = {0, 1}
    while open_streams:
        for number in sorted(open_streams):
            delta = next(streams[number], None)
            if delta is None:
                open_streams.discard(number)
            else:
                texts[number] += delta.text
                results[number] = delta.result or results.get(number)
    assert [results[n].outputs[0].text for n in (0, 1)] == texts


def test_a_stream_that_is_closed_early_gives_its_blocks_back(llm: LLM) -> None:
    stream = llm.stream("A very long story about", SamplingParams(max_tokens=500, ignore_eos=True))
    for _ in range(3):
        next(stream)
    stream.close()
    assert not any(r for r in llm.engine.scheduler.running)
    llm.generate("x", GREEDY)


@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_stream_that_nobody_reads_is_aborted_with_it(llm: LLM, end: str) -> None:
    stream = llm.stream("A very long story about", SamplingParams(max_tokens=500, ignore_eos=True))
    if end == "close":
        stream.close()
    del stream
    assert len(llm.engine.scheduler.waiting) == 0
    llm.engine.step()


def test_closing_the_model_ends_the_streams_that_are_being_read(llm: LLM) -> None:
    reasons = []
    for delta in llm.stream("A very long story about", SamplingParams(max_tokens=500, ignore_eos=True)):
        reasons.append(delta.finish_reason)
        llm.close()
    assert reasons == [None, "abort"]


def test_a_salt_is_a_wall(llm: LLM) -> None:
    text = "The quick brown fox jumps over the lazy dog and then it sleeps in the sun for a while. " * 3
    cached = [
        llm.generate(text, GREEDY, options=RequestOptions(cache_salt=salt))[0].usage.cached_tokens
        for salt in ("alice", "bob", "alice", "bob", "")
    ]
    assert cached[0] == cached[1] == cached[4] == 0
    assert cached[2] == cached[3] > 0


def test_chat_turns_find_the_turns_before_them(llm: LLM) -> None:
    messages = [
        {"role": "user", "content": "Say hello to the harbour master of Vellan Point in one sentence."}
    ]
    [first] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=40))
    messages += [
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "Now say goodbye."},
    ]
    [second] = llm.chat(messages, GREEDY)
    assert second.usage.cached_tokens >= (first.usage.prompt_tokens - 1) // 16 * 16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(""), "prompt is empty"),
        (lambda llm: llm.generate({"text": "x"}), "prompt has the keys"),
        (
            lambda llm: llm.generate(["a", "b"], [SamplingParams()]),
            "sampling_params has 1 entries for 2 prompts",
        ),
        (lambda llm: llm.generate("a \ud800 b"), "half a surrogate"),
        (lambda llm: llm.stream(), "either a prompt or messages"),
        (lambda llm: llm.generate([[1, 10**6]]), "token id 1000000"),
        (lambda llm: llm.generate("word " * 2000), "max_model_len"),
        (lambda llm: llm.generate(None), "prompts is NoneType None; give text, token ids"),
        (lambda llm: llm.generate(b"abc"), "prompts is bytes"),
        (lambda llm: llm.generate({"a", "b"}), "prompts is set"),
        (lambda llm: llm.generate([None]), "prompt is NoneType None"),
        (lambda llm: llm.generate([1, None]), "prompt holds NoneType None; token ids are whole numbers"),
        (lambda llm: llm.generate([[1.0]]), "prompt holds float 1.0"),
        (lambda llm: llm.generate([[True]]), "prompt holds bool True"),
        (lambda llm: llm.generate({"prompt": ["a"]}), "'prompt' is list"),
        (lambda llm: llm.generate({"prompt_token_ids": 5}), "prompt_token_ids is int 5"),
        (lambda llm: llm.stream(["a", "b"]), "prompt holds str 'a'"),
        (lambda llm: llm.generate("a", {"max_tokens": 3}), "sampling_params is dict"),
        (lambda llm: llm.generate("a", [None]), "sampling_params has NoneType None"),
        (lambda llm: llm.stream("a", "greedy"), "sampling_params is str 'greedy'"),
        (lambda llm: llm.generate("a", options={"priority": 1}), "options is dict"),
        (lambda llm: llm.generate("a", progress=5), "progress is int 5"),
        (lambda llm: llm.chat("hello"), "messages is str 'hello'"),
        (lambda llm: llm.chat({"role": "user", "content": "x"}), "messages is dict"),
        (lambda llm: llm.chat(None), "messages is NoneType None"),
        (
            lambda llm: llm.generate("a", SamplingParams(stop_token_ids=[10**6])),
            "stop_token_ids has token id",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(llm: LLM, call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RequestError, match=message) as caught:
        call(llm)
    assert "\n" not in str(caught.value)


def test_a_bad_prompt_in_a_list_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.generate(["fine", "word " * 2000], GREEDY)
    assert not llm.engine.scheduler.running
    assert len(llm.engine.scheduler.waiting) == 0
    llm.engine.step()


def test_settings_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        LLM(str(tmp_path / "nowhere.gguf"))
    with pytest.raises(ConfigError, match="no such setting"):
        LLM(kv_mem="1GiB")


def test_a_pool_too_small_for_one_block_says_what_would_do(smollm2_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_memory"):
        LLM(str(smollm2_path), kv_memory="1KiB")
    with pytest.raises(ConfigError, match=r"kv_memory is \d+; the cpu has \d+ bytes"):
        LLM(str(smollm2_path), kv_memory="900TiB", device="cpu")
    with pytest.raises(ConfigError, match="give an EngineConfig"):
        LLM(config=5)  # type: ignore[arg-type]


def test_layers_kept_in_a_higher_format_have_groups_and_keys_of_their_own(smollm2_path: Path) -> None:
    settings = {"kv_dtype": "int4", "kv_memory": "64MiB", "weights": "fp32"}
    with (
        LLM(str(smollm2_path), **settings) as plain,
        LLM(str(smollm2_path), **settings, kv_dtype_skip_layers="0,1,-1") as skipping,
    ):
        layouts = [group.pool.layout for group in skipping.engine.cache.groups]
        assert [(lay.format.name, len(lay.group.layers)) for lay in layouts] == [("int4", 27), ("bf16", 3)]
        assert layouts[1].group.layers == (0, 1, 29)
        assert plain.engine.cache.fingerprint != skipping.engine.cache.fingerprint
        answers = skipping.generate(["A ship " * 20, "A ship " * 21], GREEDY)
        assert answers[0].outputs[0].text
    with pytest.raises(ConfigError, match="kv_dtype_skip_layers has layer 30; the model's are 0 to 29"):
        LLM(str(smollm2_path), kv_dtype_skip_layers=[30])


@pytest.mark.skipif(backend() == "reference", reason="the torch reference is not batch-invariant")
@pytest.mark.parametrize("retention", ["full", "sinks:4+60"])
def test_int4_without_what_keys_have_in_common_is_exact(smollm2_path: Path, retention: str) -> None:
    """Cold, in small chunks, and after a hit in the pool: the same bits."""
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=2, ignore_eos=True)
    settings = {"kv_dtype": "int4", "kv_memory": "32MiB", "weights": "auto", "retention": retention}
    with (
        LLM(str(smollm2_path), **settings) as llm,
        LLM(str(smollm2_path), **settings, max_num_batched_tokens=17) as chunked,
    ):
        text = "The keeper writes the names of ships into the book. " * 12
        cold = llm.generate(text, params)[0]
        warm = llm.generate(text, params)[0]
        assert warm.usage.cached_tokens > 0
        assert bits(warm.outputs[0]) == bits(cold.outputs[0])
        assert bits(chunked.generate(text, params)[0].outputs[0]) == bits(cold.outputs[0])
