"""Text to token ids and back, whatever file the vocabulary came from.

`tokenizer_gguf` and `tokenizer_folder` build a `Tokenizer`; `streaming` decodes it token by token.

Decoding joins the bytes of the tokens and reads them as UTF-8, so that decoding at once and in pieces agree
by construction. One rule goes beyond joining: a SentencePiece vocabulary with a space prefix encodes "a" as
"▁a" at the start of a text and after a special token. Decoding takes one such space off again where ids show
a special token (BOS) before it. Ids that start without one continue another text, and are kept whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from kvstrata.errors import RequestError

SPACE_MARK = "\u2581"  # how SentencePiece writes a space inside a token


class Encoder(Protocol):
    """What splits a text into tokens, without the tokens that a model wants around it."""

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Token ids of a valid text; special tokens spelt out in it count as text unless `parse_special`."""


def _byte_alphabet() -> dict[int, str]:
    """How byte-level BPE writes each byte as one printable character (GPT-2, `bytes_to_unicode`)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


_BYTE_OF_CHAR = {ord(char): byte for byte, char in _byte_alphabet().items()}


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model by id.

    tokens: as the file spells them (byte-level alphabet, or SPACE_MARK for a space), "" where an id has none.
    literal: tokens that stand for their own text. byte_of: ids of SentencePiece's byte tokens. special_ids:
    tokens that are no text, such as BOS or the end of a turn.
    """

    tokens: Sequence[str]
    byte_level: bool
    literal: Mapping[int, str] = field(default_factory=dict)
    byte_of: Mapping[int, int] = field(default_factory=dict)
    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; none for an id past the vocabulary (models pad their heads)."""
        if token_id in self.literal:
            return self.literal[token_id].encode()
        if token_id in self.byte_of:
            return bytes((self.byte_of[token_id],))
        if not 0 <= token_id < len(self.tokens):
            return b""
        token = self.tokens[token_id]
        if not self.byte_level:
            return token.replace(SPACE_MARK, " ").encode()
        try:
            return bytes(_BYTE_OF_CHAR[ord(char)] for char in token)
        except KeyError:  # a filler outside the alphabet, which no merge produces
            return token.encode()


@dataclass(frozen=True)
class Tokenizer:
    """A model's vocabulary with the tokens it wants around a text.

    prefix_ids, suffix_ids: what encoding adds in front (BOS) and behind. eos_token_ids: what ends an answer.
    space_prefix: the encoder puts a space in front of a text (see the module's rule). chat_template: the
    model's own jinja template, None where its file has none.
    """

    encoder: Encoder
    vocabulary: Vocabulary
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    space_prefix: bool = False
    chat_template: str | None = None

    @property
    def vocab_size(self) -> int:
        """Number of token ids; a model's output layer may be padded beyond it."""
        return len(self.vocabulary.tokens)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that are no text, which decoding skips unless told otherwise."""
        return self.vocabulary.special_ids

    @cached_property
    def bos_token(self) -> str:
        """The text of the BOS token, "" where the model has none."""
        return (
            "" if self.bos_token_id is None else self.token_bytes(self.bos_token_id).decode(errors="replace")
        )

    @cached_property
    def eos_token(self) -> str:
        """The text of the first end token, "" where the model has none."""
        return self.token_bytes(self.eos_token_ids[0]).decode(errors="replace") if self.eos_token_ids else ""

    def encode(self, text: str, add_special_tokens: bool = True, *, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        add_special_tokens: put `prefix_ids` and `suffix_ids` around it, but no second BOS in front of one
        that the text spells out. parse_special: special tokens spelt out in the text become those tokens, as
        the output of a chat template needs; otherwise they are text like any other.
        Raises RequestError naming the position of a surrogate, which no UTF-8 text can hold.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"text: character {error.start} is U+{ord(text[error.start]):04X}, half a surrogate pair; "
                "send valid Unicode"
            ) from None
        ids = self.encoder.encode(text, parse_special)
        if not add_special_tokens:
            return ids
        prefix = self.prefix_ids
        if parse_special and prefix and ids[: len(prefix)] == list(prefix):
            prefix = ()
        return [*prefix, *ids, *self.suffix_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token: part of a character, or several; b"" past the vocabulary."""
        return self.vocabulary.token_bytes(token_id)

    def to_bytes(
        self, ids: Iterable[int], skip_special_tokens: bool, *, after_special: bool = False
    ) -> tuple[bytes, bool]:
        """The joined bytes of tokens, and whether the last one was special: the next `after_special`."""
        pieces = []
        for token_id in ids:
            special = token_id in self.special_ids
            if not (special and skip_special_tokens):
                piece = self.token_bytes(token_id)
                if self.space_prefix and after_special and not special:
                    piece = piece.removeprefix(b" ")
                pieces.append(piece)
            after_special = special
        return b"".join(pieces), after_special

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD."""
        return self.to_bytes(ids, skip_special_tokens)[0].decode(errors="replace")
