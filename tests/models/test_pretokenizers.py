from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import ModelError
from kvstrata.models.pretokenizers import pre_tokenizer_rule, supported_rules

TEXT = "It's 12345 HTTPServer DON'T  x\n\n  y日本語 é… <=> v2.0"


def words(name: str, text: str) -> list[str]:
    return [text[start:end] for _, (start, end) in pre_tokenizer_rule(name).build().pre_tokenize_str(text)]


# Cut by hand after the expressions of the models' tokenizer.json.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", "It|'s| 12345| HTTPServer| DON|'|T| | x|\n\n | y日本語| é|…| <=>| v|2|.|0"),
        ("smollm", "It|'s| |1|2|3|4|5| HTTPServer| DON|'|T| | x|\n\n | y日本語| é|…| <=>| v|2|.|0"),
        ("llama-bpe", "It|'s| |123|45| HTTPServer| DON|'T| | x|\n\n| | y日本語| é|…| <=>| v|2|.|0"),
        ("qwen2", "It|'s| |1|2|3|4|5| HTTPServer| DON|'T| | x|\n\n| | y日本語| é|…| <=>| v|2|.|0"),
        ("tekken", "It|'s| |1|2|3|4|5| HTTPServer| DON|'T| | x|\n\n| | y日本語| é|…| <=>| v|2|.|0"),
        ("gpt-4o", "It's| |123|45| HTTPServer| DON'T| | x|\n\n| | y日本語| é|…| <=>| v|2|.|0"),
        ("default", "It|'|s| |123|45| HTTPServer| DON|'|T| | x|\n\n | y日本語| é|…| |<=>| v|2|.|0"),
    ],
)
def test_words_are_cut_as_the_model_was_trained(name: str, expected: str) -> None:
    assert words(name, TEXT) == expected.split("|")


def test_tekken_cuts_where_lower_case_turns_to_upper() -> None:
    assert words("tekken", "camelCaseWords") == ["camel", "Case", "Words"]


@pytest.mark.parametrize("name", supported_rules())
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=50))
def test_words_join_to_the_text(name: str, text: str) -> None:
    assert "".join(words(name, text)) == text


def test_an_unknown_rule_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"'nope' is not supported; supported are .*smollm"):
        pre_tokenizer_rule("nope")
