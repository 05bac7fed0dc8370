"""Observation of nodes that could sleep: counted, kept, and never written to Slurm."""

import dataclasses

import pytest

from slurm_elastic.config.schema import Config, SleepSettings
from slurm_elastic.controller.queries import round_answers
from slurm_elastic.controller.queries.view import View, Viewer
from slurm_elastic.controller.sleep.sleep_control import SleepControl
from slurm_elastic.controller.sleep.sleep_record import BIN_S, SleepBin, SleepRecord
from slurm_elastic.core.plan import Plan
from tests.support.decisions.synthetic_clusters import Cluster, node

DAY0 = 1_700_000_400 // BIN_S * BIN_S


class Log:
    def __init__(self):
        self.lines = []

    def info(self, line):
        self.lines.append(line)


class Kept(dict):
    def put(self, name, value):
        self[name] = value


def snapshot(at, *busy):
    c = Cluster([node(f"a{i}", 4, "a100") for i in range(10)])
    for number, name in enumerate(busy):
        c.add(number + 1, on={name: 4})
    nodes = [
        dataclasses.replace(n, used_gpus=4, state="ALLOCATED") if n.name in busy else n
        for n in c.nodes
    ]
    return dataclasses.replace(c.snapshot(), nodes=tuple(nodes), time=float(at))


def observer(ledger=None, **settings):
    return control(observing(**settings), ledger).observer


def observing(**settings):
    return Config(sleep=SleepSettings(**({"mode": "observe", "window_s": 600.0} | settings)))


def control(config, ledger=None):
    return SleepControl(config, None, None, Kept() if ledger is None else ledger, Log())


def run(o, bins, busy=("a0", "a1"), begin=DAY0):
    for number in range(bins):
        o.observe(snapshot(begin + number * BIN_S, *busy), None, {})
    return begin + (bins - 1) * BIN_S


def test_off_by_default():
    c = control(Config())
    plan = Plan(time=DAY0)
    for number in range(200):
        c.round(snapshot(DAY0 + number * BIN_S), plan, {}, acts=True, decide=None)
    assert (c.observer.asleep, c.shown(), c.observer.history.record.bins) == ({}, None, {})


def test_idle_nodes_would_sleep_once_a_day_is_known():
    o = observer()
    run(o, 140)
    assert not o.asleep
    run(o, 200)
    # Two are in use; one more is awake for a rise.
    assert len(o.asleep) == 7
    assert not {"a0", "a1"} & set(o.asleep)
    assert any("Sleep=observe Asleep=7 Nodes=10 Awake=3" in line for line in o._log.lines)


def test_a_node_that_is_needed_while_it_would_sleep_is_late():
    o = observer()
    last = run(o, 200)
    asleep = sorted(o.asleep)[:2]
    o.observe(snapshot(last + 60, "a0", "a1", *asleep), None, {})
    assert not set(asleep) & set(o.asleep)
    assert o.history.record.at(last + 60).late == 2


def test_hours_energy_and_costs_are_in_the_usage():
    c = control(observing(idle_watts=600.0, price_per_kwh=0.5, boot_s=300.0))
    o = c.observer
    last = run(o, 300)
    o.observe(snapshot(last + 60, *(f"a{i}" for i in range(10))), None, {})
    view = View(snapshot=snapshot(last), sleep=c.shown())
    sleep = round_answers.usage(view, Viewer(), ())["sleep"]
    assert sleep["node_hours"] == pytest.approx(
        sum(b.asleep_s for b in o.history.record.bins.values()) / 3600
    )
    assert sleep["node_hours"] > 100
    assert sleep["kwh"] == pytest.approx(0.6 * sleep["node_hours"])
    assert sleep["cost"] == pytest.approx(0.5 * sleep["kwh"])
    assert (sleep["late"], sleep["late_s"]) == (7, 2100.0)
    stranger = Viewer(uid=5, operator=False, hidden=frozenset({"nodes"}))
    assert round_answers.usage(view, stranger, ())["sleep"] is None
    assert round_answers.usage(view, Viewer(), (), end=float(DAY0))["sleep"]["node_hours"] == 0


def test_bins_outlive_a_restart_of_the_controller():
    ledger = Kept()
    run(observer(ledger), 200)
    o = observer(ledger)
    run(o, 4, begin=DAY0 + 210 * BIN_S)
    assert len(o.history.record.series()) == 214
    assert len(o.asleep) == 7


def test_a_long_silence_counts_for_nothing():
    o = observer()
    last = run(o, 200)
    before = o.history.record.total(None, None)["node_hours"]
    o.observe(snapshot(last + 50_000, "a0", "a1"), None, {})
    assert o.history.record.total(None, None)["node_hours"] == before


def test_bins_without_a_reading_have_the_value_before_them():
    record = SleepRecord({1: SleepBin(used=3), 4: SleepBin(used=5)})
    assert record.series().tolist() == [3, 3, 3, 5]
    assert SleepRecord.of_json(record.to_json()).bins == record.bins
    assert SleepRecord.of_json([[1, 2], "x", None, [1, 2, 3, 4]]).bins.keys() == {1}
    assert SleepRecord.of_json("broken").series().size == 0
