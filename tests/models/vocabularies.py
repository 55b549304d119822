"""Small vocabularies in the form of GGUF metadata."""

from __future__ import annotations

from typing import Any

from kvstrata.models.tokenizer_gguf import TokenType

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "1 2", "12 3", "Ã ©", "Ċ Ċ"]


def byte_alphabet() -> list[str]:
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    spelt = {byte: chr(byte) for byte in kept} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [spelt[byte] for byte in range(256)]


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    tokens = [*SPECIALS, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES), "<user>"]
    types = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokens) - 4) + [TokenType.USER_DEFINED]
    fields: dict[str, Any] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [int(kind) for kind in types],
        "merges": MERGES,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
    }
    return named({**fields, **changes})


PIECES = [
    "▁",
    "a",
    "b",
    "c",
    "e",
    "h",
    "t",
    "é",
    "▁t",
    "he",
    "▁the",
    "th",
    "ab",
    "abc",
    "bc",
    "▁a",
    "c▁b",
    "▁▁",
]


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "\n\n", "<h1>"]
    kinds = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL)
    types = [
        *kinds,
        *[TokenType.BYTE] * 256,
        *[TokenType.NORMAL] * len(PIECES),
        *[TokenType.USER_DEFINED] * 2,
    ]
    fields: dict[str, Any] = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [int(kind) for kind in types],
        "scores": [0.0] * 259 + [-float(n) for n in range(len(PIECES))] + [0.0] * 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": True,
    }
    return named({**fields, **changes})


def named(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields under their GGUF keys; a field set to None is left out."""
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}
