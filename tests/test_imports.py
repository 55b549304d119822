"""The house's arrows point one way, and importing kvstrata costs only what everyone needs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstrata

PACKAGE = Path(kvstrata.__file__).parent

BELOW_ENGINE = {"cache", "models", "tiers", "kernels"}
# What each part may import of the others. Every part may import errors and config besides.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "config": set(),
    "kernels": set(),
    "cache": {"kernels"},
    "models": {"kernels"},
    "tiers": {"cache", "kernels"},
    "planner": {"cache"},
    "engine": BELOW_ENGINE,
    "server": {"engine"} | BELOW_ENGINE,
    "integrations": {"engine"} | BELOW_ENGINE,
    "cli": {"__init__", "engine", "planner", "server", "integrations"} | BELOW_ENGINE,
    "__init__": {"engine"} | BELOW_ENGINE,
    "__main__": {"cli"},
}
FREE_FOR_ALL = {"errors", "config"}
# Extras: whoever does not use them need not have them.
OPTIONAL = ("transformers", "vllm", "matplotlib", "fastapi", "uvicorn", "prometheus_client", "valkey")
USES_OPTIONAL = ("kvstrata.server", "kvstrata.integrations", "kvstrata.tiers.valkey")


def part_of(module: str) -> str:
    """The part of the house that a dotted kvstrata module belongs to."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def imported_modules(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Absolute dotted names of the kvstrata modules that a syntax tree imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "kvstrata")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = module.split(".") if is_package else module.split(".")[:-1]
                anchor = anchor[: len(anchor) - (node.level - 1)]
                base = ".".join([*anchor, *([base] if base else [])])
            if base == "kvstrata":  # `from kvstrata import cache` names a part, `import __version__` the root
                parts = {alias.name for alias in node.names}
                yield from (f"kvstrata.{name}" if name in ARROWS else "kvstrata" for name in parts)
            elif base.startswith("kvstrata."):
                yield base


def forbidden_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """The imports in a module's source that go against the arrows."""
    part = part_of(module)
    allowed = ARROWS[part] | FREE_FOR_ALL | {part} if part != "errors" else {"errors"}
    return [
        imported
        for imported in imported_modules(ast.parse(source), module, is_package)
        if part_of(imported) not in allowed
    ]


def source_modules() -> list[tuple[str, Path]]:
    """Every module of the package, as dotted name and file."""
    modules = []
    for path in sorted(PACKAGE.rglob("*.py")):
        names = ["kvstrata", *path.relative_to(PACKAGE).with_suffix("").parts]
        if names[-1] == "__init__" and len(names) > 2:
            names.pop()
        modules.append((".".join(names), path))
    return modules


def test_every_module_has_its_place_in_the_house():
    assert {part_of(module) for module, _ in source_modules()} <= set(ARROWS)


def test_modules_import_only_along_the_arrows():
    against = {
        module: forbidden_imports(path.read_text(), module, path.name == "__init__.py")
        for module, path in source_modules()
    }
    assert {module: found for module, found in against.items() if found} == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvstrata.cache.pool", "from kvstrata.models.config import DecoderConfig"),
        ("kvstrata.cache.pool", "import kvstrata.engine.request"),
        ("kvstrata.cache.pool", "from kvstrata import tiers"),
        ("kvstrata.cache.pool", "from ..models import config"),
        ("kvstrata.cache.pool", "def late():\n    from kvstrata.tiers import ram"),
        ("kvstrata.models.decoder", "from kvstrata.cache.layout import BlockLayout"),
        ("kvstrata.engine.runner", "from kvstrata.cli.output import emit_json"),
        ("kvstrata.kernels.reference", "from kvstrata.models.batch import ForwardBatch"),
        ("kvstrata.errors", "from kvstrata.config import EngineConfig"),
    ],
)
def test_an_import_against_the_arrows_is_found(module: str, source: str):
    assert forbidden_imports(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "kvstrata.cache.pool",
            "from kvstrata.errors import ConfigError\nfrom kvstrata.cache.keys import chain",
        ),
        ("kvstrata.cache.pool", "from .keys import chain"),
        ("kvstrata.engine.runner", "from kvstrata.models.batch import ForwardBatch"),
        ("kvstrata.cli.size", "from kvstrata import __version__\nimport kvstrata.engine.llm"),
    ],
)
def test_an_import_along_the_arrows_is_allowed(module: str, source: str):
    assert forbidden_imports(source, module) == []


def loaded_by(imports: str) -> set[str]:
    """Top-level modules that a new process has loaded after running some imports."""
    script = f"import sys\n{imports}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True, timeout=120
    )
    return set(done.stdout.split())


def test_importing_kvstrata_needs_no_extra_package():
    assert loaded_by("from kvstrata import *").isdisjoint(OPTIONAL)


def test_no_module_outside_its_user_loads_an_extra_package():
    names = [
        name
        for name, _ in source_modules()
        if not name.startswith(USES_OPTIONAL) and not name.endswith("__main__")
    ]
    imports = "\n".join(f"import {name}" for name in names if not name.endswith("__init__"))
    assert loaded_by(imports).isdisjoint(OPTIONAL)
