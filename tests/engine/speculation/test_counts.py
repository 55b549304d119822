"""Counts of proposed and accepted tokens."""

from __future__ import annotations

from kvstrata.engine.speculation.counts import DraftCounts


def test_runs_add_up_by_position() -> None:
    counts = DraftCounts()
    assert counts.acceptance is None
    for length, accepted in ((3, 3), (2, 0), (4, 1)):
        counts.add(length, accepted)
    assert (counts.drafts, counts.draft_tokens, counts.accepted_tokens) == (3, 9, 4)
    assert counts.accepted_by_position == [2, 1, 1, 0]
    assert counts.acceptance == 4 / 9
