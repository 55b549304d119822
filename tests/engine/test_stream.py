"""A text fed piece by piece: the figures of a request's prompt, whatever the pieces."""

from __future__ import annotations

import pytest
import torch
from toy import Toy, make_toy

from kvstrata import SamplingParams
from kvstrata.engine.stream import TextStream
from kvstrata.errors import RequestError

TEXT = [1 + (i * i) % 90 for i in range(70)]


class Standing:
    """What a stream needs of an `LLM`."""

    def __init__(self, toy: Toy) -> None:
        self.engine = toy.engine
        self.tokenizer = toy.engine._tokenizer


def expected(retention: str) -> torch.Tensor:
    toy = make_toy(prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, retention=retention)
    toy.engine.add_request("x", TEXT, params)
    told = toy.run()["x"].prompt_logprobs
    assert told is not None
    return -torch.tensor([ranked[t].logprob for t, ranked in zip(TEXT[1:], told[1:], strict=True)])


@pytest.mark.parametrize("retention", ["full", "window:10", "sinks:3+8"])
@pytest.mark.parametrize("piece", [1, 7, 100])
def test_losses_are_those_of_a_prompt(retention: str, piece: int) -> None:
    toy = make_toy(blocks=32)
    with TextStream(Standing(toy), TEXT, retention) as stream:  # type: ignore[arg-type]
        parts = []
        while stream.position < len(TEXT):
            parts.append(stream.feed(piece))
            toy.cache.check_integrity()
        assert len(stream.feed(5)) == 0
    losses = torch.cat(parts)
    assert losses[0].isnan()
    torch.testing.assert_close(losses[1:], expected(retention))
    toy.assert_idle()
    assert toy.cache.stats().groups[0].cached == 0, "nothing of a stream is found by others"


def test_what_was_skipped_still_counts_for_what_comes() -> None:
    toy = make_toy(blocks=32)
    with TextStream(Standing(toy), TEXT, "window:10") as stream:  # type: ignore[arg-type]
        stream.skip(40)
        torch.testing.assert_close(stream.feed(30), expected("window:10")[39:])


def test_a_text_that_does_not_fit_is_refused() -> None:
    toy = make_toy(blocks=8)
    with pytest.raises(RequestError, match="KV pool holds 32"):
        TextStream(Standing(toy), TEXT)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="retention is 'window:0'"):
        TextStream(Standing(toy), TEXT, "window:0")  # type: ignore[arg-type]
