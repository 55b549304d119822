"""How `kvstrata top` looks: a page of text for a width, from the figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

_LABEL = 11  # columns of the labels
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEPS, _FULL, _PART, _EMPTY, _NONE = "▁▂▃▄▅▆▇█", "█", "▒", "░", "·"
_PLAIN = str.maketrans(f"{_STEPS}{_PART}{_EMPTY}{_NONE}", ".:-=+*%#" + "=-.")


def page(
    url: str, figures: dict[str, Any], course: Sequence[float | None], width: int, trouble: str | None = None
) -> RenderableType:
    """The whole page. course: hit ratios, the newest last. trouble: why the figures are old, if they are."""
    requests, tokens, evictions = figures["requests"], figures["tokens_per_second"], figures["evictions"]
    hits = figures["hit_ratio"]
    head = Text.assemble(("kvstrata", "bold"), f"  {figures['model'] or ''}  {url}")
    bar = max(10, width - _LABEL - 34)
    rows: list[RenderableType] = [
        head,
        _state(figures, trouble),
        Text(),
        _row(
            "requests",
            ("running", _number(requests["running"])),
            ("waiting", _number(requests["waiting"])),
            ("done", f"{_number(requests['finished_per_second'], 1)}/s"),
            ("preempted", _number(requests["preemptions"])),
        ),
        _row("TTFT", *_times(figures["ttft_ms"])),
        _row("ITL", *_times(figures["itl_ms"])),
        _row(
            "tokens/s",
            ("prefill", _number(tokens["prefill"])),
            ("decode", _number(tokens["decode"])),
            ("answers", _number(tokens["answers"])),
        ),
        Text(),
        _row(
            "hit ratio",
            ("now", _percent(hits["now"])),
            ("5 min", _percent(hits["recent"])),
            ("since start", _percent(hits["since_start"])),
        ),
        Text.assemble(" " * _LABEL, (sparkline(course, width - _LABEL - 1), "cyan")),
        _row(
            "evictions",
            ("rate", f"{_number(evictions['per_second'], 1)}/s"),
            *((reason, _number(count)) for reason, count in (evictions["total"] or {}).items() if count),
        ),
        _row(
            "thrash",
            ("computed again soon after eviction", f"{_number(evictions['thrashed_tokens'])} tokens"),
            ("", f"{_number(evictions['thrashed_tokens_per_second'])}/s"),
        ),
        _row("pressure", ("of the pool held or promised", _percent(figures["memory_pressure"]))),
        Text(),
        *(_place(place, bar) for place in figures["places"]),
        Text(),
        Text.assemble(
            " " * _LABEL,
            (_FULL, "green"),
            (" held by requests  ", "dim"),
            (_PART, "yellow"),
            (" cached  ", "dim"),
            (_EMPTY, "dim"),
            (" free    q quits", "dim"),
        ),
    ]
    for row in rows:
        if isinstance(row, Text):
            row.no_wrap, row.overflow = True, "ellipsis"
    return Group(*rows)


def plain(view: RenderableType) -> RenderableType:
    """The same page in ASCII, for terminals that have nothing else."""
    assert isinstance(view, Group)
    changed = []
    for row in view.renderables:
        assert isinstance(row, Text)
        row.plain = row.plain.translate(_PLAIN).replace(_FULL, "#")
        changed.append(row)
    return Group(*changed)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Shares from 0 to 1 as columns, the newest at the right; a dot where there is none."""
    shown = [_NONE if v is None else _STEPS[round(min(max(v, 0.0), 1.0) * 7)] for v in values]
    return "".join(shown[-width:]).rjust(width)


def bar_of(held: float, used: float, width: int) -> Text:
    """A bar: what is held, what is used beyond that, what is free. held, used: shares of the whole."""
    full = round(min(max(held, 0.0), 1.0) * width)
    part = max(0, round(min(max(used, 0.0), 1.0) * width) - full)
    return Text.assemble(
        (_FULL * full, "green"), (_PART * part, "yellow"), (_EMPTY * (width - full - part), "dim")
    )


def _state(figures: dict[str, Any], trouble: str | None) -> Text:
    if trouble is not None:
        return Text(trouble, "red")
    if figures["failed"]:
        return Text("the engine has failed: restart the server", "red")
    return Text("draining: no new requests are taken", "yellow") if figures["draining"] else Text()


def _row(label: str, *pairs: tuple[str, str]) -> Text:
    text = Text.assemble((label.ljust(_LABEL), "bold"))
    for name, value in pairs:
        text.append(f"{name} " if name else "", "dim")
        text.append(f"{value}   ")
    return text


def _times(times: dict[str, float | None]) -> Iterable[tuple[str, str]]:
    yield "p50", _milliseconds(times["p50"])
    yield "p90", _milliseconds(times["p90"])
    yield (
        "since start",
        f"{_milliseconds(times['p50_since_start'])} / {_milliseconds(times['p90_since_start'])}",
    )


def _place(place: dict[str, Any], width: int) -> Text:
    used = place["used_share"]
    bar = bar_of(place["held_share"] or 0.0, used or 0.0, width)
    sizes = f"{_bytes(place['used_bytes'])} of {_bytes(place['capacity_bytes'])}"
    state = f" {place['state']}" if place["state"] not in (None, "closed") else ""
    return Text.assemble(
        (place["name"][: _LABEL - 1].ljust(_LABEL), "bold"),
        bar,
        f" {_percent(used):>7} {sizes}",
        (state, "red"),
    )


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f} %"


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1e3:.2f} s" if value >= 1000 else f"{value:.1f} ms"


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
