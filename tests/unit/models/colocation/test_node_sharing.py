"""Learning from step times which jobs slow each other down on a node."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.models.colocation.node_sharing import (
    SharingLearner,
    StepTime,
    application_of,
    node_type,
    shared_gpu_type,
)
from slurm_elastic.models.colocation.shared_speeds import MeasuredUse, PartOfNode, SharedSpeeds
from tests.support.decisions.synthetic_clusters import Cluster, node

ROUND_S = 30.0


class Site:
    """A cluster whose job 1 reports every ten seconds, and a controller that follows it."""

    def __init__(self):
        self.cluster = Cluster([node("g1"), node("g2")])
        self.cluster.add(1, elastic="2-4", on={"g1": 2})
        self.learner = SharingLearner(SharedSpeeds())
        self.step_s = 1.0

    def run(self, seconds=60.0, *, setting="s", cpus=4.0, begin=0.0):
        """Let time pass: rounds every 30 s, with three reports of job 1 between them."""
        for _ in range(int(seconds / ROUND_S)):
            start = self.cluster.time
            self.follow()
            job = self.cluster.jobs[0]
            for at in (0.0, 10.0, 20.0):
                self.learner.note(
                    StepTime(
                        key=job.key,
                        run=job.run,
                        begin=start + at - begin,
                        end=start + at + 10.0,
                        step_s=self.step_s,
                        setting=setting,
                        use=MeasuredUse(cpus=cpus),
                    )
                )
            self.cluster.time = start + ROUND_S
        self.follow()

    def follow(self):
        self.learner.follow(self.cluster.snapshot(), {})

    def share(self, step_s=1.25, **fields):
        """Let job 2 come to the first node."""
        self.cluster.add(2, on={"g1": 2}, **fields)
        self.step_s = step_s

    def known(self, job=1, other=2):
        snapshot = self.cluster.snapshot()
        part, beside = (
            PartOfNode(application=application_of(snapshot.job[j]), gpus=2, node_cpus=32)
            for j in (job, other)
        )
        return self.learner.speeds.of(node_type(snapshot.nodes[0]), part, beside)


@pytest.fixture
def site():
    site = Site()
    site.run()
    return site


def test_the_speed_beside_a_job_is_the_time_alone_over_the_time_shared(site):
    site.share(step_s=1.25)
    site.run(120)
    known = site.known()
    assert known.measured >= 3
    assert known.speed == pytest.approx((known.measured * 0.8 + 1) / (known.measured + 1))
    assert site.known(2, 1).measured == 0  # rigid: its steps are not known


def test_nothing_is_known_of_a_job_that_was_never_alone():
    site = Site()
    site.share()
    site.run(120)
    assert site.known().measured == 0


@pytest.mark.parametrize(
    "disturb",
    [
        lambda site: site.run(120, setting="other batch"),
        lambda site: site.run(120, begin=1000.0),
        lambda site: (site.cluster.add(3, on={"g1": 1}), site.run(120)),
    ],
    ids=["other setting", "window began before", "two neighbours, none known"],
)
def test_other_step_times_are_no_measurement_of_a_pair(site, disturb):
    site.share(step_s=2.0)
    disturb(site)
    assert site.known().measured == 0


def test_a_node_with_cpus_in_use_that_no_job_explains_teaches_nothing(site):
    site.share(step_s=2.0, cpus_per_gpu=0.0)
    nodes = site.cluster.snapshot().nodes
    snapshot = site.cluster.snapshot
    busy = tuple(dataclasses.replace(n, used_cpus=n.cpus) for n in nodes)
    site.cluster.snapshot = lambda: dataclasses.replace(snapshot(), nodes=busy)
    site.run(120)
    assert site.known().measured == 0


def test_a_neighbour_that_comes_within_a_window_spoils_it(site):
    site.step_s = 2.0
    site.run(ROUND_S)
    alone = site.learner.speeds.to_json()["alone"]
    job = site.cluster.jobs[0]
    for at in (0.0, 15.0):
        site.learner.note(
            StepTime(
                key=job.key,
                run=job.run,
                begin=site.cluster.time + at,
                end=site.cluster.time + at + 15,
                step_s=9.0,
                setting="s",
            )
        )
    site.share()
    site.cluster.time += ROUND_S
    site.follow()
    assert site.learner.speeds.to_json()["alone"] == alone


def test_a_neighbour_is_known_by_its_application_and_its_gpus(site):
    site.share()
    site.run(120)
    site.cluster.jobs[1] = dataclasses.replace(site.cluster.jobs[1], name="other")
    assert site.known().measured == 0


def test_what_was_learned_survives_a_restart(site):
    site.share(step_s=1.25)
    site.run(120)
    text = json.dumps(site.learner.speeds.to_json())
    again = SharedSpeeds.of_json(json.loads(text))
    assert json.dumps(again.to_json()) == text
    site.learner.speeds, old = again, site.known()
    assert site.known() == old
    assert again.load(PartOfNode(application="bob/job1", gpus=2, node_cpus=32)).compute == 0.25


def test_what_a_job_sends_counts_where_it_stands_on_several_nodes():
    speeds = SharedSpeeds()
    use = MeasuredUse(cpus=4.0, sent_bytes_s=1e9, read_bytes_s=1e6, memory_bytes_s=3e9)
    speeds.record_use("a", use, alone=True)
    speeds.record_use("a", MeasuredUse(sent_bytes_s=9e9), alone=False)  # alone outweighs
    speeds.record_use("a", MeasuredUse(read_bytes_s=2e6), alone=True)
    here = PartOfNode(application="a", gpus=2, node_cpus=32)
    load = speeds.load(dataclasses.replace(here, crosses=True))
    assert (load.sent_bytes_s, load.read_bytes_s) == (1e9, pytest.approx(2.4e6))
    assert (speeds.load(here).sent_bytes_s, speeds.load(here).memory_bytes_s) == (0, 6e9)
    assert speeds.load(dataclasses.replace(here, on_gpu=True)).memory_bytes_s == 0
    again = SharedSpeeds.of_json(json.loads(json.dumps(speeds.to_json())))
    assert again.load(here) == speeds.load(here)


def test_on_one_gpu_the_use_of_gpus_counts():
    speeds = SharedSpeeds()
    speeds.record_use("busy", MeasuredUse(cpus=4.0, gpu=0.9, gpu_memory=0.8), alone=True)
    speeds.record_use("idle", MeasuredUse(gpu=0.1, gpu_memory=0.1), alone=True)
    speeds.record_use("scripts", MeasuredUse(cpus=1.0), alone=True)
    busy, idle, scripts = (
        PartOfNode(application=name, gpus=1, on_gpu=True) for name in ("busy", "idle", "scripts")
    )
    for known in (speeds, SharedSpeeds.of_json(json.loads(json.dumps(speeds.to_json())))):
        both_busy = known.of("a100, one GPU", busy, busy)
        assert both_busy.modelled
        assert 0.7 < both_busy.speed < 0.85
        assert known.of("a100, one GPU", busy, idle).speed > 0.97
        assert not known.of("a100, one GPU", busy, scripts).modelled
    assert speeds.load(PartOfNode(application="busy", gpus=2, node_cpus=32)).compute == 0.25


def test_a_ledger_without_network_and_reads_is_read():
    old = {
        "alone": [["me", "s", [1.0]]],
        "use": [["me", 4.0, True]],
        "runs": [["n", "me", 2, 0.25, True, "a", 2, 0.5, True, 0.8]] * 3,
    }
    speeds = SharedSpeeds.of_json(old)
    assert speeds.of("n", part("me"), part("a")).measured == 3
    rows = speeds.to_json()["runs"]
    used = [0.0] * 4
    assert rows[0] == ["n", "me", 2, 0.25, True, *used, "a", 2, 0.5, True, *used, 0.8]
    assert SharedSpeeds.of_json(speeds.to_json()).to_json() == speeds.to_json()


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"alone": 3},
        {"alone": [[1, 2, 3]]},
        {"runs": [["a"] * 10]},
        {"use": [[]]},
        {"sent": [["a", -1.0, True]], "read": {}},
        {"runs": [["a"] * 14]},
        {"runs": [["a"] * 16]},
        {"runs": [["a"] * 18]},
        {"gpu": [["a", 0.5, True]], "gpu_memory": [3]},
    ],
)
def test_a_damaged_record_is_left_out(value):
    assert not SharedSpeeds.of_json(value).measured


def test_times_alone_count_by_their_median(site):
    site.learner.speeds.record_alone("bob/job1", "s", 50.0)
    site.share(step_s=1.25)
    site.run(120)
    assert 0.75 < site.known().speed < 0.9


def part(name, gpus=2):
    return PartOfNode(application=name, gpus=gpus)


def beside(speeds, others, speed, times=3):
    for _ in range(times):
        speeds.record_shared(
            part("me"), [part(o) for o in others], node_type="n", setting="s", step_s=1 / speed
        )


@pytest.fixture
def speeds():
    speeds = SharedSpeeds()
    speeds.record_alone("me", "s", 1.0)
    return speeds


def test_several_neighbours_that_do_not_slow_a_job_are_all_known_to(speeds):
    beside(speeds, "ab", 1.0)
    assert [speeds.of("n", part("me"), part(o)).measured for o in "abc"] == [3, 3, 0]
    assert speeds.of("n", part("me"), part("a")).speed == 1.0


def test_the_one_neighbour_that_is_not_known_accounts_for_the_rest(speeds):
    beside(speeds, "a", 0.8)
    known = speeds.of("n", part("me"), part("a")).speed
    beside(speeds, "ab", 0.5 * 0.8, times=9)
    assert speeds.of("n", part("me"), part("a")).speed == pytest.approx(known, abs=0.05)
    assert speeds.of("n", part("me"), part("b")).speed == pytest.approx(0.55, abs=0.05)


@given(
    truth=st.lists(st.floats(0.4, 1.0), min_size=3, max_size=3),
    companies=st.lists(st.sets(st.integers(0, 2), min_size=1), min_size=60, max_size=60),
)
def test_speeds_of_pairs_follow_from_those_beside_several(truth, companies):
    speeds = SharedSpeeds()
    speeds.record_alone("me", "s", 1.0)
    for alone in range(3):  # each pair was seen at least a few times
        beside(speeds, [f"j{alone}"], truth[alone], times=6)
    for company in companies:
        total = math.prod(truth[i] for i in company)
        beside(speeds, [f"j{i}" for i in sorted(company)], total, times=1)
    for i, speed in enumerate(truth):
        assert speeds.of("n", part("me"), part(f"j{i}")).speed == pytest.approx(speed, abs=0.12)


def test_jobs_on_one_gpu_are_compared_with_the_time_on_a_whole_one():
    site = Site()
    site.cluster = Cluster([node("g1", shards=2)])
    site.cluster.add(1, elastic="1", on={"g1": 1})
    site.cluster.add(9, on={"g1": 2})
    site.run()  # with a neighbour on the node
    half = {"half_of": 0, "on": {"g1": 1}}
    site.cluster.jobs.clear()
    site.cluster.add(1, elastic="1", **half)
    site.cluster.add(2, elastic="1", **half)
    site.cluster.add(9, on={"g1": 2})
    site.step_s = 1.25
    site.run()
    kind = shared_gpu_type(site.cluster.nodes[0])
    jobs = {j.name: PartOfNode(application=application_of(j), gpus=1) for j in site.cluster.jobs}
    known = site.learner.speeds.of(kind, jobs["job1"], jobs["job2"])
    assert known.measured >= 1
    assert known.speed == pytest.approx(0.8, abs=0.11)
    # It is no neighbour of the node.
    on_node = node_type(site.cluster.nodes[0])
    assert not site.learner.speeds.of(on_node, jobs["job1"], jobs["job2"]).measured
