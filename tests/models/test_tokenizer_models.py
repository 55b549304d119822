"""The tokenizers of the two test models against their reference implementations (tests/data/tokenizer)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstrata.models.chat import ChatTemplate
from kvstrata.models.gguf import GGUFFile
from kvstrata.models.tokenizer import Tokenizer
from kvstrata.models.tokenizer_gguf import tokenizer_from_gguf

FIXTURES = Path(__file__).parents[1] / "data" / "tokenizer"


def recorded(name: str) -> list[Any]:
    cases = json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))["cases"]
    return [pytest.param(case["text"], case["ids"], id=str(n)) for n, case in enumerate(cases)]


def load(path: Path) -> Tokenizer:
    file = GGUFFile.open(path)
    try:
        return tokenizer_from_gguf(file.metadata)
    finally:
        file.close()


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load(smollm2_path)


@pytest.fixture(scope="module")
def gemma(gemma_path: Path) -> Tokenizer:
    return load(gemma_path)


@pytest.mark.parametrize(("text", "ids"), recorded("smollm2"))
def test_smollm2_ids_are_those_of_transformers(smollm2: Tokenizer, text: str, ids: list[int]) -> None:
    assert smollm2.encode(text) == ids
    assert smollm2.decode(ids) == text


@pytest.mark.parametrize(("text", "ids"), recorded("gemma"))
def test_gemma_ids_are_those_of_sentencepiece(gemma: Tokenizer, text: str, ids: list[int]) -> None:
    assert gemma.encode(text) == [2, *ids]
    assert gemma.decode([2, *ids]) == text.replace("▁", " ")


def test_smollm2_conversation_has_its_special_tokens(smollm2: Tokenizer) -> None:
    template = ChatTemplate(smollm2.chat_template, smollm2.bos_token, smollm2.eos_token)
    text = template.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}])
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm2.encode(text, parse_special=True)
    assert [token_id for token_id in ids if token_id in smollm2.special_ids] == [1, 2, 1, 2, 1]
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    assert smollm2.eos_token_ids[0] == 2


def test_gemma_has_its_turn_tokens_and_no_second_bos(gemma: Tokenizer) -> None:
    text = "<bos><start_of_turn>user\nHello<end_of_turn>\n"
    ids = gemma.encode(text, parse_special=True)
    assert ids[:2] == [2, 105]
    assert ids[-2:] == [106, 107]
    assert set(gemma.eos_token_ids) == {1, 106}
    assert gemma.decode(ids, skip_special_tokens=False) == text
    assert gemma.chat_template is None
