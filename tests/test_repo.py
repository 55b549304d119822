"""What keeps the repository easy to live in: sizes, leftovers, pins, and docs that name what exists."""

import ast
import re
import tomllib
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
REQUIRED_EXTRAS = {"demo", "server", "valkey", "plot", "transformers", "vllm", "test", "dev"}

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_source_file_is_one_idea_long(path: Path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_source_file_has_no_leftovers(path: Path):
    assert not re.search(r"\b(TODO|FIXME|XXX|breakpoint\(\)|pdb\.set_trace)", path.read_text())


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_source_file_never_unpickles(path: Path):
    """Files of weights are data: loading one must not run what it says."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & {"pickle", "dill", "shelve"}
        elif isinstance(node, ast.ImportFrom):
            assert node.module not in {"pickle", "dill", "shelve"}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) != ("torch", "load")


@pytest.mark.parametrize("path", SPOKEN, ids=relative)
def test_no_registry_host_is_named(path: Path):
    """Packages come from whatever index the machine is set up with."""
    hosts = r"(pypi\.org|pythonhosted\.org|download\.pytorch\.org|registry\.npmjs|conda\.anaconda)"
    assert not re.search(hosts, path.read_text())


@pytest.mark.parametrize("path", DOCS, ids=relative)
def test_make_targets_named_in_the_docs_exist(path: Path):
    named = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", path.read_text(), re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named <= targets


@pytest.mark.parametrize("path", DOCS, ids=relative)
def test_links_between_the_docs_lead_somewhere(path: Path):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", DOCS, ids=relative)
def test_commands_named_in_the_docs_exist(path: Path):
    named = set(re.findall(r"(?:^ {4}|^\$ |`|bin/|table: )kvstrata ([a-z]+)", path.read_text(), re.MULTILINE))
    assert named <= set(cli_app.COMMANDS)


@pytest.mark.parametrize("command", cli_app.COMMANDS)
def test_every_command_offers_json(command: str, capsys: pytest.CaptureFixture[str]):
    assert cli_app.main([command, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


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

    installed_by_make = ("server", "valkey", "plot", "transformers", "test", "dev")
    extras = PROJECT["optional-dependencies"]
    declared = [*PROJECT["dependencies"], *(line for extra in installed_by_make for line in extras[extra])]
    for requirement in map(Requirement, declared):
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement} has no pin: run make lock"
        assert requirement.specifier.contains(pin), f"{requirement} excludes {pin}: run make lock"
