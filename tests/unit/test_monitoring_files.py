"""Rules and dashboard ask for metrics that the code has, and the dashboard's file is the one that its script writes."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from rl_vlm.monitoring.ray_metrics import all_metrics
from rl_vlm.serving import follower as serving

FOLDER = Path(__file__).resolve().parents[2] / "cluster" / "monitoring"
DOCS = FOLDER.parents[1] / "docs" / "monitoring.md"
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
DASHBOARD = json.loads((FOLDER / "grafana_dashboard.json").read_text())
QUERIES = {
    (panel["title"], target["refId"]): target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", [])
}


def known() -> set[str]:
    """The names of all series as Prometheus sees them."""
    histograms = {f"{name}_{part}" for name in serving._HISTOGRAMS for part in ("bucket", "sum", "count")}
    replicas = {f"rl_vlm_{name}" for name in {*serving._GAUGES, *serving._COUNTERS, "errors_total"} | histograms}
    return {f"ray_{name}" for name in all_metrics() | replicas}


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dashboard", FOLDER / "dashboard.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("expr", [*QUERIES.values(), *(rule["expr"] for rule in RULES)])
def test_queries_name_metrics_that_exist(expr: str) -> None:
    named = set(re.findall(r"\bray_rl_vlm_[a-z0-9_]+", expr))
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    assert named <= known()
    assert set(re.findall(r"\brl_vlm:[a-z_]+", expr)) <= recorded
    assert named or "rl_vlm:" in expr or "ray_node_" in expr


def test_names_of_the_tag_name_are_logged() -> None:
    source = "".join(path.read_text() for path in (FOLDER.parents[1] / "rl_vlm").rglob("*.py"))
    for expr in (*QUERIES.values(), *(rule["expr"] for rule in RULES)):
        for name in re.findall(r'name="(\w+)"', expr):
            assert f'"{name}"' in source or f"/{name}" in source, name


def test_every_alert_says_what_to_do_and_is_in_the_docs_and_has_a_test() -> None:
    page, tests = DOCS.read_text(), (FOLDER / "alerts_test.yml").read_text()
    assert len(ALERTS) == 9
    for name, rule in ALERTS.items():
        assert len(rule["annotations"]["description"]) > 40 and rule["labels"]["severity"] in ("warning", "critical")
        assert f"`{name}`" in page, name
        assert f'alertname="{name}"' in tests, name
