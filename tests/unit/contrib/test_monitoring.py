"""Alert rules and dashboard ask for metrics and labels that selasticd exports."""

import json
import re
import subprocess

import pytest

from contrib.generate import ROOT
from slurm_elastic.controller.metrics import metric_definitions as metrics
from tests.support.needs import needs

PROMETHEUS = ROOT / "contrib" / "prometheus"
RULES, RULE_TEST = (PROMETHEUS / f"slurm-elastic.{kind}.yml" for kind in ("rules", "test"))
DASHBOARD = ROOT / "contrib" / "grafana" / "dashboards" / "slurm-elastic.json"
#: Labels that Prometheus itself adds, and that of a histogram's buckets.
OTHER_LABELS = {"job", "instance", "le"}


def exported():
    """Return the labels of each series that selasticd exports."""
    series = {"selastic_build_info": {"version", "reader"}}
    for metric in (*metrics.ALWAYS, *metrics.OF_CLUSTER, *metrics.COUNTED):
        ends = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        series |= {metric.full_name + end: set(metric.labels) for end in ends}
    return series


def queries():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def names(text):
    return set(re.findall(r"selastic_\w+", text))


@pytest.mark.parametrize("path", [RULES, RULE_TEST, DASHBOARD], ids=lambda p: p.name)
def test_each_metric_that_is_asked_for_is_exported(path):
    assert names(path.read_text()) - exported().keys() == set()


@pytest.mark.parametrize("path", [RULES, RULE_TEST], ids=lambda p: p.name)
def test_rules_select_labels_that_the_metric_has(path):
    check_labels(path.read_text())


def test_each_query_selects_labels_that_the_metric_has():
    for query in queries():
        check_labels(query)


def check_labels(text):
    for name, selectors in re.findall(r"(selastic_\w+)\{([^}]*)\}", text):
        labels = set(re.findall(r"(\w+)\s*(?:=|!=|=~|!~)\s*\"", selectors))
        assert labels - exported()[name] - OTHER_LABELS == set(), name


def test_each_metric_is_on_the_dashboard():
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in names(DASHBOARD.read_text())}
    defined = {m.full_name for m in (*metrics.ALWAYS, *metrics.OF_CLUSTER, *metrics.COUNTED)}
    assert defined - shown == set()


def test_each_panel_has_a_place_of_its_own():
    taken = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert taken.isdisjoint(cells), panel["title"]
        taken |= cells


@needs("promtool")
def test_each_alert_fires_when_it_shall_and_only_then():
    for command in (("check", "rules", RULES.name), ("test", "rules", RULE_TEST.name)):
        done = subprocess.run(
            ["promtool", *command], cwd=PROMETHEUS, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_test():
    alerts = set(re.findall(r"alert: (\w+)", RULES.read_text()))
    assert alerts
    assert alerts == set(re.findall(r"alertname: (\w+)", RULE_TEST.read_text()))
