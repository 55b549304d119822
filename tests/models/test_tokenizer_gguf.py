from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vocabularies import byte_level_metadata, sentencepiece_metadata

from kvstrata.errors import ModelError
from kvstrata.models.tokenizer_gguf import tokenizer_from_gguf


def test_arrays_may_be_numpy() -> None:
    plain = sentencepiece_metadata()
    arrays = {
        key: np.asarray(value) if key.endswith(("scores", "token_type")) else value
        for key, value in plain.items()
    }
    assert tokenizer_from_gguf(arrays).encode("abc the") == tokenizer_from_gguf(plain).encode("abc the")


def test_end_tokens_are_those_named_and_those_known_by_name() -> None:
    assert tokenizer_from_gguf(byte_level_metadata()).eos_token_ids == (2, 0)
    assert tokenizer_from_gguf(byte_level_metadata(eos_token_id=0, eot_token_id=2)).eos_token_ids == (0, 2)


def test_chat_template_is_taken_from_the_file() -> None:
    with_template = {**byte_level_metadata(), "tokenizer.chat_template": "{{ messages }}"}
    assert tokenizer_from_gguf(with_template).chat_template == "{{ messages }}"
    assert tokenizer_from_gguf(byte_level_metadata()).chat_template is None


def test_llama3_adds_bos_where_the_file_does_not_say() -> None:
    assert tokenizer_from_gguf(byte_level_metadata(pre="llama-bpe", add_bos_token=None)).encode("a")[0] == 1
    assert tokenizer_from_gguf(byte_level_metadata(add_bos_token=None)).encode("a")[0] != 1


def test_whole_words_become_their_token_only_under_rules_that_say_so() -> None:
    # "hin" is a token that no merge reaches.
    metadata = byte_level_metadata()
    tokens = [*metadata["tokenizer.ggml.tokens"][:-1], "hin"]
    types = [*metadata["tokenizer.ggml.token_type"][:-1], 1]
    changes = {"tokens": tokens, "token_type": types}
    whole = tokenizer_from_gguf(byte_level_metadata(pre="llama-bpe", **changes))
    merged = tokenizer_from_gguf(byte_level_metadata(pre="smaug-bpe", **changes))
    assert whole.encode("hin", add_special_tokens=False) == [len(tokens) - 1]
    assert len(merged.encode("hin")) == 2


def test_qwen2_composes_accents_first() -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata(pre="qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, r"model: 't5' is not supported; supported are 'gpt2'"),
        ({"model": None}, r"model: None is not supported"),
        ({"pre": "klingon"}, r"pre: 'klingon' is not supported; supported are .*llama-bpe.*smollm"),
        ({"tokens": []}, r"tokens: empty or missing"),
        ({"tokens": ["a", 1]}, r"tokens: must be a list of strings"),
        ({"token_type": [1, 2]}, r"token_type: has 2 entries for \d+ tokens"),
        ({"merges": ["ab"]}, r"merges: entry 0 is 'ab', not two tokens"),
        ({"merges": ["q q"]}, r"merges: .*damaged"),
        ({"eos_token_id": 10**6}, r"eos_token_id: 1000000 is not in the vocabulary"),
        ({"bos_token_id": -1}, r"bos_token_id: -1 is not"),
    ],
)
def test_damaged_byte_level_metadata_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf(byte_level_metadata(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, r"scores: missing"),
        ({"scores": [0.0]}, r"scores: has 1 entries"),
        ({"tokens": ["x"] * 300, "token_type": [6] * 300, "scores": [0.0] * 300}, r"byte token 0 is 'x'"),
        (
            {"tokens": ["<0x00>", "a", "b"], "token_type": [6, 1, 1], "scores": [0.0] * 3},
            r"1 byte tokens, not 256",
        ),
        (
            {"tokens": ["a", "b", "c"], "token_type": [1] * 3, "scores": [0.0] * 3, "unknown_token_id": None},
            r"unknown_token_id: missing",
        ),
    ],
)
def test_damaged_sentencepiece_metadata_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf(sentencepiece_metadata(**changes))
