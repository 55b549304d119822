"""`kvstrata size`: how much memory a model's KV cache takes, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli.output import JsonFlag, emit_json, stdout_console
from kvstrata.config import layers_of, parse_bytes, parse_layers
from kvstrata.errors import ConfigError

if TYPE_CHECKING:
    from kvstrata.cache.shapes import CacheShape
    from kvstrata.cache.sizing import CacheSize, KindSize
    from kvstrata.cli.size_source import SizeSource

DEFAULT_LENGTH = 4096
KV_DTYPE_SYNONYMS = {"fp8": "fp8_e4m3"}
KIND_NAMES = {
    "full": "full attention",
    "window": "sliding window",
    "latent": "latent (MLA)",
    "linear": "linear attention",
    "shared": "shares an earlier layer's",
}

_PER_LAYER = ("bytes a token", "a sequence")


def register(app: typer.Typer) -> None:
    """Declare the command."""
    app.command("size")(size)


def size(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_CONFIG",
            help="A config.json, a model folder, a GGUF file, or the name of an installed model.",
        ),
    ],
    *,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    length: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Tokens a sequence. Default: {DEFAULT_LENGTH}, or the model's most if less."
        ),
    ] = None,
    kv_dtype: Annotated[
        str, typer.Option(help="Format of K and V: fp32, fp16, bf16, fp8, int8, int4.")
    ] = "bf16",
    kv_dtype_skip_layers: Annotated[
        str, typer.Option(help="Layers kept in --kv-dtype-skipped, such as 0,1,-1; negative from the end.")
    ] = "",
    kv_dtype_skipped: Annotated[str, typer.Option(help="Format of those layers.")] = "bf16",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a block of the pool.")] = 16,
    memory: Annotated[str, typer.Option(help="Memory for the cache, such as 16GiB.")] = "16GiB",
    weights_dtype: Annotated[
        str, typer.Option(help="Format of the weights: auto, fp32, bf16, fp16, fp8, int8, mxfp4, int4.")
    ] = "auto",
    json: JsonFlag = False,
) -> None:
    """Size a model's KV cache from its configuration; no weights are read."""
    from kvstrata.cache.formats import FORMATS, format_named, is_higher  # noqa: PLC0415
    from kvstrata.cache.shapes import cache_shape  # noqa: PLC0415
    from kvstrata.cache.sizing import cache_size  # noqa: PLC0415
    from kvstrata.cli.size_source import read_size_source  # noqa: PLC0415

    try:
        fmt = format_named(KV_DTYPE_SYNONYMS.get(kv_dtype, kv_dtype))
        skipped = format_named(KV_DTYPE_SYNONYMS.get(kv_dtype_skipped, kv_dtype_skipped))
        layers = parse_layers(kv_dtype_skip_layers)
        memory_bytes = parse_bytes(memory, "memory")
        source = read_size_source(model)
        source.weights(weights_dtype)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    shape = cache_shape(source.config)
    apart = layers_of(layers, len(shape.layers))
    tokens = length or min(DEFAULT_LENGTH, shape.max_position or DEFAULT_LENGTH)
    sizes = [
        cache_size(
            shape,
            other,
            length=tokens,
            batch=batch,
            block_size=block_size,
            others=dict.fromkeys(apart if is_higher(skipped.name, other.name) else (), skipped),
        )
        for other in (fmt, *(f for f in FORMATS.values() if f.name != fmt.name))
    ]
    result = _result(source, shape, sizes, memory_bytes, weights_dtype)
    if json:
        emit_json(result)
    else:
        _print(result)


def _result(
    source: SizeSource, shape: CacheShape, sizes: list[CacheSize], memory_bytes: int, weights_dtype: str
) -> dict[str, Any]:
    from kvstrata.cache.formula import sequence_formula  # noqa: PLC0415

    chosen = sizes[0]
    weights, weights_format, origin = source.weights(weights_dtype)
    notes = list(shape.notes)
    if shape.max_position is not None and chosen.length > shape.max_position:
        notes.append(f"length {chosen.length:,} is past the model's most, {shape.max_position:,}")
    if weights is None:
        notes.append(f"weights cannot be estimated: {origin}")
    return {
        "model": str(source.path),
        "model_type": shape.model_type,
        "batch": chosen.batch,
        "length": chosen.length,
        "kv_dtype": chosen.format.name,
        "block_size": chosen.block_size,
        "formula": sequence_formula(chosen),
        "bytes_per_token": chosen.bytes_per_token,
        "bytes_per_token_past_windows": chosen.bytes_per_token_past_windows,
        "state_bytes_per_sequence": chosen.state_bytes,
        "bytes_per_sequence": chosen.bytes_per_sequence,
        "total_bytes": chosen.total_bytes,
        "allocated_bytes_per_sequence": chosen.allocated_bytes_per_sequence,
        "allocated_bytes": chosen.allocated_bytes,
        "memory_bytes": memory_bytes,
        "sequences_that_fit": chosen.sequences_that_fit(memory_bytes),
        "sequences_that_fit_beside_weights": (
            None if weights is None else chosen.sequences_that_fit(memory_bytes - weights)
        ),
        "mha_bytes_per_sequence": chosen.mha_bytes_per_sequence,
        "mha_factor": chosen.mha_factor,
        "parameters": source.parameter_count(),
        "weights_bytes": weights,
        "weights_dtype": weights_format,
        "weights_source": origin if weights is not None else None,
        "layers": [_layers(size) for size in chosen.kinds],
        "formats": [
            {
                "kv_dtype": other.format.name,
                "bytes_per_token": other.bytes_per_token,
                "bytes_per_sequence": other.bytes_per_sequence,
                "total_bytes": other.total_bytes,
                "sequences_that_fit": other.sequences_that_fit(memory_bytes),
            }
            for other in sizes
        ],
        "notes": notes,
    }


def _layers(size: KindSize) -> dict[str, Any]:
    return {
        "kind": size.layer.kind,
        "kv_dtype": size.format.name,
        "num_layers": size.num_layers,
        "window": size.layer.window,
        "vectors_per_token": [{"count": v.count, "dim": v.dim} for v in size.layer.vectors],
        "bytes_per_token": size.bytes_per_token,
        "kept_tokens": size.kept_tokens,
        "state_bytes": size.state_bytes,
        "bytes_per_sequence": size.bytes_per_sequence,
        "allocated_bytes_per_sequence": size.allocated_bytes,
    }


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table  # noqa: PLC0415

    console = stdout_console()
    console.print(f"{result['model_type']}: {result['model']}", soft_wrap=True)
    total = f"({_unit(result['total_bytes'])}) in {result['kv_dtype']}"
    console.print(f"\n{result['formula']} {total}\n", soft_wrap=True)

    mixed = len({kind["kv_dtype"] for kind in result["layers"]}) > 1
    layers = Table(title="Layers", title_justify="left")
    for name in ("kind", *(["format"] if mixed else []), "layers", "window", "vectors a token", *_PER_LAYER):
        layers.add_column(name, justify="left" if name in {"kind", "format"} else "right")
    for kind in result["layers"]:
        vectors = " + ".join(f"{v['count']} x {v['dim']}" for v in kind["vectors_per_token"])
        layers.add_row(
            KIND_NAMES[kind["kind"]],
            *([kind["kv_dtype"]] if mixed else []),
            str(kind["num_layers"]),
            f"{kind['window']:,}" if kind["window"] else "",
            vectors or "none",
            f"{kind['bytes_per_token']:,}",
            _unit(kind["bytes_per_sequence"]),
        )
    console.print(layers)

    formats = Table(title=f"Formats, {result['batch']:,} x {result['length']:,} tokens", title_justify="left")
    memory = _unit(result["memory_bytes"])
    for name in ("KV format", "bytes a token", "a sequence", "total", f"sequences in {memory}"):
        formats.add_column(name, justify="left" if name == "KV format" else "right")
    for row in result["formats"]:
        formats.add_row(
            row["kv_dtype"],
            f"{row['bytes_per_token']:,}",
            _unit(row["bytes_per_sequence"]),
            _unit(row["total_bytes"]),
            f"{row['sequences_that_fit']:,}",
        )
    console.print(formats)

    console.print(
        f"Saved against MHA over all tokens: {result['mha_factor']:.2f} times "
        f"({_unit(result['mha_bytes_per_sequence'])} a sequence)"
    )
    console.print(
        f"In blocks of {result['block_size']} tokens the pool allocates {result['allocated_bytes']:,} bytes "
        f"({_unit(result['allocated_bytes'])})"
    )
    if result["weights_bytes"] is not None:
        console.print(
            f"Weights: {_unit(result['weights_bytes'])} ({result['weights_dtype']}, from the "
            f"{'file' if result['weights_source'] == 'file' else 'configuration'}), cache: "
            f"{_unit(result['total_bytes'])}; beside the weights, {memory} holds "
            f"{result['sequences_that_fit_beside_weights']:,} sequences"
        )
    for note in result["notes"]:
        console.print(f"Note: {note}")


def _unit(size: int) -> str:
    """Bytes in the largest binary unit that leaves at least one, to two places."""
    value, units = float(size), ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:,.2f}".rstrip("0").rstrip(".") + f" {units[0]}"
