"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, a counter-based draw, logprobs.

Every row is treated alone, in the same order, so that a request's draws do not depend on its neighbours; the
random number of output i is a function of (seed, answer index, i) and of nothing else.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvstrata import kernels  # noqa: F401  (defines the operators)
from kvstrata.config import SamplingParams

_argmax: Final = torch.ops.kvstrata.argmax.default
_logsumexp: Final = torch.ops.kvstrata.logsumexp.default
_top_k: Final = torch.ops.kvstrata.top_k.default

# Tokens to look at first for top-p and min-p: a sort of the whole vocabulary is rarely needed.
_HEAD = 1024


@dataclass(frozen=True)
class SampleInput:
    """What a row's draw depends on besides its logits."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    seed: int
    answer_index: int
    stop_ids: frozenset[int]


def uniform(seed: int, answer_index: int, output_index: int) -> float:
    """The random number in [0, 1) for one output token: 53 bits of a keyed hash of its coordinates."""
    message = b"".join(v.to_bytes(8, "little") for v in (seed, answer_index, output_index))
    return (int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 11) / 2**53


def adjust(logits: Tensor, item: SampleInput) -> Tensor:
    """Logits after penalties and the ban on stop tokens before min_tokens; float32 `[vocab_size]`, a copy.

    Repetition penalty as in CTRL (arXiv 1909.05858); presence and frequency as in the OpenAI API.
    """
    params, logits = item.params, logits.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*item.prompt_ids, *item.output_ids}), device=logits.device)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (params.presence_penalty or params.frequency_penalty) and item.output_ids:
        counts = Counter(item.output_ids)
        ids = torch.tensor(list(counts), device=logits.device)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * times
    banned = [token for token in item.stop_ids if token < len(logits)]  # a vocabulary may exceed the head
    if len(item.output_ids) < params.min_tokens and banned:
        logits[torch.tensor(banned, device=logits.device)] = -torch.inf
    return logits


def candidates(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """Weights (float64, not normalised) of the tokens that may be drawn, and their ids (None: all, in order).

    temperature, then top_k, then top_p over what is left, then min_p. Ties are broken by the lower id.
    """
    # From the largest down: divided by a tiny temperature, the others become -inf, never it inf.
    scaled = (logits.double() - logits.max()) / params.temperature
    weights = torch.softmax(scaled, dim=-1)
    vocab = weights.shape[-1]
    top_k = params.top_k if 0 < params.top_k < vocab else vocab
    if top_k == vocab and params.top_p == 1.0 and params.min_p == 0.0:
        return weights, None
    head = top_k if top_k < vocab else min(_HEAD, vocab)
    while True:
        values, ids = _largest(weights, head)
        # Cumulative sums go in order; a plain sum may be divided among threads and depend on them.
        whole = torch.cumsum(values if top_k < vocab else weights, 0)[-1]
        keep = _kept(values, params, float(whole))
        if keep < head or head >= top_k:
            return values[:keep], ids[:keep]
        head = min(head * 8, vocab)


def _largest(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest weights, largest first, equal ones by id; and their ids."""
    if count < weights.shape[-1]:
        smallest = torch.topk(weights, count).values[-1]
        ids = torch.nonzero(weights >= smallest).squeeze(-1)
    else:
        ids = torch.arange(weights.shape[-1], device=weights.device)
    values, order = torch.sort(weights[ids], descending=True, stable=True)
    return values[:count], ids[order][:count]


def _kept(values: Tensor, params: SamplingParams, whole: float) -> int:
    """How many of the sorted weights top_p and min_p keep: at least one."""
    keep = len(values)
    if params.top_p < 1.0:
        reached = torch.cumsum(values, 0) >= params.top_p * whole
        keep = int(torch.argmax(reached.to(torch.uint8))) + 1 if bool(reached.any()) else keep
    if params.min_p > 0.0:
        keep = min(keep, int((values >= params.min_p * values[0]).sum()))
    return max(keep, 1)


def draw(logits: Tensor, item: SampleInput) -> int:
    """One token from adjusted logits, by inversion of the cumulative distribution."""
    if item.params.greedy:
        return int(_argmax(logits.unsqueeze(0)))
    weights, ids = candidates(logits, item.params)
    cumulative = torch.cumsum(weights, 0)
    point = uniform(item.seed, item.answer_index, len(item.output_ids)) * float(cumulative[-1])
    place = int(torch.searchsorted(cumulative, point, right=True))
    # The point can round up to the total; and a weight of zero is never drawn.
    place = min(place, int(torch.nonzero(weights)[-1]))
    return place if ids is None else int(ids[place])


def sample(logits: Tensor, items: Sequence[SampleInput]) -> list[int]:
    """One token for each row of float32 `[num_rows, vocab_size]`."""
    plain = [i for i, item in enumerate(items) if item.params.greedy and not is_adjusted(item)]
    tokens = [-1] * len(items)
    if plain:
        rows = logits if len(plain) == len(items) else logits[plain]
        for i, token in zip(plain, _argmax(rows).tolist(), strict=True):
            tokens[i] = token
    for i, item in enumerate(items):
        if tokens[i] < 0:
            row = adjust(logits[i], item) if is_adjusted(item) else logits[i]
            tokens[i] = draw(row, item)
    return tokens


def is_adjusted(item: SampleInput) -> bool:
    """Whether `adjust` changes the logits of a draw."""
    params = item.params
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or len(item.output_ids) < params.min_tokens
    )


@dataclass(frozen=True)
class RankedToken:
    """A token with its log-probability (nats) and its rank (1 is likeliest)."""

    token: int
    logprob: float
    rank: int


def rank_tokens(logits: Tensor, tokens: Sequence[int], top: int) -> list[list[RankedToken]]:
    """For each row of `[num_rows, vocab_size]`: its `top` likeliest tokens, and `tokens[row]` in any case.

    Log-probabilities are of the model's own distribution: before temperature and penalties.
    """
    norms = _logsumexp(logits).unsqueeze(-1)
    own = logits.gather(-1, torch.tensor(tokens, device=logits.device).unsqueeze(-1))
    ranks = ((logits > own).sum(-1) + 1).tolist()
    values, ids = _top_k(logits, min(top, logits.shape[-1]))
    listed_ids, listed_logprobs = ids.tolist(), (values - norms).tolist()
    own_logprobs = (own - norms).squeeze(-1).tolist()
    result = []
    for row, token in enumerate(tokens):
        listed = [
            RankedToken(i, p, rank)
            for rank, (i, p) in enumerate(zip(listed_ids[row], listed_logprobs[row], strict=True), start=1)
        ]
        if all(r.token != token for r in listed):
            listed.append(RankedToken(token, own_logprobs[row], ranks[row]))
        result.append(listed)
    return result
