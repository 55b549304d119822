"""Disks that are full, write short, vanish or may not be written: stores are dropped, and nothing else."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from pathlib import Path

import pytest
from faulty_files import FaultyFiles, every, no_room
from stored import CONTEXT, HIT, Time, blocks, drops, folder_bytes, misses, options

from kvstrata.errors import ConfigError
from kvstrata.tiers.breaker import FAILURES, FIRST_PAUSE
from kvstrata.tiers.disk import DiskTier
from kvstrata.tiers.tier import Record


def broken() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def check_agreement(tier: DiskTier, outcome: dict[int, list[str | None]]) -> None:
    """Exactly what was acknowledged is there, by chain."""
    for chain, dropped in outcome.items():
        found = misses(tier, blocks(len(dropped), chain=chain))
        assert [miss is HIT for miss in found] == [reason is None for reason in dropped]


@pytest.mark.parametrize("fault", ["disk_full", "short", "broken"])
def test_one_write_in_five_fails(tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture):
    files, time = FaultyFiles(), Time()
    tier = DiskTier(options(tmp_path), CONTEXT, files=files, clocks=time.clocks)

    def shorten() -> None:
        files.short_writes = 100

    fail = {"disk_full": no_room, "short": shorten, "broken": broken}[fault]
    hook = every(5, fail)

    def before_write() -> None:
        files.short_writes = None
        hook()

    files.before_write = before_write
    outcome = {}
    for chain in range(1, 40):
        outcome[chain] = drops(tier, blocks(3, chain=chain))
        time.pass_by(2 * FIRST_PAUSE)
    files.before_write = lambda: None
    files.short_writes = None
    dropped = [reason for reasons in outcome.values() for reason in reasons if reason]
    assert dropped
    assert set(dropped) == {"io_error"}
    assert None in (reason for reasons in outcome.values() for reason in reasons)
    check_agreement(tier, outcome)
    assert tier.usage().drops["io_error"] == len(dropped)
    assert len(lines(caplog)) == 1
    tier.close()
    tier = DiskTier(options(tmp_path), CONTEXT)
    check_agreement(tier, outcome)
    tier.close()


def test_a_disk_that_is_full_for_good_keeps_what_it_has(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    files = FaultyFiles()
    tier = DiskTier(options(tmp_path), CONTEXT, files=files)
    first = blocks(4, chain=1)
    drops(tier, first)
    files.before_write = no_room
    for chain in range(2, 30):
        assert drops(tier, blocks(4, chain=chain)) == ["io_error"] * 4
    assert misses(tier, first) == [HIT] * 4
    assert len(lines(caplog)) == 1
    assert "No space left" in lines(caplog)[0]
    tier.close()


def test_a_disk_with_no_room_to_grow_reuses_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    files = FaultyFiles()
    tier = DiskTier(options(tmp_path, 1 << 16), CONTEXT, files=files)
    drops(tier, blocks(2, chain=1))
    held = folder_bytes(tmp_path / "store")
    files.before_allocate = no_room
    for chain in range(2, 12):
        assert drops(tier, blocks(2, chain=chain)) == [None, None]
    assert misses(tier, blocks(2, chain=11)) == [HIT, HIT]
    assert folder_bytes(tmp_path / "store") <= held
    assert len(lines(caplog)) <= 1
    tier.close()


def test_a_disk_without_any_room_stores_nothing(tmp_path: Path):
    files = FaultyFiles()
    files.before_allocate = no_room
    tier = DiskTier(options(tmp_path), CONTEXT, files=files)
    assert drops(tier, blocks(3)) == ["full"] * 3
    assert misses(tier, blocks(3)) == ["absent"] * 3
    tier.close()


def test_a_failing_disk_is_left_alone_and_probed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    files, time = FaultyFiles(), Time()
    tier = DiskTier(options(tmp_path), CONTEXT, files=files, clocks=time.clocks)
    drops(tier, blocks(1, chain=100))
    files.before_write = broken
    for chain in range(FAILURES):
        drops(tier, blocks(1, chain=chain))
    before = files.writes
    assert drops(tier, blocks(1, chain=50)) == ["io_error"]
    assert files.writes == before  # not even tried
    files.before_write = lambda: None
    time.pass_by(FIRST_PAUSE)
    assert drops(tier, blocks(1, chain=51)) == [None]
    assert drops(tier, blocks(1, chain=52)) == [None]
    assert [line.split(": ")[0].split(" ")[-1] for line in lines(caplog)] == ["fails", "again"]
    tier.close()


def test_failing_reads_are_misses_and_recover(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    files, time, records = FaultyFiles(), Time(), blocks(3)
    tier = DiskTier(options(tmp_path), CONTEXT, files=files, clocks=time.clocks)
    drops(tier, records)
    files.before_read = broken
    for _ in range(FAILURES + 2):
        assert misses(tier, records) == ["io_error"] * 3
    assert tier.lookup([records[0].identity.address]) == [False]
    files.before_read = lambda: None
    time.pass_by(FIRST_PAUSE)
    assert misses(tier, records) == [HIT] * 3
    assert len(lines(caplog)) == 2
    tier.close()


def test_a_folder_removed_while_running_costs_hits_only(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    time = Time()
    tier = DiskTier(options(tmp_path), CONTEXT, clocks=time.clocks)
    records = blocks(3)
    drops(tier, records)
    shutil.rmtree(tmp_path / "store")
    assert misses(tier, records) == ["absent"] * 3
    for chain in range(1, 6):
        assert drops(tier, blocks(3, chain=chain)) == ["io_error"] * 3
    assert misses(tier, blocks(3, chain=2)) == ["absent"] * 3
    assert len(lines(caplog)) == 1
    (tmp_path / "store").mkdir(0o700)  # mounted again, say
    time.pass_by(100)
    assert drops(tier, records) == [None] * 3
    assert misses(tier, records) == [HIT] * 3
    with pytest.raises(ConfigError, match="in use"):
        DiskTier(options(tmp_path), CONTEXT)
    tier.close()


def test_a_folder_that_may_not_be_written_is_refused_with_the_remedy(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        DiskTier(options(tmp_path / "file"), CONTEXT)


def test_files_that_turn_read_only_drop_stores(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    files, records = FaultyFiles(), blocks(2)
    tier = DiskTier(options(tmp_path), CONTEXT, files=files)
    drops(tier, records)

    def read_only() -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    files.before_write = read_only
    assert drops(tier, blocks(2, chain=1)) == ["io_error"] * 2
    assert misses(tier, records) == [HIT] * 2
    assert len(lines(caplog)) == 1
    tier.close()


def test_a_slow_disk_drops_stores_instead_of_piling_them_up(tmp_path: Path):
    files, go = FaultyFiles(), threading.Event()
    files.before_write = lambda: go.wait(30) or None  # type: ignore[assignment,return-value]
    tier = DiskTier(options(tmp_path), CONTEXT, files=files)
    batches: list[list[Record]] = [blocks(1, chain=chain) for chain in range(100)]
    futures = [tier.store(records) for records in batches]
    go.set()
    outcomes = [future.result()[0].dropped for future in futures]
    assert set(outcomes) == {None, "full"}
    assert [misses(tier, records)[0] is HIT for records in batches] == [reason is None for reason in outcomes]
    tier.close()
