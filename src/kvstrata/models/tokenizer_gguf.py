"""A tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, models, normalizers

from kvstrata.errors import ModelError
from kvstrata.models.hf_encoder import HFEncoder
from kvstrata.models.pretokenizers import PreTokenizerRule, pre_tokenizer_rule
from kvstrata.models.sentencepiece_bpe import SentencePieceBPE
from kvstrata.models.tokenizer import SPACE_MARK, Encoder, Tokenizer, Vocabulary

_KEY = "tokenizer.ggml."

# Tokens that end an answer whatever the file's eos_token_id says: chat models end turns with another token
# than documents, and files name only one of them.
_END_NAMES = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>", "<|eom_id|>"}
)


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class _Metadata:
    """The tokenizer's part of a GGUF file's metadata, checked field by field."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = self._strings("tokens")
        if not self.tokens:
            raise ModelError(f"{_KEY}tokens: empty or missing; the file has no vocabulary")
        types = self.numbers("token_type")
        self.types: Sequence[int] = types or [TokenType.NORMAL] * len(self.tokens)

    def _strings(self, name: str) -> list[str]:
        value = self._metadata.get(_KEY + name, [])
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise ModelError(f"{_KEY}{name}: must be a list of strings; the file is damaged")
        return list(value)

    def numbers(self, name: str) -> list[Any]:
        """One number a token, or nothing."""
        value = self._metadata.get(_KEY + name)
        if value is None:
            return []
        numbers: list[Any] = np.asarray(value).tolist()
        if len(numbers) != len(self.tokens):
            raise ModelError(
                f"{_KEY}{name}: has {len(numbers)} entries for {len(self.tokens)} tokens; the file is damaged"
            )
        return numbers

    def merges(self) -> list[tuple[str, str]]:
        pairs = []
        for index, merge in enumerate(self._strings("merges")):
            left, _, right = merge.partition(" ")
            if not left or not right:
                raise ModelError(
                    f"{_KEY}merges: entry {index} is {merge!r}, not two tokens; the file is damaged"
                )
            pairs.append((left, right))
        return pairs

    def id(self, name: str) -> int | None:
        value = self._metadata.get(f"{_KEY}{name}_token_id")
        if value is None:
            return None
        if not 0 <= int(value) < len(self.tokens):
            raise ModelError(
                f"{_KEY}{name}_token_id: {value} is not in the vocabulary of {len(self.tokens)} tokens"
            )
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._metadata.get(_KEY + name, default))

    def of_type(self, *kinds: TokenType) -> dict[str, int]:
        """Tokens of these types, text to id; the first of equals."""
        wanted = {int(kind) for kind in kinds}
        found: dict[str, int] = {}
        for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind in wanted and token:
                found.setdefault(token, token_id)
        return found


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describe.

    metadata: keys as in the file (`tokenizer.ggml.*`, `tokenizer.chat_template`), values as plain Python.
    Raises ModelError naming the field that is missing, damaged or of a kind that is not supported.
    """
    kind = metadata.get(_KEY + "model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"{_KEY}model: {kind!r} is not supported; supported are 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece)"
        )
    fields = _Metadata(metadata)
    specials = fields.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    if kind == "gpt2":
        rule = pre_tokenizer_rule(str(metadata.get(_KEY + "pre", "default")))
        literals = fields.of_type(TokenType.USER_DEFINED)
        encoder: Encoder = _byte_level(fields, rule, specials, literals)
        byte_of: dict[int, int] = {}
        add_bos, space_prefix = rule.add_bos, False
    else:
        literals = {
            token.replace(SPACE_MARK, " "): token_id
            for token, token_id in fields.of_type(TokenType.USER_DEFINED).items()
        }
        byte_of = _byte_tokens(fields)
        add_bos, space_prefix = True, fields.flag("add_space_prefix", True)
        encoder = _sentencepiece(fields, specials, literals, byte_of, space_prefix)
    bos, eos = fields.id("bos"), fields.id("eos")
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        encoder=encoder,
        vocabulary=Vocabulary(
            tokens=fields.tokens,
            byte_level=kind == "gpt2",
            literal={token_id: token for token, token_id in {**literals, **specials}.items()},
            byte_of=byte_of,
            special_ids=frozenset(specials.values()),
        ),
        bos_token_id=bos,
        eos_token_ids=_end_tokens(fields, specials),
        prefix_ids=(bos,) if bos is not None and fields.flag("add_bos_token", add_bos) else (),
        suffix_ids=(eos,) if eos is not None and fields.flag("add_eos_token", False) else (),
        space_prefix=space_prefix,
        chat_template=template if isinstance(template, str) else None,
    )


def _end_tokens(fields: _Metadata, specials: Mapping[str, int]) -> tuple[int, ...]:
    named = (fields.id("eos"), fields.id("eot"), fields.id("eom"))
    known = (specials.get(name) for name in sorted(_END_NAMES))
    return tuple(dict.fromkeys(token_id for token_id in (*named, *known) if token_id is not None))


def _byte_level(
    fields: _Metadata, rule: PreTokenizerRule, specials: Iterable[str], literals: Iterable[str]
) -> HFEncoder:
    ids = {token: token_id for token_id, token in enumerate(fields.tokens)}
    try:
        model = models.BPE(ids, fields.merges(), ignore_merges=rule.whole_words)
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{_KEY}merges: {error}; the file is damaged") from error
    backend = tokenizers.Tokenizer(model)
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rule.build()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials])
    backend.add_tokens([AddedToken(token, normalized=False) for token in literals])
    return HFEncoder(backend)


def _byte_tokens(fields: _Metadata) -> dict[int, int]:
    """Ids of the byte tokens, `<0x00>` to `<0xFF>`, and the bytes they stand for."""
    found = {}
    for token, token_id in fields.of_type(TokenType.BYTE).items():
        try:
            (found[token_id],) = bytes.fromhex(token.removeprefix("<0x").removesuffix(">"))
        except ValueError:
            raise ModelError(
                f"{_KEY}tokens: byte token {token_id} is {token!r}, not like '<0x1F>'; the file is damaged"
            ) from None
    if found and sorted(found.values()) != list(range(256)):
        raise ModelError(
            f"{_KEY}tokens: {len(set(found.values()))} byte tokens, not 256; the file is damaged"
        )
    return found


def _sentencepiece(
    fields: _Metadata,
    specials: Mapping[str, int],
    literals: Mapping[str, int],
    byte_of: Mapping[int, int],
    space_prefix: bool,
) -> SentencePieceBPE:
    scores = fields.numbers("scores")
    if not scores:
        raise ModelError(f"{_KEY}scores: missing; a SentencePiece vocabulary needs one score a token")
    ids = fields.of_type(TokenType.NORMAL)
    unknown_id = fields.id("unknown")
    if not byte_of and unknown_id is None:
        raise ModelError(
            f"{_KEY}unknown_token_id: missing, and there are no byte tokens for unknown characters"
        )
    return SentencePieceBPE(
        ids,
        {token: scores[token_id] for token, token_id in ids.items()},
        byte_ids=tuple(sorted(byte_of, key=byte_of.__getitem__)),
        unknown_id=-1 if unknown_id is None else unknown_id,
        literals=literals,
        specials=specials,
        space_prefix=space_prefix,
    )
