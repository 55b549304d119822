"""Tables in the docs are replaced by what their commands print, and nothing else in the text changes."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

TEXT = """# Paging

Before.

<!-- table: kvstrata bench paging --json -->
old
<!-- end table -->

Between.

<!-- table: kvstrata bench linear --json -->
<!-- end table -->
After.
"""


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_marked_table_is_replaced_by_its_commands_figures(tables: ModuleType, monkeypatch):
    monkeypatch.setattr(tables, "provenance", lambda: "Measured.")
    results = {
        "kvstrata bench paging --json": {
            "paged": {"concurrency": 19.46, "total_tok_s": 1234.5},
            "reserved": {"concurrency": 4.0, "waste": None},
        },
        "kvstrata bench linear --json": {"rows": 12345, "shares": [0.5, 0.25]},
    }
    updated = tables.rewrite(TEXT, results.__getitem__)
    assert "old" not in updated
    assert "|  | concurrency | total_tok_s | waste |" in updated
    assert "| paged | 19.5 | 1,234 |  |" in updated
    assert "| reserved | 4 |  |  |" in updated
    assert "| rows | 12,345 |" in updated
    assert "| shares | 0.5, 0.25 |" in updated
    assert updated.startswith("# Paging\n\nBefore.\n\n<!-- table: kvstrata bench paging --json -->\n")
    assert "<!-- end table -->\n\nBetween.\n\n<!--" in updated
    assert updated.endswith("<!-- end table -->\nAfter.\n")
    assert tables.rewrite(updated, results.__getitem__) == updated


def test_objects_without_a_name_in_common_make_tables_of_their_own(tables: ModuleType):
    result = {"shares": {"bf16": {"512": 0.5}, "fp32": {"512": 0.25}}, "decode": {"ms": 2.0}}
    assert tables.render(result) == (
        "|  | 512 |\n| --- | --- |\n| shares bf16 | 0.5 |\n| shares fp32 | 0.25 |\n\n"
        "|  | ms |\n| --- | --- |\n| decode | 2 |\n"
    )


def test_a_command_that_is_not_ours_is_not_run(tables: ModuleType):
    with pytest.raises(SystemExit, match="must be kvstrata"):
        tables.run("rm -rf /nonexistent")
