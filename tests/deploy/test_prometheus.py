"""What is deployed beside the server fits it: every metric that dashboard, alerts and docs name is there."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from leased import MemoryLeases, SharedTier
from metric_text import scrape
from promtool import promtool
from served import toy_server

from kvstrata.tiers.tier import ServerUsage, TierUsage

REPOSITORY = Path(__file__).resolve().parents[2]
PROMETHEUS = REPOSITORY / "deploy" / "prometheus"
DASHBOARD = REPOSITORY / "deploy" / "grafana" / "kvstrata.json"
NAME = re.compile(r"\b(?:kvstrata:|process_)[a-z0-9_]+\b")
SUFFIXES = ("_bucket", "_count", "_sum")


class OfServers(SharedTier):
    """A tier with leases that says that it is on a server."""

    def usage(self) -> TierUsage:
        server = ServerUsage("cache-1:6379", "closed", 0, 0, 0.0, 0, 0.0, 0, 0.0, 0, 0, Counter())
        return replace(super().usage(), servers=(server,))


@pytest.fixture(scope="module")
def told() -> set[str]:
    """Names of all samples of a server with a tier."""
    with toy_server(tiers=lambda context, clock: [OfServers(context, clock, MemoryLeases(clock))]) as server:
        server.post(prompt="abc", max_tokens=1)
        names = {name for name, _ in scrape(server)}
    return {name if name.startswith("process_") else f"kvstrata:{name}" for name in names}


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def test_every_metric_of_the_dashboard_is_told(told: set[str]):
    named = {name for text in expressions(json.loads(DASHBOARD.read_text())) for name in NAME.findall(text)}
    assert len(named) > 30
    assert named - told == set()


@pytest.mark.parametrize("kind", ["tier_server_", "lease_", "refreshes_", "spec_decode_"])
def test_the_dashboard_shows_all_of_a_kind_that_is_told(told: set[str], kind: str):
    named = {name for text in expressions(json.loads(DASHBOARD.read_text())) for name in NAME.findall(text)}
    of_kind = {name for name in told if name.startswith(f"kvstrata:{kind}")}
    assert of_kind
    assert of_kind - named == set()


@pytest.mark.parametrize("file", ["alerts.yml", "alerts_test.yml"])
def test_every_metric_of_the_alerts_is_told(told: set[str], file: str):
    named = set(NAME.findall((PROMETHEUS / file).read_text()))
    assert len(named) > 8
    assert named - told == set()


def test_every_metric_is_in_the_docs_and_every_one_there_is_told(told: set[str]):
    text = (REPOSITORY / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"`(kvstrata:[a-z0-9_]+)", text))
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in told if name.startswith("kvstrata:")}
    assert families - documented == set()
    assert documented - families == set()


def test_panels_of_the_dashboard_do_not_overlap_and_each_has_its_source():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        grid = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${datasource}"


def check(*arguments: str) -> None:
    done = subprocess.run(
        [promtool(), *arguments], cwd=PROMETHEUS, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_the_configuration_and_the_alerts():
    check("check", "config", "prometheus.yml")
    check("check", "rules", "alerts.yml")


def test_alerts_fire_when_they_should_and_only_then():
    check("test", "rules", "alerts_test.yml")


def test_every_alert_has_a_test():
    alerts = set(re.findall(r"alert: (\w+)", (PROMETHEUS / "alerts.yml").read_text()))
    tested = set(re.findall(r"alertname: (\w+)", (PROMETHEUS / "alerts_test.yml").read_text()))
    assert alerts == tested


def test_promtool_takes_every_expression_of_the_dashboard(tmp_path: Path):
    known = {"[$__rate_interval]": "[5m]", "$instance": ".*"}
    rules = []
    for number, text in enumerate(expressions(json.loads(DASHBOARD.read_text()))):
        filled = text
        for variable, stand_in in known.items():
            filled = filled.replace(variable, stand_in)
        rules.append({"record": f"panel:{number}", "expr": filled})
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    check("check", "rules", str(tmp_path / "rules.yml"))


def test_promtool_takes_what_the_server_tells(told: set[str]):
    with toy_server() as server, server.client() as client:
        text = client.get("/metrics").text
    done = subprocess.run(
        [promtool(), "check", "metrics"], input=text, capture_output=True, text=True, check=False, timeout=60
    )
    # Names and units follow vLLM's and ours; what counts is that all of it parses.
    assert "error while linting" not in done.stderr, done.stderr
