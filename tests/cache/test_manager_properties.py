"""Random schedules against a model that writes into K and V which tokens they were computed from."""

from __future__ import annotations

import hypothesis.strategies as st
from driving import Run, append, assert_true_content, compute, mark, start, write
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.cache.formats import format_named
from kvstrata.cache.index import NO_BLOCK
from kvstrata.cache.keys import Extras
from kvstrata.cache.layout import BlockLayout, LayerGroup
from kvstrata.cache.manager import KVCache
from kvstrata.cache.retention import FULL, Retention

BLOCK, CHUNK = 4, 9
TOKEN_LISTS = st.lists(st.integers(0, 1), min_size=1, max_size=34)
SALTS = st.sampled_from(["", "x"])
RETENTIONS = st.sampled_from(
    [FULL, FULL, FULL, Retention(0, 5), Retention(2, 6), Retention(5, 1), Retention(0, 12), Retention(9, 4)]
)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        windows=st.sampled_from([(None,), (None, 6), (7,), (None, 3, 9), (1, None)]),
        blocks=st.integers(9, 16),
        policy=st.sampled_from(["lru", "lrfu", "fifo", "ttl"]),
        digest_bytes=st.sampled_from([1, 32]),
    )
    def build(self, windows: tuple[int | None, ...], blocks: int, policy: str, digest_bytes: int) -> None:
        self.now = 0.0
        self.runs: list[Run] = []
        self.pins: list[tuple[int, list[int]]] = []
        self.cache = KVCache(
            [BlockLayout(LayerGroup((0,), 1, 2, window), format_named("fp32"), BLOCK) for window in windows],
            [blocks] * len(windows),
            fingerprint=b"m" * 32,
            device="cpu",
            max_chunk=CHUNK,
            policy=policy,
            ttl=30.0 if policy == "ttl" else None,
            clock=lambda: self.now,
            digest_bytes=digest_bytes,
        )
        self.alone = windows == (None,)

    def _pick(self, data: st.DataObject) -> Run:
        return data.draw(st.sampled_from(self.runs))

    @rule(
        tokens=TOKEN_LISTS,
        salt=SALTS,
        extra=st.integers(0, 12),
        ttl=st.sampled_from([None, None, 5.0]),
        retention=RETENTIONS,
    )
    def open(self, tokens: list[int], salt: str, extra: int, ttl: float | None, retention: Retention) -> None:
        reserve = len(tokens) + extra
        run = start(self.cache, tokens, salt=salt, reserve=reserve, ttl=ttl, retention=retention)
        if run is not None:
            self.runs.append(run)
        elif not self.runs and not self.pins:
            assert reserve > self.cache.capacity(retention), "an idle cache refused what fits"

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), count=st.integers(1, CHUNK), late=st.booleans())
    def step(self, data: st.DataObject, count: int, late: bool) -> None:
        run = self._pick(data)
        new = []
        while len(run.tokens) < run.seq.num_computed + count:
            new.append(data.draw(st.integers(0, 1)))
            run.tokens.append(new[-1])
        if not late:
            run.seq.chain.extend(new)
        before = ([list(table) for table in run.seq.tables], list(run.seq.reserved), run.seq.num_computed)
        target = run.seq.num_computed + count
        promised = self.alone and target <= run.seq.reserve_tokens and not self.cache.stats().groups[0].copies
        done = compute(self.cache, run, target)
        assert done or not (promised and not self._shares_tail(run)), "a promised block was not there"
        if not done:
            after = ([list(table) for table in run.seq.tables], list(run.seq.reserved), run.seq.num_computed)
            assert after == before
        if late:
            run.seq.chain.extend(new)

    def _shares_tail(self, run: Run) -> bool:
        refs = self.cache.pools[0].refs
        position = run.seq.num_computed // BLOCK
        table = run.seq.tables[0]
        return position < len(table) and bool(refs[table[position]] > 1)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), grown=st.integers(0, CHUNK))
    def fork(self, data: st.DataObject, grown: int) -> None:
        """Fork, maybe between the growth and the writing of the parent's step."""
        run = self._pick(data)
        target = run.seq.num_computed + grown
        stepping = grown > 0 and self.cache.grow(run.seq, target)
        child = Run(self.cache.fork(run.seq), list(run.tokens), run.salt)
        del child.tokens[len(child.seq.chain) :]
        while len(child.tokens) < child.seq.num_computed:
            append(child, run.tokens[len(child.tokens)])
        self.runs.append(child)
        if stepping:
            while len(run.tokens) < target:
                append(run, data.draw(st.integers(0, 1)))
            write(self.cache, run, target)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        run = self._pick(data)
        self.runs.remove(run)
        self.cache.release(run.seq)
        self.cache.release(run.seq)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), ahead=st.integers(0, CHUNK))
    def speculate(self, data: st.DataObject, ahead: int) -> None:
        run = self._pick(data)
        if self.cache.grow(run.seq, run.seq.num_computed + ahead):
            self.cache.truncate(run.seq, run.seq.num_computed)

    @rule(tokens=TOKEN_LISTS, retention=RETENTIONS, data=st.data())
    def pin(self, tokens: list[int], retention: Retention, data: st.DataObject) -> None:
        keys = self.cache.chain(tokens, Extras(retention=retention)).keys
        group = data.draw(st.sampled_from(range(len(self.cache.pools))))
        if keys and (blocks := self.cache.pin(data.draw(st.sampled_from(keys)), group)) is not None:
            self.pins.append((group, blocks))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.cache.unpin(*self.pins.pop())

    @rule(seconds=st.floats(0.0, 20.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.cache.expire()

    @rule()
    def reset(self) -> None:
        self.cache.reset()

    @rule(tokens=TOKEN_LISTS, salt=SALTS, retention=RETENTIONS)
    def found_content_is_true(self, tokens: list[int], salt: str, retention: Retention) -> None:
        chain = self.cache.chain(tokens, Extras(salt=salt, retention=retention))
        hit = self.cache.match(chain, len(tokens))
        assert hit % BLOCK == 0
        seq = self.cache.open(chain, hit, hit)
        if seq is None:
            return
        for pool, table, seen in zip(self.cache.pools, seq.tables, seq.seen, strict=True):
            for block in seen.visible_blocks(hit // BLOCK, BLOCK):
                assert table[block] != NO_BLOCK
                for position in range(block * BLOCK, (block + 1) * BLOCK):
                    stored = pool.kv[table[block], 0, :, :, position % BLOCK]
                    assert (stored == mark(salt, tokens, position, retention)).all()
        self.cache.release(seq)

    @invariant()
    def nothing_is_wrong(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        for run in self.runs:
            assert_true_content(self.cache, run)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for run in self.runs:
            self.cache.release(run.seq)
        for group, blocks in self.pins:
            self.cache.unpin(group, blocks)
        self.cache.check_integrity()
        for group in self.cache.stats().groups:
            assert group.free + group.cached == group.total
            assert group.reserved == group.waste_slots == 0


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
