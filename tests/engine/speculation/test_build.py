"""From settings to what proposes: what fits, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import VOCAB, tiny_gguf, weights

from kvstrata import LLM, SamplingParams
from kvstrata.engine.speculation.draft_model import ModelDrafter
from kvstrata.engine.speculation.layers import LayersDrafter
from kvstrata.engine.speculation.ngram import NgramDrafter
from kvstrata.errors import ConfigError, ModelError

SMALL = {"weights": "fp32", "kv_memory": "1MiB", "max_num_batched_tokens": 32}
NAMES = ["a", "b", "ab", *(f"token{i}" for i in range(VOCAB - 3))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def model_file(path: Path, names: list[str] = NAMES) -> Path:
    """A model with so many tokens of these names."""
    tensors = weights()
    tensors["embed.weight"] = tensors["embed.weight"][: len(names)]
    return tiny_gguf(
        path,
        tensors=tensors,
        tokenizer__ggml__model="gpt2",
        tokenizer__ggml__tokens=names,
        tokenizer__ggml__token_type=[1] * len(names),
        tokenizer__ggml__merges=["a b"],
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_file(tmp_path_factory.mktemp("models") / "target.gguf")


def ids(llm: LLM) -> list[int]:
    return llm.generate({"prompt_token_ids": [3, 4, 5, 3, 4, 5, 3, 4]}, GREEDY)[0].outputs[0].token_ids


def test_each_way_answers_as_none_does(target: Path) -> None:
    plain = LLM(str(target), **SMALL)
    assert plain.engine.speculator is None
    expected = ids(plain)
    for settings, kind in (
        ({"draft": "ngram"}, NgramDrafter),
        ({"draft": "layers:1"}, LayersDrafter),
        ({"draft_model": str(target)}, ModelDrafter),
    ):
        for adaptive in (True, False):
            llm = LLM(str(target), **SMALL, **settings, draft_tokens=3, draft_adaptive=adaptive)
            assert llm.engine.speculator is not None
            assert isinstance(llm.engine.speculator.drafter, kind)
            assert ids(llm) == expected
            llm.engine.cache.check_integrity()
        assert llm.engine.telemetry.speculation.draft_tokens > 0


def test_two_models_share_the_pools_memory(target: Path) -> None:
    alone, both = LLM(str(target), **SMALL), LLM(str(target), **SMALL, draft_model=str(target))
    assert both.engine.speculator is not None
    drafter = both.engine.speculator.drafter
    assert isinstance(drafter, ModelDrafter)
    assert both.engine.cache.pools[0].num_blocks == drafter.cache.pools[0].num_blocks
    assert both.loaded.pool_bytes <= alone.loaded.pool_bytes <= 1 << 20
    assert both.loaded.weights_bytes > alone.loaded.weights_bytes


def test_calibration_leaves_an_empty_pool(target: Path) -> None:
    llm = LLM(str(target), **SMALL, draft_model=str(target))
    assert llm.engine.speculator is not None
    drafter = llm.engine.speculator.drafter
    assert isinstance(drafter, ModelDrafter)
    for cache in (llm.engine.cache, drafter.cache):
        stats = cache.stats().groups[0]
        assert (stats.free, stats.held, stats.cached) == (stats.total, 0, 0)


def test_a_draft_of_another_vocabulary_is_refused_with_both_sizes(target: Path, tmp_path: Path) -> None:
    path = model_file(tmp_path / "smaller.gguf", NAMES[:-3])
    with pytest.raises(ConfigError, match=rf"draft_model is .*has {VOCAB - 3} tokens, the model's {VOCAB}"):
        LLM(str(target), **SMALL, draft_model=str(path))


def test_a_draft_of_as_many_but_other_tokens_is_refused(target: Path, tmp_path: Path) -> None:
    names = NAMES.copy()
    names[7], names[8] = names[8], names[7]
    path = model_file(tmp_path / "other.gguf", names)
    with pytest.raises(ConfigError, match=f"the model's {VOCAB}, but token 7 is not the same"):
        LLM(str(target), **SMALL, draft_model=str(path))


def test_more_layers_than_the_model_has_are_refused(target: Path) -> None:
    with pytest.raises(ConfigError, match="draft is 'layers:3'; the model has 2 layers"):
        LLM(str(target), **SMALL, draft="layers:3")


def test_a_draft_that_is_not_there_is_refused(target: Path) -> None:
    with pytest.raises(ModelError, match="no-such"):
        LLM(str(target), **SMALL, draft_model="no-such.gguf")
