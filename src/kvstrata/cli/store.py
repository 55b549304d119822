"""`kvstrata store`: look after what a tier keeps, without loading a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvstrata.cli.loading import progress_bar
from kvstrata.cli.output import JsonFlag, emit_json, stdout_console
from kvstrata.errors import ConfigError
from kvstrata.tiers.url import TierUrl, parse_tier_url

if TYPE_CHECKING:
    from kvstrata.tiers.care import Progress, StoredRecord

_SHORT = 12  # characters of keys and fingerprints in tables

Url = Annotated[
    str, typer.Argument(metavar="URL", help="A persistent tier: disk:///var/cache/kv or valkey://host:6379.")
]


def register(app: typer.Typer) -> None:
    """Declare the command and what it can do."""
    store = typer.Typer(no_args_is_help=True, help="Look after what a tier keeps.")
    for name, command in (("ls", ls), ("stat", stat), ("verify", verify), ("gc", gc), ("cp", cp)):
        store.command(name)(command)
    app.add_typer(store, name="store")


def ls(
    url: Url,
    salt: Annotated[str | None, typer.Option(help="Only blocks under this cache salt.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Show so many blocks; 0 shows all.")] = 100,
    json: JsonFlag = False,
) -> None:
    """List the blocks in a store."""
    from kvstrata.tiers.care import open_store  # noqa: PLC0415

    rows: list[dict[str, Any]] = []
    matching = 0
    with open_store(parse_tier_url(url)) as folder, _progress("reading headers") as progress:
        for record in folder.records(progress):
            if salt is None or record.salt == salt:
                matching += 1
                if not limit or len(rows) < limit:
                    rows.append(_row(record))
    if json:
        emit_json({"url": url, "records": matching, "blocks": rows})
        return
    table = Table("key", "model", "group", "depth", "salt", "origin", "KiB", "age", "lives", "fault")
    for row in rows:
        table.add_row(
            row["key"][:_SHORT],
            row["fingerprint"][:_SHORT],
            str(row["group"]),
            str(row["depth"]),
            row["salt"] if row["salt"].isprintable() else repr(row["salt"]),
            row["origin"],
            f"{row['bytes'] / 1024:,.0f}",
            _duration(row["age_s"]),
            _duration(row["remaining_s"]),
            row["fault"] or "",
        )
    console = stdout_console()
    console.print(table)
    if matching > len(rows):
        console.print(f"and {matching - len(rows):,} more: --limit 0 shows all")


def stat(url: Url, json: JsonFlag = False) -> None:
    """Tell what a store holds, by model, layer group and salt."""
    from kvstrata.tiers.care import open_store  # noqa: PLC0415

    groups: dict[tuple[str, int], Counter[str]] = {}
    salts: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    with open_store(parse_tier_url(url)) as folder, _progress("reading headers") as progress:
        for record in folder.records(progress):
            if record.fault is not None:
                faults[record.fault] += 1
                continue
            counts = groups.setdefault((record.geometry.fingerprint.hex(), record.geometry.group), Counter())
            counts["records"] += 1
            counts["expired"] += record.remaining <= 0
            counts["bytes"] += record.geometry.slot_bytes
            salts[record.salt] += record.geometry.slot_bytes
        used = folder.used_bytes
    figures: dict[str, Any] = {
        "url": url,
        "used_bytes": used,
        "records": sum(counts["records"] for counts in groups.values()),
        "expired": sum(counts["expired"] for counts in groups.values()),
        "faults": dict(faults),
        "groups": [
            {"fingerprint": key, "group": group, **{n: counts[n] for n in ("records", "expired", "bytes")}}
            for (key, group), counts in groups.items()
        ],
        "salts": dict(salts),
    }
    if json:
        emit_json(figures)
        return
    table = Table("model", "group", title=f"{_mib(used)} in all")
    for heading in ("records", "expired", "MiB"):
        table.add_column(heading, justify="right")
    for row in figures["groups"]:
        table.add_row(
            row["fingerprint"][:_SHORT],
            str(row["group"]),
            f"{row['records']:,}",
            f"{row['expired']:,}",
            f"{row['bytes'] / 2**20:,.1f}",
        )
    console = stdout_console()
    console.print(table)
    for name, nbytes in salts.most_common(20):
        console.print(f"  salt {name!r}: {_mib(nbytes)}")
    for fault, count in faults.items():
        console.print(f"  {count:,} that are no records: {fault}")


def verify(url: Url, json: JsonFlag = False) -> None:
    """Read everything and check every checksum; exits 1 if anything is wrong."""
    from kvstrata.tiers.care import open_store  # noqa: PLC0415

    good, nbytes = 0, 0
    faults: list[dict[str, Any]] = []
    with open_store(parse_tier_url(url)) as folder, _progress("verifying") as progress:
        for record in folder.verify(progress):
            nbytes += record.geometry.payload_bytes
            if record.fault is None:
                good += 1
            else:
                faults.append({**_where(record), "fault": record.fault, **_key(record)})
    if json:
        emit_json({"url": url, "good": good, "bytes": nbytes, "faulty": len(faults), "faults": faults})
    else:
        console = stdout_console()
        for fault in faults:
            where = fault.get("place") or f"slot {fault['slot']} of {fault['file']}"
            console.print(f"{where}: {fault['fault']}", soft_wrap=True)
        console.print(f"{good:,} records are whole, {len(faults):,} are not; {_mib(nbytes)} read")
    if faults:
        raise typer.Exit(1)


def gc(
    url: Url,
    salt: Annotated[str | None, typer.Option(help="Forget everything under this cache salt.")] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Remove what was stored longer ago than this: 12h, 7d.")
    ] = None,
    keep: Annotated[
        str | None, typer.Option(help="Remove what is not of the model whose fingerprint begins so.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Remove what has expired or is damaged, and what the options name; give its room back."""
    from kvstrata.tiers.care import open_store  # noqa: PLC0415
    from kvstrata.tiers.url import parse_seconds  # noqa: PLC0415

    most = None if older_than is None else parse_seconds(older_than, "--older-than")

    def unwanted(record: StoredRecord) -> str | None:
        if salt is not None and record.salt == salt:
            return "salt"
        if most is not None and record.age > most:
            return "older_than"
        if keep is not None and not record.geometry.fingerprint.hex().startswith(keep.lower()):
            return "fingerprint"
        return None

    with open_store(parse_tier_url(url), write=True) as folder, _progress("cleaning") as progress:
        cleaned = folder.clean(unwanted, progress)
    if json:
        emit_json(
            {
                "url": url,
                "removed": dict(cleaned.removed),
                "kept": cleaned.kept,
                "bytes_before": cleaned.before,
                "bytes_after": cleaned.after,
            }
        )
        return
    removed = ", ".join(f"{count:,} {reason}" for reason, count in cleaned.removed.items()) or "nothing"
    stdout_console().print(
        f"removed {removed}; kept {cleaned.kept:,}; {_mib(cleaned.before)} before, {_mib(cleaned.after)} now"
    )


def cp(
    source: Annotated[str, typer.Argument(metavar="URL", help="Where blocks come from.")],
    target: Annotated[str, typer.Argument(metavar="URL", help="Where they go: disk:///backup?size=64GiB.")],
    json: JsonFlag = False,
) -> None:
    """Copy all blocks of one store into another, which no engine uses meanwhile; the source is only read."""
    from kvstrata.tiers.care import copy_records, open_store  # noqa: PLC0415
    from kvstrata.tiers.open import check_tier_url, open_tier  # noqa: PLC0415

    into = check_tier_url(target)
    if into.scheme == "ram":
        raise ConfigError(f"target is {target!r}, which keeps nothing; give a disk:// or valkey:// URL")
    if _same_place(parse_tier_url(source), into):
        raise ConfigError(f"source and target are both {source!r}; give two")
    with open_store(parse_tier_url(source)) as store, _progress("copying") as progress:
        result = copy_records(
            store,
            lambda context: open_tier(target, context),
            by_segment=into.scheme != "disk",
            progress=progress,
        )
    if json:
        emit_json(
            {
                "source": source,
                "target": target,
                "copied": result.copied,
                "bytes": result.bytes,
                "passed_over": dict(result.passed_over),
            }
        )
    else:
        line = f"{result.copied:,} blocks are there, {_mib(result.bytes)}"
        if result.passed_over:
            others = (f"{count:,} {reason}" for reason, count in result.passed_over.items())
            line += f"; not copied: {', '.join(others)}"
        stdout_console().print(line)


def _same_place(one: TierUrl, other: TierUrl) -> bool:
    """Whether two URLs name one store; of servers, one with the same first ones."""
    if one.scheme != other.scheme:
        return False
    if one.scheme == "disk":
        return Path(one.path).resolve() == Path(other.path).resolve()
    prefixes = [url.options.get("prefix") for url in (one, other)]
    return one.netloc == other.netloc and prefixes[0] == prefixes[1]


@contextmanager
def _progress(doing: str) -> Iterator[Progress]:
    with progress_bar() as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _key(record: StoredRecord) -> dict[str, str]:
    return {} if record.header is None else {"key": record.header.key.hex()}


def _where(record: StoredRecord) -> dict[str, Any]:
    if record.place:
        return {"place": record.place}
    return {"file": record.geometry.stem, "slot": record.slot}


def _row(record: StoredRecord) -> dict[str, Any]:
    header = record.header
    return {
        "key": "" if header is None else header.key.hex(),
        "fingerprint": record.geometry.fingerprint.hex(),
        "group": record.geometry.group,
        "slot": record.slot,
        "place": record.place,
        "depth": None if header is None else header.depth,
        "salt": record.salt,
        "origin": "" if header is None else header.meta().origin,
        "bytes": record.geometry.payload_bytes,
        "age_s": record.age,
        "remaining_s": record.remaining,
        "fault": record.fault,
    }


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return "ever" if seconds == float("inf") else f"{seconds / size:,.1f}{unit}"
    return f"{seconds:,.0f}s"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
