"""Policy `sia`: targets and reasons, without placement."""

import dataclasses
import doctest
import json

import numpy as np
import pytest

from slurm_elastic.config.policy_settings import SiaSettings as Settings
from slurm_elastic.config.schema import Config, ControllerSettings, ResizeSettings, SpeedupSettings
from slurm_elastic.core.application import (
    Application,
    JobClass,
    Learned,
    Noise,
    Observation,
    TypeProfile,
)
from slurm_elastic.core.cluster import Allocation, Companion
from slurm_elastic.core.plan import Action, Measurement
from slurm_elastic.models.speedup import SpeedModel
from slurm_elastic.policies.milp import assignment_milp
from slurm_elastic.policies.milp.assignment_milp import ProgramSolution
from slurm_elastic.policies.milp.program_solver import PulpSolver
from slurm_elastic.policies.milp.pulp_backend import SolverFailedError
from slurm_elastic.policies.policy_protocol import Question
from slurm_elastic.policies.sia import sia_configurations
from slurm_elastic.policies.sia.sia import Sia
from slurm_elastic.policies.sia.sia_configurations import configurations, node_counts, shapes
from slurm_elastic.round import decide_round
from tests.support.decisions.reasons import words
from tests.support.decisions.synthetic_clusters import NOW, Cluster, node

OURS = ControllerSettings(queue="controller", mode="act", policy="sia")
PLAIN = Config(
    controller=OURS, resize=ResizeSettings(restart_s=10.0, min_interval_s=0.0, per_hour=999)
)
COMPAT = dataclasses.replace(PLAIN, sia=Settings(artifact_compat=True))


def cluster():
    """Cluster with 8 GPUs in two v100 nodes, 8 in one a100 node."""
    return Cluster([node("v1", 4, "v100"), node("v2", 4, "v100"), node("a1", 8, "a100")])


def application(name="net", *, a100=2.0, batch=64, units=(1, 1), **more):
    """Application twice as fast on a100 unless given otherwise."""
    types = (
        TypeProfile("a100", least=1, most=64, single=100.0 * a100, unit=units[0]),
        TypeProfile("v100", least=1, most=64, single=100.0, unit=units[1]),
    )
    fields = {"initial_batch": 16, "max_batch": 512, "batch": batch, "types": types}
    return Application(name=name, **(fields | more))


def learned(app, *shapes_seen):
    """Measurements of nearly perfect scaling in these (type, GPUs)."""
    speed = {t.gpu_type: t.single for t in app.types}
    seen = tuple(
        Observation(
            kind,
            nodes=1,
            gpus=gpus,
            micro_batch=16,
            step_s=17 / speed[kind],
            micro_step_s=16 / speed[kind],
        )
        for kind, gpus in shapes_seen
    )
    return Learned(app, seen, Noise(sqr=1.0, var=400.0))


def question(c, config=PLAIN, capacity=None, seed=0):
    free = {"a100": 8, "v100": 8} if capacity is None else capacity
    return Question(
        snapshot=c.snapshot(),
        records=c.records,
        models={j: SpeedModel.fit(config.speedup, r.measurements) for j, r in c.records.items()},
        jobs=tuple(c.records),
        capacity=free,
        seed=seed,
    )


def ask(c, config=PLAIN, capacity=None, seed=0, state=None):
    proposals, _ = Sia(config).decide(question(c, config, capacity, seed), state or {})
    return {p.job_id: p for p in proposals}


def first(c, config=PLAIN, capacity=None, seed=0):
    return {
        j: (p.alternatives[0].gpu_type, p.alternatives[0].gpus)
        for j, p in ask(c, config, capacity, seed).items()
    }


def test_examples_in_the_docs():
    assert doctest.testmod(sia_configurations).failed == 0


def test_configurations_are_powers_of_two_then_whole_nodes():
    nodes = [node(f"t{i}", 4, "t4") for i in range(6)] + [node(f"a{i}", 8, "a") for i in range(2)]
    found = configurations(node_counts(nodes), ())
    sizes = {t: [int(g) for g in found.gpus[found.kind == i]] for i, t in enumerate(found.types)}
    assert sizes == {"a": [1, 2, 4, 8, 16], "t4": [1, 2, 4, 8, 12, 16, 20, 24]}
    assert configurations(node_counts(nodes), ()) is found


def test_nodes_of_several_sizes_give_the_whole_nodes_of_each():
    assert shapes(((4, 2), (8, 1)), 1, 16, 99) == ((1, 1), (1, 2), (1, 4), (1, 8), (3, 12))
    assert shapes(((6, 2),), 1, 16, 99) == ((1, 1), (1, 2), (1, 4), (1, 6), (2, 12))


def test_replicas_of_several_gpus_are_never_split():
    assert shapes(((8, 3),), 8, 16, 99) == ((1, 8), (2, 16), (3, 24))
    assert shapes(((4, 8),), 8, 16, 99) == ((2, 8), (4, 16), (6, 24), (8, 32))


def test_many_nodes_give_growing_steps():
    sizes = [g // 4 for _, g in shapes(((4, 1000),), 1, 4, 10**6)][2:]
    assert sizes[:6] == [1, 2, 3, 4, 5, 6]
    assert sizes[-1] == 1000
    assert len(sizes) < 40


def test_a_new_job_starts_at_its_least_on_the_type_that_suits_it():
    c = cluster()
    c.add(1, elastic="1-16", record={"learned": Learned(application())})
    c.add(2, elastic="2-16", record={"learned": Learned(application(a100=0.5))})
    assert first(c) == {1: ("a100", 1), 2: ("v100", 2)}


def test_the_artifact_gives_a_new_job_any_type():
    c = cluster()
    c.add(1, elastic="1-16", record={"learned": Learned(application())})
    found = [first(c, COMPAT, seed=s)[1] for s in range(20)]
    assert set(found) == {("a100", 1), ("v100", 1)}
    assert found == [first(c, COMPAT, seed=s)[1] for s in range(20)]


def test_a_job_starts_at_its_least_also_where_that_is_no_power_of_two():
    c = cluster()
    c.add(1, elastic="3-16", record={"learned": Learned(application())})
    assert first(c, capacity={"a100": 3, "v100": 0}) == {1: ("a100", 3)}


def test_it_at_most_doubles_what_was_measured():
    c = cluster()
    c.add(1, elastic="1-16", on={"a1": 1}, record={"learned": learned(application(), ("a100", 1))})
    assert first(c) == {1: ("a100", 2)}
    assert first(c, dataclasses.replace(PLAIN, sia=Settings(growth=4.0))) == {1: ("a100", 4)}


def test_the_directive_bounds_sizes_and_types():
    app = application()
    c = cluster()
    seen = learned(app, ("a100", 8), ("v100", 8))
    c.add(1, elastic="1-3", on={"a1": 1}, record={"learned": seen})
    c.add(2, elastic="1-16,types=v100", on={"v1": 1}, record={"learned": seen})
    assert first(c) == {1: ("a100", 2), 2: ("v100", 8)}


def test_each_application_gets_the_type_it_gains_most_from():
    c = cluster()
    fast, even = application("fast", a100=3.0), application("even", a100=1.0)
    c.add(1, elastic="1-8", on={"v1": 4}, record={"learned": learned(fast, ("v100", 4))})
    c.add(2, elastic="1-8", on={"a1": 8}, record={"learned": learned(even, ("a100", 8))})
    assert first(c) == {1: ("a100", 8), 2: ("v100", 8)}


def test_a_rigid_job_keeps_its_size_and_gets_another_type():
    app = application(job_class=JobClass.RIGID, gpus=6)
    c = cluster()
    c.add(1, elastic="6", record={"learned": Learned(app)})
    c.add(2, elastic="6", record={"learned": Learned(app)})
    assert sorted(first(c).values()) == [("a100", 6), ("v100", 6)]


def test_replicas_of_another_size_on_each_type():
    app = application(units=(4, 8), a100=1.0)
    c = Cluster([node("v1", 8, "v100"), node("v2", 8, "v100"), node("a1", 8, "a100")])
    seen = learned(app, ("a100", 4))
    c.add(1, elastic="4-16,unit=a100:4/v100:8", on={"a1": 4}, record={"learned": seen})
    found = first(c, capacity={"a100": 8, "v100": 16})[1]
    assert found in {("a100", 8), ("v100", 16)}


def test_a_shape_outside_the_set_may_be_kept():
    c = cluster()
    seen = learned(application(a100=0.1), ("v100", 8), ("v100", 3))
    c.add(1, elastic="1-3", on={"v1": 3}, record={"learned": seen})
    c.add(2, elastic="1-4", on={"v1": 1, "v2": 3}, record={"learned": seen})
    assert first(c) == {1: ("v100", 3), 2: ("v100", 4)}


@pytest.mark.parametrize(
    ("age", "restarts", "compat", "factor"),
    [
        (1000, 0, False, 1000 / 1010),
        (1000, 20, False, 800 / 1010),
        (1000, 200, False, 0.0),
        (5, 0, False, 5 / 15),
        (5, 0, True, 1.0),
        (1000, 20, True, 400 / 1030),
    ],
)
def test_restart_factors(age, restarts, compat, factor):
    c = cluster()
    seen = learned(application(), ("v100", 4))
    record = {"learned": seen, "resizes": restarts}
    c.add(1, elastic="1-8", on={"v1": 2}, record=record, submit_time=NOW - age)
    c.add(2, elastic="1-8", record={"learned": seen, "resizes": 3})
    config = COMPAT if compat else PLAIN
    weighed = Sia(config).weigh(question(c, config))
    assert weighed.factor.tolist() == pytest.approx([factor, 1.0])
    held = weighed.table.held[0]
    assert weighed.scaled[0, held] == weighed.gain[0, held]
    others = np.arange(weighed.gain.shape[1]) != held
    assert weighed.scaled[0, others] == pytest.approx(factor * weighed.gain[0, others])


def in_place(c, on, *companions, elastic="1-8", age=10, **more):
    """Add job 1 on these nodes, where companions hold a part of the GPUs."""
    record = {"learned": learned(application(), ("v100", 4)), "in_place": True} | more
    held = tuple(
        Companion(100 + i, Allocation.of("v100", shares)) for i, shares in enumerate(companions)
    )
    c.add(1, elastic=elastic, on=on, record=record, submit_time=NOW - age, companions=held)


def test_what_is_reached_in_place_costs_only_a_pause():
    c = cluster()
    in_place(c, {"v1": 2}, pause_s=0.5)
    weighed = Sia(PLAIN).weigh(question(c))
    columns = list(weighed.table.configurations.shapes())
    v100 = weighed.table.configurations.types.index("v100")
    share = {shape: weighed.scaled[0, i] / weighed.gain[0, i] for i, shape in enumerate(columns)
             if weighed.table.valid[0, i]}  # fmt: skip
    assert share[v100, 1, 4] == pytest.approx(10 / 10.5)
    assert share[v100, 1, 2] == 1.0
    # less than its base, and another type, need a requeue
    assert share[v100, 1, 1] == pytest.approx(10 / 20)
    assert share[1 - v100, 1, 4] == pytest.approx(10 / 20)


def test_companions_leave_in_place():
    c = cluster()
    in_place(c, {"v1": 4}, {"v1": 2}, {"v1": 1}, pause_s=0.5)
    weighed = Sia(PLAIN).weigh(question(c))
    reached = [
        shape[1:]
        for i, shape in enumerate(weighed.table.configurations.shapes())
        if weighed.in_place[0, i]
    ]
    assert reached == [(1, 1), (1, 2), (2, 8)]


def test_no_room_on_its_nodes_is_no_change_in_place():
    c = cluster()
    in_place(c, {"v1": 2}, elastic="1-4")
    c.add(2, on={"v1": 1}, gpu_type="v100")
    weighed = Sia(PLAIN).weigh(question(c))
    assert not weighed.in_place.any()


def test_a_change_in_place_is_proposed_before_a_requeue_that_is_worth_it_too():
    for age, expected in ((5000, [True, False]), (10, [True])):
        c = cluster()
        in_place(c, {"v1": 2}, elastic="1-4", age=age)
        (proposal,), _ = Sia(PLAIN).decide(question(c, capacity={"a100": 0, "v100": 8}), {})
        wishes = [a.in_place for a in proposal.alternatives if a.gpus == 4]
        assert wishes == expected
        assert proposal.alternatives[0].gpus == 4


def test_past_changes_in_place_do_not_make_a_requeue_dearer_than_they_cost():
    c = cluster()
    in_place(c, {"v1": 2}, age=1000, pause_s=0.5, resizes=12, resizes_in_place=10)
    weighed = Sia(PLAIN).weigh(question(c))
    assert weighed.factor.tolist() == pytest.approx([(1000 - 2 * 10 - 10 * 0.5) / 1010])


def test_a_young_job_is_left_alone_and_an_old_one_grows():
    seen = learned(application(), ("a100", 4))
    for age, gpus in ((3, 2), (5000, 8)):
        c = cluster()
        c.add(1, elastic="1-8", on={"a1": 2}, record={"learned": seen}, submit_time=NOW - age)
        assert first(c) == {1: ("a100", gpus)}


def test_rows_count_in_gpus_of_the_slowest_type():
    c = cluster()
    c.add(1, elastic="1-8", on={"v1": 1}, record={"learned": learned(application(), ("v100", 1))})
    c.add(2, elastic="4-8", on={"v2": 4}, record={"learned": learned(application(), ("v100", 4))})
    weighed = Sia(PLAIN).weigh(question(c))
    gain = np.where(weighed.table.valid, weighed.gain, np.inf)
    assert gain.min(axis=1).tolist() == pytest.approx([1.0, 4.0])


def test_running_jobs_are_suspended_only_if_we_start_them_again():
    seen = learned(application(), ("v100", 4))
    c = cluster()
    for i in range(1, 7):
        c.add(i, elastic="4", on={f"v{i}": 4} if i < 3 else None, record={"learned": seen})
    assert sum(g for _, g in first(c, capacity={"v100": 8}).values()) == 8
    slurms = dataclasses.replace(PLAIN, controller=ControllerSettings(policy="sia"))
    c = cluster()
    c.add(1, elastic="8", on={"v1": 4, "v2": 4}, record={"learned": seen})
    c.add(2, elastic="1-4", on={"a1": 1}, record={"learned": seen})
    assert first(c, slurms, {"v100": 4, "a100": 4})[1][1] in {0, 8}
    assert first(c, slurms, {"v100": 8, "a100": 1})[1] == ("v100", 8)


def test_jobs_that_have_reported_nothing_count_with_their_stated_speed():
    stated = dataclasses.replace(PLAIN, speedup=SpeedupSettings(types={"a100": 2.0, "v100": 1.0}))
    c = cluster()
    c.add(1, elastic="1-8")
    assert first(c, stated) == {1: ("a100", 1)}
    seen = Measurement(gpu_type="v100", gpus=2, nodes=1, samples_per_s=100.0, steps=9)
    c = cluster()
    c.add(1, elastic="1-8", on={"v1": 2}, record={"measurements": (seen,)})
    assert first(c, stated) == {1: ("a100", 4)}


def test_alternatives_end_with_the_present_shape_and_waiting():
    c = cluster()
    c.add(1, elastic="1-8", on={"a1": 1}, record={"learned": learned(application(), ("a100", 4))})
    c.add(2, elastic="1-8", record={"learned": learned(application(), ("v100", 4))})
    found = ask(c, capacity={"a100": 8, "v100": 0})
    assert [(a.gpu_type, a.gpus) for a in found[1].alternatives] == [
        ("a100", 4),
        ("a100", 2),
        ("a100", 1),
        ("", 0),
    ]
    assert [a.gpus for a in found[2].alternatives] == [4, 2, 1, 0]


def test_the_reason_says_what_the_types_give():
    c = cluster()
    c.add(1, elastic="1-4", on={"v1": 4}, record={"learned": learned(application(), ("v100", 4))})
    reason = words(ask(c)[1].alternatives[0].reason)
    assert reason.startswith("4 a100: goodput 7.")
    assert "times one v100; 4 v100 would give 3." in reason
    c.add(2, elastic="1-16", record={"learned": learned(application(), ("v100", 8))})
    waits = words(ask(c, capacity={"v100": 4})[2].alternatives[0].reason)
    assert waits.endswith("v100 would be its best") or "v100" in waits


def test_nothing_fits():
    c = cluster()
    c.add(1, elastic="1-4,types=h100")
    (only,) = ask(c)[1].alternatives
    assert only.gpus == 0
    assert words(only.reason).startswith("no GPUs of this cluster")
    assert ask(cluster()) == {}


def test_the_time_limit_is_written_down(monkeypatch):
    def late(program, **_):
        return ProgramSolution(
            choice=np.array([0]),
            objective=1.0,
            bound=0.9,
            proven=False,
            limit_hit=True,
            how="greedy",
        )

    monkeypatch.setattr(assignment_milp, "solve", late)
    c = cluster()
    c.add(1, elastic="1-4", record={"learned": Learned(application())})
    proposals, state = Sia(PLAIN).decide(question(c), {"limit_hits": 2})
    assert "time limit" in words(proposals[0].alternatives[0].reason)
    assert json.loads(json.dumps(state))["limit_hits"] == 3
    assert state["limit_hit"]["gap"] == pytest.approx(0.1)


def test_a_round_that_the_configured_solver_did_not_decide_is_written_down():
    class Broken:
        name = "CBC"

        def choose(self, program, **_):
            raise SolverFailedError("CBC failed")

    c = cluster()
    c.add(1, elastic="1-4", record={"learned": Learned(application())})
    policy = Sia(PLAIN)
    policy._solver = PulpSolver(Broken())
    proposals, state = policy.decide(question(c), {"solver_fallbacks": 2})
    assert proposals[0].alternatives[0].gpus
    assert json.loads(json.dumps(state)) == {
        "solver_fallbacks": 3,
        "solver_fallback": {"time": NOW, "error": "CBC failed"},
    }


def test_a_single_rule_of_the_artifact():
    config = dataclasses.replace(PLAIN, sia=Settings(artifact_rules=("rounding",)))
    c = cluster()
    c.add(1, elastic="1-8", on={"v1": 1}, record={"learned": learned(application(), ("v100", 4))})
    cost = Sia(config).weigh(question(c, config)).cost
    assert cost == pytest.approx(np.round(cost, 2))
    other = Sia(PLAIN).weigh(question(c)).cost
    assert not np.allclose(other, np.round(other, 2))


def test_above_zero_p_maximises_the_sum():
    config = dataclasses.replace(PLAIN, sia=Settings(p=1.0, lambda_n=0.0))
    c = cluster()
    fast, slow = (
        learned(application(a100=4.0), ("a100", 8)),
        learned(application(a100=1.0), ("a100", 8)),
    )
    c.add(1, elastic="1-8", on={"a1": 4}, record={"learned": fast})
    c.add(2, elastic="1-8", on={"v1": 4}, record={"learned": slow})
    assert first(c, config, {"a100": 8})[1] == ("a100", 8)


def test_a_whole_round():
    c = cluster()
    fast, even = application("fast", a100=3.0), application("even", a100=1.0)
    c.add(1, elastic="1-8", on={"v1": 4}, record={"learned": learned(fast, ("v100", 4))})
    c.add(2, elastic="1-4", gpus=1, record={"learned": learned(even, ("a100", 4))})
    plan, state = decide_round(c.snapshot(), c.records, config=PLAIN, policy=Sia(PLAIN), state={})
    assert json.loads(json.dumps(state)) == state
    assert plan.decision[1].target.gpu_type == "a100"
    assert plan.decision[2].action is Action.START


def test_growth_counts_in_replicas():
    app = application(units=(2, 8))
    c = Cluster([node("v1", 8, "v100"), node("a1", 8, "a100"), node("a2", 8, "a100")])
    seen = learned(app, ("v100", 8), ("a100", 4))
    c.add(1, elastic="2-16,unit=a100:2/v100:8", on={"a1": 4}, record={"learned": seen})
    assert first(c, capacity={"a100": 16, "v100": 8}) == {1: ("a100", 8)}


@pytest.mark.parametrize(("rule", "factor"), [((), 300 / 410), (("free-suspension",), 1.0)])
def test_a_suspended_job_is_charged_its_restart_but_never_more_than_waiting(rule, factor):
    config = dataclasses.replace(PLAIN, sia=Settings(artifact_rules=rule))
    seen = learned(application(), ("v100", 1))
    c = cluster()
    record = {"learned": seen, "resizes": 10, "leased": True}
    c.add(1, elastic="1", record=record, submit_time=NOW - 400, run=11, gpus=1)
    weighed = Sia(config).weigh(question(c, config))
    assert weighed.factor.tolist() == pytest.approx([factor])
    assert first(c, config)[1][1] == 1
    assert weighed.cost[weighed.table.valid].max() <= 1.1


@pytest.mark.parametrize("queue", ["controller", "slurm"])
def test_two_jobs_on_a_full_cluster_change_places(queue):
    config = dataclasses.replace(PLAIN, controller=ControllerSettings(queue=queue, policy="sia"))
    fast, even = application("fast", a100=3.0), application("even", a100=1.0)
    c = cluster()
    seen = {1: learned(fast, ("v100", 8)), 2: learned(even, ("a100", 8))}
    c.add(1, elastic="1-8", on={"v1": 4, "v2": 4}, record={"learned": seen[1]})
    c.add(2, elastic="1-8", on={"a1": 8}, record={"learned": seen[2]})
    policy, state, plan, restarts = Sia(config), {}, None, 0
    for _ in range(5):
        plan, state = decide_round(
            c.snapshot(), c.records, config=config, policy=policy, state=state, previous=plan
        )
        restarts += len(plan.changes)
        c.carry_out(plan)
        c.time += 60
    held = {j.job_id: (j.allocation.gpu_type, j.allocation.gpus) for j in c.jobs}
    assert held == {1: ("a100", 8), 2: ("v100", 8)}
    # The controller lets one leave, the other move and the first start; Slurm's jobs go together.
    assert restarts == (3 if queue == "controller" else 2)
