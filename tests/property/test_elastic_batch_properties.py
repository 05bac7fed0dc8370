"""Properties of `elastic_batch`: the program against all divisions, and its rounds."""

import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.elastic_batch import plain
from slurm_elastic.config.policy_settings import ElasticBatchSettings
from slurm_elastic.config.schema import Config, ControllerSettings, ResizeSettings
from slurm_elastic.core.application import Application, Learned, Noise, Observation, TypeProfile
from slurm_elastic.core.plan import Action
from slurm_elastic.policies.elastic_batch.division import divide
from slurm_elastic.policies.elastic_batch.elastic_batch import ElasticBatch as Policy
from slurm_elastic.round import decide_round
from tests.support.decisions.synthetic_clusters import Cluster, node

TYPES = ("a100", "v100")

VALUES = st.one_of(
    st.just(-np.inf), st.integers(0, 4).map(float), st.floats(-2, 10, allow_nan=False)
)


@st.composite
def instances(draw):
    """Draw up to four jobs on up to eight GPUs; with gaps, ties and losses."""
    jobs, most = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    rows = [[-np.inf, *draw(st.lists(VALUES, min_size=most, max_size=most))] for _ in range(jobs)]
    return np.array(rows), draw(st.integers(0, 8))


def every(rows, capacity):
    """Return the best sum of all divisions; None: there is none."""
    sizes = range(1, rows.shape[1])
    sums = [
        sum(rows[j, g] for j, g in enumerate(chosen))
        for chosen in itertools.product(sizes, repeat=len(rows))
        if sum(chosen) <= capacity
    ]
    best = max(sums, default=-np.inf)
    return None if best == -np.inf else best


@settings(max_examples=250)
@given(instances())
def test_the_program_finds_what_trying_everything_finds(instance):
    rows, capacity = instance
    division, best = divide(rows, capacity), every(rows, capacity)
    if best is None:
        assert division is None
        return
    assert division.gpus.sum() <= capacity
    chosen = rows[np.arange(len(rows)), division.gpus]
    assert division.value == pytest.approx(best, abs=1e-9)
    assert chosen.sum() == pytest.approx(best, abs=1e-9)
    assert plain(rows, capacity) == pytest.approx(best, abs=1e-9)
    assert divide(rows, capacity).gpus.tolist() == division.gpus.tolist()


@settings(max_examples=100)
@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 40))
def test_merged_rows_equal_the_plain_loop_where_every_further_gpu_gains_less(seed, jobs, capacity):
    rng = np.random.default_rng(seed)
    gains = -np.sort(-rng.integers(-2, 12, (jobs, 16)), axis=1).astype(float)
    rows = np.concatenate([np.full((jobs, 1), -np.inf), gains.cumsum(axis=1)], axis=1)
    ours = divide(rows, capacity)
    assert (ours is None) == (jobs > capacity)
    if ours is not None:
        assert ours.value == pytest.approx(plain(rows, capacity), abs=1e-9)
        # Rows that are not merged by their gains give the same result.
        bent = rows.copy()
        bent[:, -1] = -np.inf
        bent[:, 1:][:, 7] -= 1e-7
        other = divide(bent, capacity)
        assert other.value == pytest.approx(divide(rows[:, :-1], capacity).value, abs=1e-5)


@settings(max_examples=60)
@given(st.integers(0, 2**31))
def test_larger_instances_equal_the_plain_loop(seed):
    rng = np.random.default_rng(seed)
    jobs, most, capacity = rng.integers(1, 9), rng.integers(1, 20), rng.integers(1, 60)
    rows = rng.uniform(0, 5, (jobs, most + 1))
    rows[rng.random(rows.shape) < rng.uniform(0, 0.7)] = -np.inf
    rows[:, 0] = -np.inf
    found, value = divide(rows, int(capacity)), plain(rows, int(capacity))
    assert (found is None) == (value == -np.inf)
    if found is not None:
        assert found.value == pytest.approx(value, abs=1e-9)


# --- rounds -----------------------------------------------------------------------------------


def config(rng):
    return Config(
        controller=ControllerSettings(
            queue=rng.choice(["slurm", "controller"]), policy="elastic_batch", mode="act"
        ),
        resize=ResizeSettings(min_interval_s=0.0, per_hour=1000),
        elastic_batch=ElasticBatchSettings(
            mode=rng.choice(["queue", "drop"]),
            batch=rng.choice(["elastic", "elastic", "fixed-max", "fixed-random"]),
            accumulate=rng.random() < 0.3,
            restart_cost=rng.random() < 0.4,
            statistical=rng.random() < 0.4,
            starvation_s=rng.choice([0.0, 100.0, 1e6]),
            growth=rng.choice([1.0, 2.0, 100.0]),
        ),
    )


def invent(rng, nodes, jobs):
    """Draw nodes of mixed sizes, and jobs of every class, some without measurements."""
    members = [
        node(f"n{i}", rng.choice([2, 4, 8]), rng.choice(TYPES), available=rng.random() < 0.95)
        for i in range(nodes)
    ]
    cluster = Cluster(members)
    free = {n.name: n.gpus for n in members}
    for job_id in range(1, jobs + 1):
        kind = rng.choice([n.gpu_type for n in members])
        on = {}
        homes = [n.name for n in members if n.gpu_type == kind and free[n.name]]
        if homes and rng.random() < 0.6:
            for name in rng.sample(homes, min(len(homes), rng.choice([1, 1, 2]))):
                on[name] = rng.randint(1, free[name])
                free[name] -= on[name]
        held = sum(on.values())
        most = max(held, rng.choice([1, 2, 4, 8, 16]))
        least = rng.randint(1, held or most)
        low = rng.choice([16, 64])
        batch = rng.choice(["", f",batch={low}-{low * rng.choice([1, 2, 8])}"])
        types = rng.choice(["", "", f",types={kind}"])
        record = {"restart_s": rng.choice([None, 1.0, 250.0])}
        if rng.random() < 0.7:
            record["learned"] = known(rng, kind, on, most)
        cluster.add(job_id, elastic=f"{least}-{most}{batch}{types}", on=on or None, record=record)
    return cluster


def known(rng, kind, on, gpus):
    first = rng.choice([16, 32])
    application = Application(
        name="net",
        initial_batch=first,
        max_batch=first * rng.choice([1, 4, 16]),
        batch=first,
        gpus=gpus,
        types=tuple(
            TypeProfile(t, least=1, most=rng.choice([16, 64]), single=rng.uniform(1, 100))
            for t in TYPES
        ),
    )
    shapes = {(1, 1)} | ({(len(on), sum(on.values()))} if on else set())
    seen = tuple(
        Observation(kind, nodes, count, 16, step + (count > 1) * rng.uniform(0, 0.3), step)
        for nodes, count in sorted(shapes)
        for step in [rng.uniform(0.05, 0.5)]
    )
    noise = Noise(sqr=1.0, var=rng.uniform(1, 1000)) if rng.random() < 0.7 else None
    return Learned(application, seen if rng.random() < 0.8 else (), noise)


def gpus(allocation):
    return allocation.gpus if allocation else 0


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 10))
def test_plans_keep_to_directives_and_nodes_and_change_nothing_without_an_event(seed, nodes, jobs):
    rng = random.Random(seed)
    cluster, settings_ = invent(rng, nodes, jobs), config(rng)
    snapshot = cluster.snapshot()
    at_once = settings_.controller.queue == "controller" and rng.random() < 0.5

    def decide(state):
        return decide_round(
            snapshot,
            cluster.records,
            config=settings_,
            policy=Policy(settings_),
            state=state,
            at_once=at_once,
        )

    plan, state = decide({})
    again, same = decide({})
    assert plan == again
    assert json.loads(json.dumps(state)) == same
    used = {n.name: 0 for n in cluster.nodes}
    for decision in plan.decisions:
        job = snapshot.job[decision.job_id]
        directive = job.directive
        held = {decision.target, job.allocation if not at_once else None} - {None}
        for name in {n for a in held for n in a.nodes}:
            used[name] += max(dict(a.shares).get(name, 0) for a in held)
        if decision.target is not None and decision.action is not Action.KEEP:
            assert directive.min_gpus <= decision.target.gpus <= directive.max_gpus
            assert directive.allows(decision.target.gpus, decision.target.gpu_type)
        if job.allocation is not None:
            assert decision.target is not None, "a running job is never stopped"
            assert decision.target.gpu_type == job.allocation.gpu_type
        if decision.batch is not None:
            allowed = directive.batch or (1, 1 << 20)
            application = cluster.records[decision.job_id].learned.application
            assert allowed[0] <= decision.batch <= allowed[1]
            assert application.initial_batch <= decision.batch <= application.max_batch
        assert not (decision.dropped and decision.target)
        assert decision.dropped <= (settings_.elastic_batch.mode == "drop")
    for name, count in used.items():
        assert count <= snapshot.node[name].gpus
    # Without events nothing changes, neither at once nor at the next division.
    if at_once:
        cluster.carry_out(plan)
        snapshot = cluster.snapshot()
        for at in (state["policy"]["at"], -1e9):
            kept, _ = decide({**state, "policy": {**state["policy"], "at": at}})
            assert kept.changes == (), at


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(2, 8))
def test_with_the_guard_no_job_waits_while_others_have_more_than_they_need(seed, nodes, jobs):
    """One type with enough memory: a job that waited for long gets GPUs."""
    rng = random.Random(seed)
    members = [node(f"n{i}", 4, "a100") for i in range(nodes)]
    cluster, free = Cluster(members), {n.name: 4 for n in members}
    for job_id in range(1, jobs + 1):
        homes = [name for name, left in free.items() if left]
        on = {}
        if homes and rng.random() < 0.7:
            name = rng.choice(homes)
            on = {name: rng.randint(1, free[name])}
            free[name] -= on[name]
        cluster.add(job_id, elastic=f"1-{rng.choice([4, 8])}", on=on or None, gpus=1)
    policy = Config(
        controller=ControllerSettings(queue="controller", policy="elastic_batch", mode="act"),
        resize=ResizeSettings(min_interval_s=0.0, per_hour=1000),
        elastic_batch=ElasticBatchSettings(starvation_s=60.0, interval_s=1e4),
    )
    # The last division was just now, and gave each job its present GPUs.
    snapshot = cluster.snapshot()
    state = {"at": snapshot.time - 10, "targets": {}, "why": {}, "dropped": []}
    plan, _ = decide_round(
        snapshot,
        cluster.records,
        config=policy,
        policy=Policy(policy),
        state={"policy": state},
        at_once=True,
    )
    held = {d.job_id: gpus(d.target) for d in plan.decisions}
    waiting = [j for j, count in held.items() if not count]
    spare = 4 * nodes - sum(held.values()) + sum(max(0, count - 1) for count in held.values())
    assert not waiting or not spare, (held, spare)
