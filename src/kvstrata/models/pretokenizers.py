"""How byte-level BPE vocabularies cut a text into words, by the name that GGUF files give it.

The expressions are those of the models' own `tokenizer.json`; merges never cross a cut. A name that is not in
the table is refused: a wrong cut gives plausible text with wrong ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

from kvstrata.errors import ModelError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_TEKKEN = _CASED.replace("%s", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_GPT4O = _CASED.replace("%s", _CONTRACTIONS + "?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)


@dataclass(frozen=True)
class PreTokenizerRule:
    """patterns: applied in turn, each within the cuts of the one before; every match is a word of its own.

    whole_words: a word that is in the vocabulary becomes that token without merging. nfc: text is composed
    (Unicode NFC) first. add_bos: whether BOS comes first where the file does not say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    nfc: bool = False
    add_bos: bool = False

    def build(self) -> PreTokenizer:
        """The rule as a pre-tokenizer of the `tokenizers` library, bytes mapped to their alphabet."""
        splits = [Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2_RULE = PreTokenizerRule((_GPT2,))
_SINGLE_DIGITS = PreTokenizerRule((r"\p{N}", _GPT2))
_LLAMA3_RULE = PreTokenizerRule((_LLAMA3,), whole_words=True, add_bos=True)
_QWEN2_RULE = PreTokenizerRule((_QWEN2,), nfc=True)

_RULES: dict[str, PreTokenizerRule] = {
    "default": PreTokenizerRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_RULE,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "minerva-7b": _SINGLE_DIGITS,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "smaug-bpe": PreTokenizerRule((_LLAMA3,)),
    "qwen2": _QWEN2_RULE,
    "deepseek-r1-qwen": _QWEN2_RULE,
    "tekken": PreTokenizerRule((_TEKKEN,), whole_words=True, add_bos=True),
    "gpt-4o": PreTokenizerRule((_GPT4O,)),
    "deepseek-coder": PreTokenizerRule(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
    ),
    "deepseek-v3": PreTokenizerRule(
        (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3_WORDS)
    ),
}


def supported_rules() -> list[str]:
    """The `tokenizer.ggml.pre` names that are known, sorted."""
    return sorted(_RULES)


def pre_tokenizer_rule(name: str) -> PreTokenizerRule:
    """The rule of a `tokenizer.ggml.pre` name. Raises ModelError for one that is not known."""
    try:
        return _RULES[name]
    except KeyError:
        raise ModelError(
            f"tokenizer.ggml.pre: {name!r} is not supported; supported are {', '.join(supported_rules())}"
        ) from None
