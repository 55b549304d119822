"""`kvstrata serve`: the OpenAI-compatible server."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import kvstrata
from kvstrata.cli import sources
from kvstrata.cli.loading import load
from kvstrata.cli.options import declared
from kvstrata.cli.output import JsonFlag, emit_json, stderr_console
from kvstrata.config import EngineConfig
from kvstrata.errors import ConfigError
from kvstrata.server.settings import ServerConfig

if TYPE_CHECKING:
    from kvstrata.server.keys import KeyRing

_ENGINE: Mapping[str, tuple[Any, str]] = {
    **declared(EngineConfig),
    "seed": (int | None, "Makes the draws of requests that bring no seed repeat."),
    "chat_template": (str | None, "FILE with a chat template that replaces the model's own."),
}
_SERVER: Mapping[str, tuple[Any, str]] = {
    "host": (str, "Address to listen on; others than this machine's own need keys or --insecure."),
    "port": (int, "Port to listen on; 0 takes a free one."),
    "served_model_name": (str | None, "The model's name in requests; by default the file's."),
    "insecure": (bool, "Let other machines in without API keys."),
    "api_key_file": (str | None, "File of API keys, NAME:KEY a line; KVSTRATA_API_KEYS adds to it."),
    "admin_key_file": (str | None, "File with the key for changing the cache; or KVSTRATA_ADMIN_KEY."),
    "metrics_key_file": (str | None, "File with a key that opens /metrics only; or KVSTRATA_METRICS_KEY."),
    "open_metrics": (bool, "Let everyone read /metrics, whatever keys there are."),
    "show_prefixes": (bool, "Tell the first words of the most used prompts in /v1/cache."),
    "share_cache": (bool, "Let API keys find each other's cached prompts."),
    "min_priority": (int | None, "Least priority that requests may ask for; 0 by default with API keys."),
    "tls_cert": (str | None, "Certificate chain, a PEM file: speak HTTPS."),
    "tls_key": (str | None, "The certificate's private key, a PEM file."),
    "max_body": (str, "Most bytes of a request, such as 4MiB."),
    "body_timeout": (float, "Seconds in which a request's body has to arrive."),
    "max_prompt_tokens": (int | None, "Most tokens of a prompt; by default what fits."),
    "max_n": (int, "Most answers that one request may ask for."),
    "max_queue": (int, "Most requests that wait beyond those that run."),
    "max_requests_per_key": (int | None, "Most requests that one API key may have open."),
    "drain_timeout": (float, "Seconds that running requests have to finish when the server is to stop."),
    "log_format": (str, "Format of the log, one line a request: json or logfmt."),
    "log_prompts": (bool, "Write prompts and answers to the log."),
    "otlp_endpoint": (str | None, "URL of an OpenTelemetry collector that gets a span for each request."),
}
_ALL = {**_ENGINE, **_SERVER}


def register(app: typer.Typer) -> None:
    """Declare the command."""
    app.command("serve")(_with_flags(serve))


def serve(
    given: dict[str, Any],
    config_file: Annotated[
        str | None, typer.Option("--config", help="TOML file of settings, named as the flags with _ for -.")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the settings as resolved, and end.")
    ] = False,
    json: JsonFlag = False,
) -> int:
    """Serve a model over HTTP, the way OpenAI's clients expect it.

    Every setting is a flag, an environment variable (KVSTRATA_KV_MEMORY for --kv-memory), or a line of the
    --config file; the first of these that has it counts. SIGTERM lets running requests finish.
    """
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"serving needs {package}, which is not installed: pip install 'kvstrata[server]'"
            )
    from kvstrata.server.keys import load_keys  # noqa: PLC0415  (an extra)

    defaults = {f.name: f.default for cls in (EngineConfig, ServerConfig) for f in fields(cls)}
    environment = sources.environment()
    path = config_file or environment.get("KVSTRATA_CONFIG")
    resolved = sources.resolve(
        {name: kind for name, (kind, _) in _ALL.items()},
        defaults,
        given,
        environment,
        {} if path is None else sources.read_file(path, _ALL),
    )
    _read_template(resolved)
    engine_config = sources.build(EngineConfig, resolved, _ENGINE)
    config = sources.build(ServerConfig, resolved, _SERVER)
    keys = load_keys(
        config.api_key_file,
        config.admin_key_file,
        environment.get("KVSTRATA_API_KEYS", ""),
        environment.get("KVSTRATA_ADMIN_KEY", ""),
        metrics_key_file=config.metrics_key_file,
        metrics_key=environment.get("KVSTRATA_METRICS_KEY", ""),
    )
    config.check_exposure(has_keys=keys.required)
    if config.otlp_endpoint is not None:
        from kvstrata.server.tracing import check_tracing  # noqa: PLC0415  (an extra)

        check_tracing()
    settings = {name: sources.masked(setting.value) for name, setting in resolved.items()}
    if print_config and json:
        emit_json({"settings": settings, "keys": keys.names})
        return 0
    _tell(resolved, settings, keys)
    if print_config:
        return 0

    from kvstrata.server.run import listen, run, url_of  # noqa: PLC0415  (loads torch)

    listener = listen(config)
    url = url_of(config, listener)
    llm = load(engine_config)

    def on_ready(model: str) -> None:
        stderr_console().print(f"serving {model} on {url}", soft_wrap=True)
        if json:
            emit_json({"url": url, "model": model, "pid": os.getpid(), "settings": settings})

    return run(llm, config, keys, listener, version=kvstrata.__version__, on_ready=on_ready)


def _read_template(resolved: dict[str, sources.Resolved]) -> None:
    """Put the template's text in the place of its file's name."""
    setting = resolved["chat_template"]
    if setting.value is None:
        return
    try:
        text = Path(setting.value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # a ValueError: no text, or no path can be so
        raise ConfigError(f"chat_template is {setting.value!r}; it cannot be read: {error}") from error
    resolved["chat_template"] = sources.Resolved(text, setting.source)


def _tell(resolved: Mapping[str, sources.Resolved], settings: Mapping[str, Any], keys: KeyRing) -> None:
    """Print the settings as resolved, those that were chosen with their source."""
    console = stderr_console()
    for name, setting in resolved.items():
        chosen = "" if setting.source == "default" else f"  ({setting.source})"
        shown = "(a text)" if name == "chat_template" and setting.value else settings[name]
        console.print(f"{name} = {shown}{chosen}", style="dim", soft_wrap=True)
    console.print(f"keys = {', '.join(keys.names) or 'none'}", style="dim", soft_wrap=True)


def _help(text: str, default: Any) -> str:
    """What a flag is for, with its default where the text does not tell and it is more than off."""
    if default is True:
        return f"{text} [on]"
    told = isinstance(default, str | int | float) and default is not False
    return f"{text} [{default}]" if told else text


def _with_flags(command: Callable[..., int]) -> Callable[..., int]:
    """Add a flag for every setting; those that are given reach the command as its first argument."""
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    ]
    defaults = {f.name: f.default for cls in (EngineConfig, ServerConfig) for f in fields(cls)}
    flags = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                kind | None,
                typer.Option(
                    sources.switch(name) if kind is bool else sources.flag(name),
                    help=_help(text, defaults[name]),
                ),
            ],
        )
        for name, (kind, text) in _ALL.items()
    ]

    @functools.wraps(command)
    def run(**given: Any) -> int:
        chosen = {name: given.pop(name) for name in _ALL}
        return command(chosen, **given)

    run.__signature__ = inspect.Signature([*flags, *own])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*flags, *own)}
    return run
