"""Measure at start what steps of a model take: a few rows, near and after some context."""

from __future__ import annotations

import time
from array import array

from kvstrata.cache.keys import Extras
from kvstrata.cache.manager import KVCache
from kvstrata.cache.table import CacheSequence
from kvstrata.engine.runner import Chunk, Runner
from kvstrata.engine.speculation.costs import Point, StepCosts

_ROWS = (1, 8, 32, 4, 16, 2, 64, 3, 6, 12, 24, 48)  # the most telling first, for when time is up
_LEAST_POINTS = 3
_CONTEXT = 1024  # tokens, where the pool has room for so many
_SECONDS = 1.5
_REPEATS = 3
_EXTRAS = Extras(salt="probe")


def measure(runner: Runner, cache: KVCache, most_rows: int, seconds: float = _SECONDS) -> StepCosts:
    """Run steps in blocks that are given back unpublished. most_rows: of one sequence in a step.

    Takes `seconds` or a little more where the model is slow.
    """
    room = cache.capacity_tokens // 2
    rows = [count for count in _ROWS if count < max(2, room)]
    context = max(1, min(_CONTEXT, room - max(rows)))
    length = context + max(rows)
    chain = cache.chain([0] * length, _EXTRAS)
    sequence = cache.open(chain, 0, length)
    if sequence is None or not cache.grow(sequence, length):
        raise RuntimeError(f"an empty pool had no room for {length} tokens")
    try:
        for group in cache.groups:  # memory never written to would be read faster than it ever is again
            for block in sequence.blocks(group.number).tolist():
                group.pool.payload(block).zero_()
        points = []
        end = time.perf_counter() + seconds
        for count in rows:
            far = _best(runner, sequence, context, count) if count <= max(most_rows, 1) else None
            points.append(Point(count, _best(runner, sequence, 0, count), far))
            if time.perf_counter() > end and len(points) >= _LEAST_POINTS:
                break
    finally:
        cache.release(sequence)
    return StepCosts(sorted(points, key=lambda point: point.rows), context)


def _best(runner: Runner, sequence: CacheSequence, start: int, rows: int) -> float:
    chunk = Chunk(sequence.tables, start, array("I", [0] * rows), logits=rows)
    best = float("inf")
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        runner.compute([chunk])
        best = min(best, time.perf_counter() - begin)
    return best
