"""`kvstrata bench tiers`: what moving a block costs, and what a prompt costs from each place.

Rates of the RAM and the disk tier are shares of memcpy's and of plain files' in the same run. The time to the
first token is that of a long prompt whose prefix is nowhere, in the pool, in RAM, and on disk after a restart
with the page cache dropped, each time with another tail. Answers are compared with those of an engine that
has no cache at all.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvstrata.cache.layout import ALIGNMENT
from kvstrata.cli.loading import load, progress_bar
from kvstrata.cli.options import with_settings
from kvstrata.cli.output import JsonFlag, emit_json, stdout_console
from kvstrata.config import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from kvstrata.engine.llm import LLM
    from kvstrata.engine.outputs import RequestOutput

_TAIL = 20
_ANSWER = 8
_IDS = range(100, 40_000)


def register(bench: typer.Typer) -> None:
    """Declare the measurement."""
    bench.command("tiers")(with_settings(tiers))


def tiers(
    *,
    config: EngineConfig,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where the disk tier's files go for the time; by default temporary files."),
    ] = None,
    prompt: Annotated[int, typer.Option(min=32, help="Tokens of the shared prefix.")] = 2000,
    megabytes: Annotated[int, typer.Option(min=1, help="MiB that are stored and loaded.")] = 256,
    block_bytes: Annotated[
        int, typer.Option(min=4096, help="Bytes of a block that goes to and from valkey:// servers.")
    ] = 2 << 20,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, of which the best counts.")] = 3,
    json: JsonFlag = False,
) -> None:
    """Measure the RAM and the disk tier, a long prompt from each, and a valkey:// tier that is named."""
    shared = [url for url in config.tiers if url.startswith("valkey")]
    with tempfile.TemporaryDirectory(dir=folder, prefix="kvstrata-bench-") as place:
        figures = measure(config, Path(place), prompt, megabytes << 20, repeats)
    if shared:
        figures |= _valkey(shared[0], config, megabytes << 20, block_bytes, repeats)
    if json:
        emit_json(figures)
        return
    _show(figures)


def measure(config: EngineConfig, folder: Path, prompt: int, nbytes: int, repeats: int) -> dict[str, Any]:
    """All figures, with a bar on stderr."""
    config = replace(config, tiers=())
    ttft, identical, sources = _first_tokens(config, folder, prompt)
    from kvstrata.cli.bench.tier_moves import Blocks, disk_ratios, ram_ratios  # noqa: PLC0415  (torch is slow)
    from kvstrata.tiers.tier import StoreContext  # noqa: PLC0415

    with progress_bar() as bar:
        task = bar.add_task("tiers", total=2)
        context = StoreContext(b"b" * 32, config.block_size, (max(_payloads(config)),))
        blocks = Blocks(context, nbytes)
        ram = ram_ratios(blocks, repeats)
        bar.advance(task)
        disk = disk_ratios(blocks, folder / "moves", repeats)
        bar.advance(task)
    return {
        **{name: value for name, value in {**ram, **disk}.items() if name != "identical"},
        "ttft_ms": ttft,
        "cached_by_source": sources,
        "identical": identical and bool(ram["identical"]) and bool(disk["identical"]),
        "bytes": blocks.nbytes,
        "block_bytes": blocks.payload,
    }


def _valkey(
    url: str, config: EngineConfig, nbytes: int, block_bytes: int, repeats: int
) -> dict[str, float | int | bool]:
    """Figures of a tier on servers that are there."""
    from kvstrata.cli.bench.tier_moves import Blocks, valkey_ratios  # noqa: PLC0415  (torch is slow)
    from kvstrata.tiers.tier import StoreContext  # noqa: PLC0415

    context = StoreContext(b"b" * 32, config.block_size, (block_bytes,))
    figures = valkey_ratios(url, Blocks(context, nbytes), repeats)
    return {
        **{n: v for n, v in figures.items() if n != "identical"},
        "valkey_identical": figures["identical"],
        "valkey_block_bytes": block_bytes,
    }


def _payloads(config: EngineConfig) -> tuple[int, ...]:
    """Bytes of a block in each layer group of the model."""
    from kvstrata.engine.build import block_layouts  # noqa: PLC0415  (torch is slow to import)
    from kvstrata.models.locate import locate  # noqa: PLC0415
    from kvstrata.models.source import open_source  # noqa: PLC0415

    source = open_source(locate(config.model))
    try:
        return tuple(layout.payload_bytes for layout in block_layouts(source.config, config))
    finally:
        source.close()


def _first_tokens(
    config: EngineConfig, folder: Path, prompt: int
) -> tuple[dict[str, float], bool, dict[str, dict[str, int]]]:
    """Milliseconds to the first token by where the prefix is, whether answers agree, and what came whence."""
    disk = f"disk://{(folder / 'prompts').resolve()}?size=64GiB"
    rng = random.Random(0)
    prefix = [rng.choice(_IDS) for _ in range(prompt)]
    prompts = {
        name: prefix + [rng.choice(_IDS) for _ in range(_TAIL)]
        for name in ("cold", "pool", "ram", "disk_restart")
    }
    results: dict[str, RequestOutput] = {}
    with load(replace(config, tiers=(f"ram://?size={_ram_bytes(config, prompt)}", disk))) as llm:
        _ask(llm, [rng.choice(_IDS) for _ in range(64)])  # warm-up
        for name in ("cold", "pool", "ram"):
            if name == "ram":
                llm.engine.drain()
                llm.engine.reset_cache()
            results[name] = _ask(llm, prompts[name])
    from kvstrata.cli.bench.tier_moves import drop_page_cache  # noqa: PLC0415  (torch is slow to import)

    with load(replace(config, tiers=(disk,))) as llm:
        _ask(llm, [rng.choice(_IDS) for _ in range(64)])
        drop_page_cache(folder)
        results["disk_restart"] = _ask(llm, prompts["disk_restart"])
    with load(replace(config, tiers=(), prefix_caching=False, audit=0.0)) as llm:
        alone = {name: _ask(llm, ids) for name, ids in prompts.items()}
    return (
        {name: result.timings.ttft * 1e3 for name, result in results.items()},
        all(_said(results[name]) == _said(alone[name]) for name in prompts),
        {
            name: {source: count for source, count in result.usage.cached_by_source.items() if count}
            for name, result in results.items()
        },
    )


def _ram_bytes(config: EngineConfig, prompt: int) -> int:
    """Room for some such prompts."""
    blocks = 4 * (-(-prompt // config.block_size) + 16)
    return blocks * sum(payload + ALIGNMENT for payload in _payloads(config))


def _ask(llm: LLM, ids: list[int]) -> RequestOutput:
    params = SamplingParams(temperature=0.0, max_tokens=_ANSWER, ignore_eos=True, logprobs=1)
    return llm.generate([ids], params)[0]


def _said(result: RequestOutput) -> list[Any]:
    """Token ids and log-probabilities, to the bit."""
    answer = result.outputs[0]
    return [answer.token_ids, [{t: p.logprob.hex() for t, p in row.items()} for row in answer.logprobs or []]]


def _show(figures: Mapping[str, Any]) -> None:
    table = Table(
        "GB/s", title=f"{figures['bytes'] / 2**20:,.0f} MiB in blocks of {figures['block_bytes']:,} B"
    )
    for column in ("store", "of plain", "load", "of plain"):
        table.add_column(column, justify="right")
    for name, plain in (("ram", "memcpy"), ("disk", "plain")):
        table.add_row(
            name,
            f"{figures[f'{name}_store_gb_s']:.2f}",
            f"{figures[f'{name}_store_vs_{plain}']:.0%}",
            f"{figures[f'{name}_load_gb_s']:.2f}",
            f"{figures[f'{name}_load_vs_{plain}']:.0%}",
        )
    if "loopback_gb_s" in figures:
        table.add_row(
            "valkey",
            f"{figures['valkey_store_gb_s']:.2f}",
            f"{figures['valkey_store_vs_loopback']:.0%}",
            f"{figures['valkey_load_gb_s']:.2f}",
            f"{figures['valkey_load_vs_loopback']:.0%}",
        )
    stdout_console().print(table)
    first = Table("prefix is", "first token after, ms", title="time to the first token")
    for name, ms in figures["ttft_ms"].items():
        first.add_row(name.replace("_", ", after a "), f"{ms:,.1f}")
    stdout_console().print(first)
    stdout_console().print(
        f"answers as without a cache, to the bit: {'yes' if figures['identical'] else 'NO'}"
    )
