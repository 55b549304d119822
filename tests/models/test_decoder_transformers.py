"""Both models, with float32 weights and cache, against what Transformers said of three texts.

`tests/fixtures/make_transformers_fixtures.py` recorded it. Gemma's texts cross its window of 512 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from paged import PagedRun
from torch import Tensor

from kvstrata.models.decoder import Decoder
from kvstrata.models.source import open_source

DATA = Path(__file__).resolve().parent.parent / "data"
TEXTS = ["cache_notes", "declaration", "second_inaugural"]
TOLERANCE = 1e-3
CHUNK = 128  # what the vocabulary's log-probabilities of one step take stays small


@pytest.fixture(scope="module", params=["smollm2", "gemma"])
def decoder_and_recorded(request: pytest.FixtureRequest) -> tuple[Decoder, dict[str, np.ndarray]]:
    path: Path = request.getfixturevalue(f"{request.param}_path")
    source = open_source(path)
    decoder = Decoder.load(source, weights="fp32", device=torch.device("cpu"))
    source.close()
    with np.load(DATA / "transformers" / f"{request.param}.npz", allow_pickle=False) as recorded:
        return decoder, dict(recorded)


def in_chunks(decoder: Decoder, ids: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows of the text and their log-probabilities, `[num_rows, vocab_size]`."""
    run = PagedRun(decoder, [len(ids)])
    for start in range(0, len(ids), CHUNK):
        rows = slice(start, min(start + CHUNK, len(ids)))
        yield rows, run.step([ids[rows].tolist()])[0]


@pytest.mark.parametrize("text", TEXTS)
def test_every_position_matches_transformers(
    decoder_and_recorded: tuple[Decoder, dict[str, np.ndarray]], text: str
) -> None:
    decoder, recorded = decoder_and_recorded
    expected = {
        name.split("/")[1]: torch.from_numpy(values)
        for name, values in recorded.items()
        if name.startswith(f"{text}/")
    }
    ids = expected["ids"].long()
    assert len(ids) >= 600
    following = torch.cat((ids[1:], ids[:1]))
    differences = []
    for rows, logprobs in in_chunks(decoder, ids):
        top1 = expected["top1"][rows].long()
        assert torch.equal(logprobs.argmax(-1), top1)
        known = min(rows.stop, len(ids) - 1) - rows.start  # nothing follows the last token
        got_next = logprobs.gather(1, following[rows, None]).squeeze(1)[:known]
        for got, column in (
            (logprobs.gather(1, top1[:, None]).squeeze(1), expected["top1_logprob"][rows]),
            (got_next, expected["next_logprob"][rows]),
            (logprobs[:, expected["fixed"].long()], expected["fixed_logprobs"][rows]),
            (logprobs.mean(-1, dtype=torch.float64), expected["mean_logprob"][rows].double()),
        ):
            differences.append((got - column).abs().max().item())
    print(f"{text}: {len(ids)} tokens, largest difference {max(differences):.1e}")
    assert max(differences) < TOLERANCE
