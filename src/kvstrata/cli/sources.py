"""Settings from flags, the environment and a file: the first of them that has a setting counts."""

from __future__ import annotations

import os
import re
import tomllib
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import typer

from kvstrata.cache.retention import Retention
from kvstrata.cli.options import option_name
from kvstrata.errors import ConfigError

Source = Literal["flag", "environment", "file", "default"]
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
# What in an address is nobody's business: a name and password before @, and secret options.
_SECRETS = (
    (re.compile(r"(?<=://)[^/@\s]*@"), "***@"),
    (re.compile(r"([?&][a-z_]*(?:password|secret|key|token)[a-z_]*=)[^&\s]*"), r"\1***"),
)


@dataclass(frozen=True)
class Resolved:
    """A setting's value and where it comes from."""

    value: Any
    source: Source


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return f"KVSTRATA_{name.upper()}"


def flag(name: str) -> str:
    """The command line's option of a setting."""
    return f"--{option_name(name)}"


def switch(name: str) -> str:
    """The command line's pair of options of a setting that is true or false."""
    return f"{flag(name)}/--no-{option_name(name)}"


def resolve(
    kinds: Mapping[str, Any],
    defaults: Mapping[str, Any],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Mapping[str, Any],
) -> dict[str, Resolved]:
    """Each setting from the first source that has it. kinds: types by name; flags: None where not given.

    Raises ConfigError naming the variable, or the setting in the file, whose value has another type.
    """
    resolved: dict[str, Resolved] = {}
    for name, kind in kinds.items():
        if flags.get(name) not in (None, []):  # an option that can be given several times is a list
            resolved[name] = Resolved(flags[name], "flag")
        elif variable(name) in environment:
            resolved[name] = Resolved(_from_text(name, kind, environment[variable(name)]), "environment")
        elif name in file:
            resolved[name] = Resolved(_from_file(name, kind, file[name]), "file")
        else:
            resolved[name] = Resolved(defaults[name], "default")
    return resolved


def read_file(path: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a TOML file. Raises ConfigError where it is none, and for names that are not known."""
    try:
        with open(path, "rb") as file:
            settings = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"config is {path!r}; it cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also numbers too long for Python, and endless brackets
        raise ConfigError(f"config is {path!r}; it is no TOML: {error}") from error
    for name in settings:
        if name not in known:
            raise ConfigError(f"config {path!r} sets {name!r}; the settings are {', '.join(known)}")
    return settings


def build(cls: type, resolved: Mapping[str, Resolved], names: Mapping[str, Any]) -> Any:
    """An object of a settings class; what it refuses is told in the words of the setting's source.

    Raises typer.BadParameter for a flag, ConfigError for the rest.
    """
    try:
        if "retention" in names:
            Retention.parse(resolved["retention"].value)
        return cls(**{name: resolved[name].value for name in names})
    except ConfigError as error:
        message = str(error)
        name = next((name for name in names if message.startswith(f"{name} ")), None)
        if name is None:
            raise
        rest = message.removeprefix(name)
        match resolved[name].source:
            case "flag":
                raise typer.BadParameter(f"{flag(name)}{rest}") from None
            case "environment":
                raise ConfigError(f"{variable(name)}{rest}") from error
            case _:
                raise


def masked(value: Any) -> Any:
    """A setting's value without the secrets that an address can hold."""
    if isinstance(value, list | tuple):
        return [masked(entry) for entry in value]
    if isinstance(value, str):
        for pattern, instead in _SECRETS:
            value = pattern.sub(instead, value)
    return value


def environment() -> Mapping[str, str]:
    """The variables of this process."""
    return os.environ


def _plain(kind: Any) -> Any:
    """The type without None."""
    if get_origin(kind) is types.UnionType:
        return next(part for part in get_args(kind) if part is not type(None))
    return kind


def _from_text(name: str, kind: Any, text: str) -> Any:
    plain = _plain(kind)
    if plain is bool:
        if text.lower() not in (*_TRUE, *_FALSE):
            raise ConfigError(f"{variable(name)} is {text!r}; say true or false")
        return text.lower() in _TRUE
    if get_origin(plain) is list:
        return text.split()
    try:
        return plain(text)
    except ValueError:
        raise ConfigError(
            f"{variable(name)} is {text!r}; it must be {'a whole ' if plain is int else 'a '}number"
        ) from None


def _from_file(name: str, kind: Any, value: Any) -> Any:
    plain = _plain(kind)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if get_origin(plain) is list:
        if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
            return value
        raise ConfigError(f"{name} is {value!r}; it must be a list of texts")
    if plain is str and isinstance(value, int) and is_number:
        return str(value)
    if (plain is float and is_number) or type(value) is plain:
        return value
    words = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
    raise ConfigError(f"{name} is {value!r}; it must be {words[plain]}")
