"""Encoding by the `tokenizers` library, with special tokens parsed only on request."""

from __future__ import annotations

import tokenizers

_LONG = 4096  # characters, a millisecond or so


class HFEncoder:
    """Two views of one model: one that finds special tokens in a text, one to which they are text.

    The library's switch between the two is state of the tokenizer, so that threads could not share one view.
    """

    def __init__(self, parsing: tokenizers.Tokenizer) -> None:
        self._parsing = parsing
        self._plain = _view(parsing)
        self._plain.encode_special_tokens = True

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Token ids of a text; special tokens spelt out in it count as text unless `parse_special`."""
        view = self._parsing if parse_special else self._plain
        if len(text) < _LONG:
            ids: list[int] = view.encode(text, add_special_tokens=False).ids
        else:  # only this way lets other threads of Python run meanwhile
            [encoding] = view.encode_batch_fast([text], add_special_tokens=False)
            ids = encoding.ids
        return ids


def _view(source: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer over the same model and parts, with added tokens of its own."""
    view = tokenizers.Tokenizer(source.model)
    if source.normalizer is not None:
        view.normalizer = source.normalizer
    if source.pre_tokenizer is not None:
        view.pre_tokenizer = source.pre_tokenizer
    for _, token in sorted(source.get_added_tokens_decoder().items()):
        if token.special:
            view.add_special_tokens([token])
        else:
            view.add_tokens([token])
    return view
