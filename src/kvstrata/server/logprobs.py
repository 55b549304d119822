"""Log-probabilities in the two shapes of the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstrata.engine.outputs import Logprob
from kvstrata.models.tokenizer import Tokenizer
from kvstrata.server.shapes import ChatLogprobs, CompletionLogprobs, TokenLogprob

Ranked = Mapping[int, Logprob]


def shown_tokens(
    token_ids: Sequence[int], finish_reason: str | None, stop_reason: str | int | None, *, include_stop: bool
) -> Sequence[int]:
    """The tokens that are part of the text: the mark that ended an answer is not."""
    marked = finish_reason == "stop" and not isinstance(stop_reason, str)
    return token_ids[:-1] if marked and not (include_stop and stop_reason is not None) else token_ids


def chat_logprobs(
    tokens: Sequence[int], ranked: Sequence[Ranked], top: int, tokenizer: Tokenizer
) -> ChatLogprobs:
    """top: how many of the likeliest tokens to list at each place."""
    return {
        "content": [
            {
                **_token(token, known[token], tokenizer),
                "top_logprobs": [_token(t, p, tokenizer) for t, p in _likeliest(known, top)],
            }
            for token, known in zip(tokens, ranked, strict=False)
        ],
        "refusal": None,
    }


def completion_logprobs(
    tokens: Sequence[int],
    ranked: Sequence[Ranked | None],
    top: int,
    tokenizer: Tokenizer,
    offset: int,
) -> CompletionLogprobs:
    """top: how many of the likeliest tokens to list. offset: characters of text before the first token."""
    texts, offsets = [], []
    for token, known in zip(tokens, ranked, strict=False):
        text = known[token].decoded_token if known is not None else tokenizer.decode([token], False)
        texts.append(_unique(token, text, tokenizer))
        offsets.append(offset)
        offset += len(text)
    listed = [
        None
        if known is None
        else {_unique(t, p.decoded_token, tokenizer): p.logprob for t, p in _likeliest(known, top)}
        for _, known in zip(tokens, ranked, strict=False)
    ]
    return {
        "tokens": texts,
        "token_logprobs": [
            None if known is None else known[token].logprob
            for token, known in zip(tokens, ranked, strict=False)
        ],
        "top_logprobs": listed if top else None,
        "text_offset": offsets,
    }


def _likeliest(known: Ranked, top: int) -> list[tuple[int, Logprob]]:
    return sorted(((t, p) for t, p in known.items() if p.rank <= top), key=lambda pair: pair[1].rank)[:top]


def _token(token: int, known: Logprob, tokenizer: Tokenizer) -> TokenLogprob:
    return {
        "token": known.decoded_token,
        "logprob": known.logprob,
        "bytes": list(tokenizer.token_bytes(token)),
    }


def _unique(token: int, text: str, tokenizer: Tokenizer) -> str:
    """The token's text; its bytes where it is a part of a character, so that parts stay apart."""
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token))
