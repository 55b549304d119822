"""What keeps the repository easy to live in: sizes, leftovers, pins, and docs that name what exists."""

import ast
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvstrata.cli import app as cli_app

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
DOCS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
SPOKEN = [*SOURCES, *DOCS, *sorted((ROOT / "scripts").iterdir()), ROOT / "Makefile", ROOT / "pyproject.toml"]
MAX_LINES = 450
PICKLERS = {"pickle", "_pickle", "dill", "cloudpickle", "shelve"}
REQUIRED_EXTRAS = {
    *("demo", "server", "otel", "valkey", "cluster", "plot", "transformers", "vllm", "test", "dev")
}

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def offenders(paths: list[Path], offends: Callable[[Path], object]) -> dict[str, object]:
    """The files that break a rule, with what breaks it."""
    found = {path.relative_to(ROOT).as_posix(): offends(path) for path in paths}
    return {name: what for name, what in found.items() if what}


def matches(pattern: str, flags: int = 0) -> Callable[[Path], object]:
    return lambda path: re.findall(pattern, path.read_text(), flags)


def test_source_files_are_one_idea_long():
    assert offenders(SOURCES, lambda path: len(path.read_text().splitlines()) > MAX_LINES) == {}


def test_source_files_have_no_leftovers():
    assert offenders(SOURCES, matches(r"\b(?:TODO|FIXME|XXX|breakpoint\(\)|pdb\.set_trace)")) == {}


def unpickles(source: str) -> list[str]:
    """What in a module could run code that a file of weights carries."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in PICKLERS]
        elif isinstance(node, ast.ImportFrom) and node.module in PICKLERS:
            found.append(node.module)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in {"torch.load", "torch.jit.load"}:
            found.append(ast.unparse(node))
    return found


def test_source_files_never_unpickle():
    assert offenders(SOURCES, lambda path: unpickles(path.read_text())) == {}
    assert unpickles("import torch\nstate = torch.load(path)") == ["torch.load"]
    assert unpickles("from pickle import loads") == ["pickle"]


def test_no_registry_host_is_named():
    """Packages come from whatever index the machine is set up with."""
    hosts = r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|registry\.npmjs|conda\.anaconda"
    assert offenders(SPOKEN, matches(hosts)) == {}


def test_make_targets_named_in_the_docs_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = matches(r"(?:^ {4}|^|`)make ([a-z][a-z-]*)", re.MULTILINE)
    assert offenders(DOCS, lambda path: set(named(path)) - targets) == {}


def test_commands_named_in_the_docs_exist():
    named = matches(r"(?:^ {4}|^\$ |`|bin/|table: )kvstrata ([a-z]+)", re.MULTILINE)
    assert offenders(DOCS, lambda path: set(named(path)) - set(cli_app.COMMANDS)) == {}


def test_links_between_the_docs_lead_somewhere():
    def broken(path: Path) -> list[str]:
        targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
        return [target for target in targets if not (path.parent / target).exists()]

    assert offenders(DOCS, broken) == {}


@pytest.mark.parametrize("command", cli_app.COMMANDS)
def test_every_command_offers_json(command: str, capsys: pytest.CaptureFixture[str]):
    waiting = [[command]]
    while waiting:
        words = waiting.pop()
        assert cli_app.main([*words, "--help"]) == 0
        text = capsys.readouterr().out
        below = re.findall(r"^  (\S+)", text.partition("\nCommands:\n")[2], re.MULTILINE)
        if below:
            waiting.extend([*words, name] for name in below)
        else:
            assert "--json" in text, " ".join(words)


def test_extras_are_those_promised():
    assert set(PROJECT["optional-dependencies"]) == REQUIRED_EXTRAS


def test_tested_versions_lie_within_the_declared_ranges():
    pins = {}
    for line in (ROOT / "requirements" / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[canonicalize_name(name)] = version
    torch = re.search(r"^TORCH_SPEC \?= torch==(\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert torch is not None
    pins[canonicalize_name("torch")] = torch[1]

    installed_by_make = ("server", "otel", "valkey", "plot", "transformers", "test", "dev")
    extras = PROJECT["optional-dependencies"]
    declared = [*PROJECT["dependencies"], *(line for extra in installed_by_make for line in extras[extra])]
    for requirement in map(Requirement, declared):
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement} has no pin: run make lock"
        assert requirement.specifier.contains(pin), f"{requirement} excludes {pin}: run make lock"
