"""A disk tier from outside: what is stored is found again, within limits, by this process and the next."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from faulty_files import FaultyFiles, files_of, no_room
from stored import (
    CONTEXT,
    FINGERPRINT,
    HIT,
    PAYLOAD,
    Time,
    blocks,
    drops,
    folder_bytes,
    load,
    misses,
    options,
)

from kvstrata.errors import ConfigError
from kvstrata.tiers.disk import DiskOptions, DiskTier
from kvstrata.tiers.disk.folder import OVERHEAD_BYTES
from kvstrata.tiers.disk.geometry import Geometry
from kvstrata.tiers.disk.opening import refresh
from kvstrata.tiers.tier import Address, Identity, StoreContext
from kvstrata.tiers.url import parse_tier_url

GEOMETRY = Geometry(FINGERPRINT, 0, 16, PAYLOAD)
Open = Callable[..., DiskTier]


def room_for(count: int) -> int:
    return OVERHEAD_BYTES + GEOMETRY.charge(count)


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[Open]:
    tiers: list[DiskTier] = []

    def opened(size: int = 1 << 24, *, context: StoreContext = CONTEXT, files=None, time=None, **others):
        made = DiskTier(
            options(tmp_path, size, **others),
            context,
            files=files,
            clocks=time.clocks if time else None,
            threads=2,
        )
        tiers.append(made)
        return made

    yield opened
    for tier in tiers:
        if not tier.options.read_only:
            tier.check_integrity()
        tier.close()


def test_what_is_stored_is_loaded_by_this_process_and_the_next(open_tier: Open):
    tier, records = open_tier(), blocks(40)
    assert drops(tier, records) == [None] * 40
    assert tier.lookup([record.identity.address for record in records]) == [True] * 40
    assert misses(tier, records) == [HIT] * 40
    tier.close()
    assert misses(tier, records) == ["closed"] * 40
    again = open_tier()
    assert misses(again, records) == [HIT] * 40
    assert again.usage().records == 40


def test_the_meta_of_a_block_comes_back_with_it(open_tier: Open):
    record = blocks(3)[2]
    meta = replace(record.meta, origin="answer", priority=5, turn=2, cost=0.5)
    open_tier().store([replace(record, meta=meta)]).result()
    (outcome,), _ = load(open_tier(read_only=True), [record])
    assert outcome.meta is not None
    assert replace(outcome.meta, born=0.0) == replace(meta, born=0.0)


def test_groups_of_different_sizes_lie_side_by_side(open_tier: Open):
    context = StoreContext(FINGERPRINT, 16, (PAYLOAD, 12288), (True, False))
    tier = open_tier(context=context)
    full, window = blocks(6, context=context), blocks(6, context=context, group=1)
    assert drops(tier, [*full, *window]) == [None] * 12
    assert misses(tier, [*full, *window]) == [HIT] * 12


def test_a_prompt_travels_in_few_calls(open_tier: Open):
    files, records = FaultyFiles(), blocks(125)
    tier = open_tier(files=files)
    drops(tier, records)
    assert files.writes <= 4
    files.reads = 0
    assert misses(tier, records) == [HIT] * 125
    assert files.reads <= 4


def test_the_cap_holds_and_the_least_recently_used_go(open_tier: Open, tmp_path: Path):
    tier = open_tier(room_for(10))
    first, second, third = (blocks(4, chain=chain) for chain in range(3))
    drops(tier, first)
    drops(tier, second)
    misses(tier, first)
    drops(tier, third)
    assert misses(tier, first) == [HIT] * 4
    assert misses(tier, second).count(HIT) == 2
    assert misses(tier, second)[:2] == [HIT, HIT]  # tails go before heads
    assert tier.usage().used_bytes <= room_for(10)
    assert folder_bytes(tmp_path / "store") <= room_for(10)


def test_a_lowered_cap_is_enforced_at_the_next_start(open_tier: Open, tmp_path: Path):
    tier = open_tier()
    old, new = blocks(20, chain=1), blocks(5, chain=2)
    drops(tier, old)
    drops(tier, new)
    tier.close()
    tier = open_tier(room_for(8))
    assert folder_bytes(tmp_path / "store") <= room_for(8)
    assert misses(tier, new) == [HIT] * 5


def test_the_order_of_use_outlives_the_process(open_tier: Open):
    tier = open_tier(room_for(8))
    used, unused = blocks(4, chain=1), blocks(4, chain=2)
    drops(tier, used)
    drops(tier, unused)
    misses(tier, used)
    tier.close()
    tier = open_tier(room_for(8))
    drops(tier, blocks(4, chain=3))
    assert misses(tier, used) == [HIT] * 4


def test_blocks_of_other_models_are_misses_and_the_first_to_go(open_tier: Open, tmp_path: Path):
    tier = open_tier(room_for(40))
    mine = blocks(15)
    drops(tier, mine)
    tier.close()
    other_context = StoreContext(bytes(32), 16, (PAYLOAD,))
    tier = open_tier(room_for(40), context=other_context)
    assert misses(tier, mine) == ["absent"] * 15
    theirs = [blocks(12, chain=chain, context=other_context) for chain in range(3)]
    for records in theirs[:2]:
        assert drops(tier, records) == [None] * 12
    assert misses(tier, theirs[0]) == [HIT] * 12  # there was room in the first model's files
    assert drops(tier, theirs[2]) == [None] * 12
    assert folder_bytes(tmp_path / "store") <= room_for(40)
    assert misses(tier, theirs[0]) == [HIT] * 12


def test_files_of_an_unknown_form_count_and_go_first(open_tier: Open, tmp_path: Path):
    open_tier(room_for(10)).close()
    stranger = tmp_path / "store" / "of-an-older-format.payloads"
    stranger.write_bytes(b"x" * 20480)
    tier = open_tier(room_for(10))
    assert tier.usage().used_bytes > 20480
    drops(tier, blocks(9))
    assert not stranger.exists()
    assert misses(tier, blocks(9)) == [HIT] * 9


def test_pinned_blocks_stay_until_their_time_is_up(open_tier: Open):
    time = Time()
    tier = open_tier(room_for(8), time=time)
    pinned = blocks(4, chain=1)
    drops(tier, pinned)
    addresses = [record.identity.address for record in pinned]
    assert tier.pin([*addresses, Address(bytes(32), 0)], time.monotonic + 60) == [True] * 4 + [False]
    for chain in range(2, 6):
        time.pass_by(1)
        drops(tier, blocks(4, chain=chain))
    assert misses(tier, pinned) == [HIT] * 4
    time.pass_by(100)
    for chain in range(6, 9):
        time.pass_by(1)
        drops(tier, blocks(4, chain=chain))
    assert "absent" in misses(tier, pinned)


def test_unpinned_blocks_may_go(open_tier: Open):
    tier = open_tier(room_for(4))
    pinned = blocks(4, chain=1)
    drops(tier, pinned)
    addresses = [record.identity.address for record in pinned]
    tier.pin(addresses, float("inf"))
    assert drops(tier, blocks(4, chain=2)) == ["full"] * 4
    tier.unpin(addresses)
    assert drops(tier, blocks(4, chain=3)) == [None] * 4


def test_one_salt_cannot_crowd_out_another(open_tier: Open):
    tier = open_tier(quota=6 * GEOMETRY.slot_bytes)
    quiet = blocks(4, chain=1, salt="quiet")
    drops(tier, quiet)
    for chain in range(2, 7):
        drops(tier, blocks(4, chain=chain, salt="loud"))
    assert misses(tier, quiet) == [HIT] * 4
    loud = [miss for chain in range(2, 7) for miss in misses(tier, blocks(4, chain=chain, salt="loud"))]
    assert loud.count(HIT) == 6
    assert drops(tier, blocks(9, chain=9, salt="big"))[6:] == ["quota"] * 3


def test_deleted_blocks_stay_away_after_a_restart(open_tier: Open):
    tier, records = open_tier(), blocks(6)
    drops(tier, records)
    assert tier.delete([record.identity.address for record in records[3:]]) == 3
    tier.close()
    assert misses(open_tier(), records) == [HIT] * 3 + ["absent"] * 3


def test_a_cleared_tier_is_empty_for_the_next_process_too(open_tier: Open):
    tier = open_tier()
    drops(tier, blocks(4))
    tier.clear()
    assert misses(tier, blocks(4)) == ["absent"] * 4
    tier.close()
    again = open_tier()
    assert again.usage().records == 0
    assert drops(again, blocks(4)) == [None] * 4
    assert misses(again, blocks(4)) == [HIT] * 4


OPENS = """
import sys
from kvstrata.errors import ConfigError
from kvstrata.tiers.disk import DiskTier
from kvstrata.tiers.tier import StoreContext
from kvstrata.tiers.url import parse_tier_url
try:
    DiskTier.open(parse_tier_url(sys.argv[1]), StoreContext(bytes(32), 16, (4096,)))
except ConfigError as error:
    print(error)
"""


def test_a_second_process_is_refused_or_reads_beside_the_first(open_tier: Open, tmp_path: Path):
    writer, records = open_tier(), blocks(4)
    drops(writer, records)
    url = f"disk://{tmp_path / 'store'}?size=16MiB"
    other = subprocess.run(
        [sys.executable, "-c", OPENS, url], stdout=subprocess.PIPE, text=True, timeout=120, check=True
    )
    assert re.search(f"in use by process {os.getpid()}.*ro=1", other.stdout)
    with pytest.raises(ConfigError, match=r"in use by this process already; name a folder once"):
        open_tier()
    reader = open_tier(read_only=True)
    assert misses(reader, records) == [HIT] * 4
    assert drops(reader, blocks(1, chain=2)) == ["read_only"]
    assert reader.delete([records[0].identity.address]) == 0
    assert misses(writer, records) == [HIT] * 4


def test_a_reader_survives_that_the_writer_reuses_slots(open_tier: Open):
    writer, old = open_tier(room_for(6)), blocks(6, chain=1)
    drops(writer, old)
    reader = open_tier(read_only=True)
    new = blocks(6, chain=2)
    drops(writer, new)
    assert set(misses(reader, old)) == {"address"}
    assert misses(writer, new) == [HIT] * 6


def test_files_are_for_their_owner_only(open_tier: Open, tmp_path: Path):
    tier = open_tier()
    drops(tier, blocks(2))
    store = tmp_path / "store"
    assert store.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in store.iterdir()} == {0o600}


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path: Path):
    (tmp_path / "store").mkdir(0o755)
    (tmp_path / "store" / "letter.txt").write_text("dear all")
    with pytest.raises(ConfigError, match=r"letter\.txt.*empty or new folder"):
        DiskTier(options(tmp_path), CONTEXT)
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o755


def test_blocks_that_do_not_fit_the_slots_are_dropped(open_tier: Open):
    tier = open_tier()
    (record,) = blocks(1, salt="s" * 2000)
    assert drops(tier, [record]) == ["too_big"]
    (record,) = blocks(1)
    assert drops(tier, [replace(record, payload=record.payload[:-1])]) == ["too_big"]


def test_the_same_block_is_written_once(open_tier: Open):
    tier, records = open_tier(), blocks(3)
    assert drops(tier, [*records, *records]) == [None] * 6
    assert drops(tier, records) == [None] * 3
    assert tier.usage().stores == 3


def test_another_block_under_the_same_key_is_a_miss(open_tier: Open):
    tier, records = open_tier(), blocks(1)
    drops(tier, records)
    wanted = Identity(records[0].identity.address, records[0].identity.parent, bytes(64), b"")
    into = memoryview(bytearray(PAYLOAD))
    assert tier.load([wanted], [into]).result()[0].miss == "content"
    assert tier.usage().misses["content"] == 1


def test_signed_records_are_only_served_with_their_key(open_tier: Open, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STORE_KEY", "0123456789abcdef")
    tier = open_tier(signing_key=b"0123456789abcdef")
    records = blocks(3)
    drops(tier, records)
    assert misses(tier, records) == [HIT] * 3
    tier.close()
    tier = open_tier(signing_key=b"another key of 16")
    assert misses(tier, records) == ["signature"] * 3


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("disk:///cache", "size=64GiB"),
        ("disk://host/cache?size=1GiB", "names no folder"),
        ("disk:///cache?size=1GiB&sync=often", "none, batch, always"),
        ("disk:///cache?size=1GiB&policy=best", "lru, lrfu, fifo, ttl"),
        ("disk:///cache?size=1GiB&ttl=soon", "12h"),
        ("disk:///cache?size=1GiB&ro=yes", "1 or 0"),
        ("disk:///cache?size=1GiB&hmac=secret", "env:NAME"),
        ("disk:///cache?size=1GiB&hmac=env:NOT_SET_ANYWHERE", "NOT_SET_ANYWHERE"),
        ("disk:///cache?size=1GiB&colour=red", "colour"),
        ("disk:///cache?size=1goat", "4GiB"),
    ],
)
def test_wrong_options_are_named(url: str, says: str):
    with pytest.raises(ConfigError, match=says):
        DiskOptions.from_url(parse_tier_url(url))


def test_a_cap_below_one_block_is_refused(open_tier: Open):
    with pytest.raises(ConfigError, match=r"size is 10000.*give at least"):
        open_tier(10000)


def test_lost_hints_cost_nothing_but_order(open_tier: Open, tmp_path: Path):
    tier, records = open_tier(), blocks(5)
    drops(tier, records)
    tier.close()
    files_of(tmp_path, "uses").write_bytes(os.urandom(333))
    assert misses(open_tier(), records) == [HIT] * 5


def test_a_reader_sees_what_the_writer_adds_and_removes(open_tier: Open):
    writer = open_tier()
    drops(writer, blocks(2, chain=1))
    reader = open_tier(read_only=True)
    assert misses(reader, blocks(2, chain=2)) == ["absent"] * 2
    drops(writer, blocks(2, chain=2))
    writer.delete([record.identity.address for record in blocks(2, chain=1)])
    refresh(reader._store)
    assert misses(reader, blocks(2, chain=2)) == [HIT] * 2
    assert misses(reader, blocks(2, chain=1)) == ["absent"] * 2


def test_an_empty_store_tells_nothing_of_its_speed(open_tier: Open):
    assert open_tier().probe() == []


def test_the_records_there_tell_how_quick_the_disk_is(open_tier: Open):
    tier = open_tier()
    drops(tier, blocks(5))
    tier.close()
    tier = open_tier()
    before = tier.usage()
    sizes = [nbytes for nbytes, seconds in tier.probe() if seconds > 0]
    assert sizes == [PAYLOAD, 5 * PAYLOAD]
    assert tier.usage() == before
    tier.check_integrity()


def test_a_disk_that_cannot_be_read_tells_nothing(open_tier: Open):
    files = FaultyFiles()
    tier = open_tier(files=files)
    drops(tier, blocks(5))
    files.before_read = no_room
    assert tier.probe() == []
    tier.check_integrity()
