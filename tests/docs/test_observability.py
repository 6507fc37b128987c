"""Dashboard and alert rules name only metrics that there are, Prometheus takes them, and the table of metrics is current."""

import json
import re
import runpy
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "observability"
DASHBOARD = json.loads((FOLDER / "penstock-dashboard.json").read_text())
RULES = yaml.safe_load((FOLDER / "penstock-alerts.yaml").read_text())["groups"][0]["rules"]
DASHBOARD_QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
QUERIES = DASHBOARD_QUERIES + [rule["expr"] for rule in RULES]
REFERENCE = runpy.run_path(str(ROOT / "tools" / "metrics_reference.py"))
METRICS = {name: (kind, labels) for name, kind, labels, _ in REFERENCE["metrics"]()}


def metric_of(name):
    """Give the metric of a series' name: a histogram has three series."""
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    return base if METRICS.get(base, ("", ()))[0] == "histogram" else name


def promtool(*arguments):
    done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("query", QUERIES)
def test_each_metric_and_its_labels_exist(query):
    names = re.findall(r"penstock_[a-z_]+", query)
    assert names
    for name in names:
        assert metric_of(name) in METRICS, name
    labels = {label for found in re.findall(r"{([^}]*)}", query) for label in re.findall(r"(\w+)[=!]", found)}
    labels |= {label.strip() for found in re.findall(r"by \(([^)]*)\)", query) for label in found.split(",")}
    known = {"instance", "le"} | {label for name in names for label in METRICS[metric_of(name)][1]}
    assert labels <= known, (labels - known, query)


def test_there_is_a_panel_or_an_alert_for_what_an_operator_must_know():
    named = {metric_of(name) for query in QUERIES for name in re.findall(r"penstock_[a-z_]+", query)}
    assert len(named) > 25
    assert len({panel["title"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"]) >= 15
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in RULES)


def test_every_alert_has_a_series_that_raises_it():
    tests = yaml.safe_load((FOLDER / "penstock-alerts-test.yaml").read_text())["tests"]
    raised = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert raised == {rule["alert"] for rule in RULES}


def test_the_page_and_the_rules_raise_the_same_alerts_but_for_those_that_are_named():
    section = (ROOT / "docs" / "operations.md").read_text().partition("### Alerts")[2].partition("\n##")[0]
    rows = [
        [cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"(?m)^\| .*$", section)
    ]
    rules = re.findall(r"Penstock\w+", section)
    assert sorted(rules) == sorted(rule["alert"] for rule in RULES)
    source = (ROOT / "src" / "penstock" / "frontend" / "watch" / "snapshot.py").read_text()
    # One kind of alert for each name that a key begins with: key=f"worker ...", _error("no-worker", ...).
    kinds = set(re.findall(r'(?:key=|_error\(|_warning\(\s*)f?"([a-z-]+)', source))
    assert {kind for row in rows for kind in re.findall(r"`([a-z-]+)`", row[0])} == kinds


@pytest.mark.needs("promtool")
def test_prometheus_takes_the_rules_and_they_raise_what_they_should():
    promtool("check", "rules", "penstock-alerts.yaml")
    promtool("test", "rules", "penstock-alerts-test.yaml")
    promtool("check", "config", "prometheus.yaml")


@pytest.mark.needs("promtool")
def test_prometheus_takes_every_query_of_the_dashboard(tmp_path):
    rules = [
        {
            "record": f"panel:{index}",
            "expr": query.replace("$__rate_interval", "5m")
            .replace("$instance", ".*")
            .replace("$model", ".*"),
        }
        for index, query in enumerate(DASHBOARD_QUERIES)
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(file))


def test_the_table_of_metrics_is_current():
    assert REFERENCE["PAGE"].read_text() == REFERENCE["page"](), "run python tools/metrics_reference.py"
