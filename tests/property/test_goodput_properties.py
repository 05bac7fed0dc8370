"""Properties of the policies `sia`, `icefrog` and `goodput` on random clusters and jobs."""

import dataclasses
import json
import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.config.policy_settings import GoodputSettings
from slurm_elastic.config.schema import ControllerSettings
from slurm_elastic.core.application import (
    Application,
    LayerCost,
    Learned,
    Noise,
    Observation,
    Prefixes,
    TypeProfile,
)
from slurm_elastic.policies.goodput import wait_bound
from slurm_elastic.policies.goodput.marginal_value import MarginalValue
from slurm_elastic.policies.icefrog.icefrog import IceFrog
from slurm_elastic.policies.sia.sia import Sia
from slurm_elastic.round import decide_round
from tests.support.decisions.reasons import words
from tests.support.decisions.sia_strategies import (
    CASES,
    TYPES,
    random_cluster,
    random_config,
    random_question,
)
from tests.support.decisions.synthetic_clusters import Cluster, node


def check_proposals(asked, proposals):
    """Check that first choices fit together, and that all choices are allowed and have reasons."""
    assert {p.job_id for p in proposals} == set(asked.jobs)
    used = dict.fromkeys(TYPES, 0)
    for proposal in proposals:
        job = asked.snapshot.job[proposal.job_id]
        for alternative in proposal.alternatives:
            assert words(alternative.reason)
            if alternative.gpus:
                assert job.directive.allows(alternative.gpus, alternative.gpu_type)
        best = proposal.alternatives[0]
        if best.gpus:
            used[best.gpu_type] += best.gpus
    assert all(used[t] <= asked.capacity[t] for t in TYPES)


def check_capacity(plan, snapshot):
    """Check that a plan gives each node at most the GPUs that it has."""
    used = {n.name: 0 for n in snapshot.nodes}
    for decision in plan.decisions:
        for name, gpus in decision.target.shares if decision.target else ():
            used[name] += gpus
    assert all(used[n.name] <= n.gpus for n in snapshot.nodes)


def freezing(rng, cluster, share=0.7):
    """Draw freezable layers for most jobs with measurements."""
    for job_id, record in cluster.records.items():
        if record.learned is None or rng.random() > share:
            continue
        layers = rng.randint(2, 30)
        certified = rng.randint(0, layers)
        named = sorted(rng.sample(range(1, layers + 1), min(layers, rng.randint(0, 3))))
        known = rng.random() < 0.8
        prefixes = Prefixes(
            layers=layers,
            certified=certified,
            frozen=rng.randint(0, certified),
            penalties=tuple((n, rng.random() ** 4) for n in named),
            max_penalty=rng.choice([0.0, 0.005, 0.5, 1.0]),
            costs=tuple(
                LayerCost(rng.uniform(0.1, 1), rng.uniform(0.1, 2), rng.uniform(0, 9))
                for _ in range(layers * known)
            ),
        )
        learned = dataclasses.replace(record.learned, prefixes=prefixes)
        cluster.records[job_id] = dataclasses.replace(record, learned=learned)


def scaling(rng):
    """Draw measurements of a job on one to eight GPUs, from hardly to fully scalable."""
    single, lost = rng.uniform(1, 1000), rng.uniform(0, 1)
    application = Application(
        name=f"app{rng.randint(0, 1000)}",
        initial_batch=64,
        max_batch=4096,
        batch=256,
        types=(TypeProfile("a100", least=1, most=64, single=single),),
    )
    micro = 64 / single
    observations = tuple(
        Observation("a100", 1, g, 64, micro * (1 + lost * (g - 1)), micro) for g in (1, 2, 4, 8)
    )
    return Learned(application, observations, Noise(1.0, rng.uniform(0.1, 1e4)))


def goodput_config(rng):
    return dataclasses.replace(
        random_config(rng),
        goodput=GoodputSettings(
            p=rng.choice([0.2, 0.5, 1.0]),
            charge=rng.choice([0.0, 0.25, 1.0]),
            hysteresis=rng.choice([0.0, 0.05, 0.5]),
            growth=rng.choice([1.0, 2.0, 64.0]),
            prices=rng.choice([{}, {"t4": 0.3}]),
            lengths=rng.random() < 0.7,
            wait_s=rng.choice([0.0, 600.0, 3600.0]),
        ),
    )


def random_state(rng, asked):
    """Draw since when jobs wait, and the account of their work."""
    now, keys = asked.snapshot.time, [j.key for j in asked.snapshot.jobs]
    return {
        "waits": {k: now - rng.uniform(0, 7200) for k in keys if rng.random() < 0.7},
        "work": {
            "time": now - 60.0,
            "asked": [k for k in keys if rng.random() < 0.8],
            "jobs": {
                k: [rng.random(), rng.uniform(0, 100), 10 ** rng.uniform(-3, 9), rng.random()]
                for k in keys
                if rng.random() < 0.6
            },
        },
    }


def with_progress(rng, cluster):
    for job_id, record in cluster.records.items():
        progress = rng.choice([None, 0.0, rng.random(), 1.0])
        cluster.records[job_id] = dataclasses.replace(
            record, progress=progress, last_change=cluster.time - rng.uniform(0, 7200)
        )


@settings(max_examples=150)
@given(*CASES)
def test_sia_keeps_to_capacity_and_directives_and_repeats_itself(nodes, jobs, seed):
    rng = random.Random(seed)
    config = random_config(rng)
    cluster = random_cluster(rng, nodes, jobs)
    asked = random_question(cluster, seed)
    proposals, state = Sia(config).decide(asked, {})
    check_proposals(asked, proposals)
    for proposal in proposals:
        shapes = [(a.gpu_type, a.gpus) for a in proposal.alternatives]
        assert len(shapes) == len(set(shapes))
        running = asked.snapshot.job[proposal.job_id].allocation is not None
        assert shapes[-1] == ("", 0) or running
    again, _ = Sia(config).decide(asked, json.loads(json.dumps(state)))
    assert again == proposals


@settings(max_examples=100)
@given(*CASES)
def test_icefrog_keeps_to_capacity_and_directives_and_repeats_itself(nodes, jobs, seed):
    rng = random.Random(seed)
    config = random_config(rng)
    cluster = random_cluster(rng, nodes, jobs)
    freezing(rng, cluster)
    asked = random_question(cluster, seed)
    proposals, state = IceFrog(config).decide(asked, {})
    check_proposals(asked, proposals)
    for proposal in proposals:
        reason = words(proposal.alternatives[0].reason)
        if "frozen" in reason:
            prefixes = cluster.records[proposal.job_id].learned.prefixes
            frozen = int(reason.partition("layers 1-")[2].partition(" ")[0])
            assert 0 < frozen <= min(prefixes.certified, prefixes.layers - 1)
            assert dict(prefixes.penalties)[frozen] <= prefixes.max_penalty
    assert IceFrog(config).decide(asked, dict(state))[0] == proposals


@settings(max_examples=150)
@given(*CASES)
def test_goodput_keeps_to_capacity_and_directives_and_repeats_itself(nodes, jobs, seed):
    rng = random.Random(seed)
    config = goodput_config(rng)
    cluster = random_cluster(rng, nodes, jobs)
    with_progress(rng, cluster)
    asked = random_question(cluster, seed)
    before = random_state(rng, asked)
    proposals, state = MarginalValue(config).decide(asked, before)
    check_proposals(asked, proposals)
    again, same = MarginalValue(config).decide(asked, json.loads(json.dumps(before)))
    assert again == proposals
    assert json.loads(json.dumps(same)) == json.loads(json.dumps(state))


@settings(max_examples=60)
@given(*CASES)
def test_removing_a_job_never_breaks_a_round_of_sia(nodes, jobs, seed):
    rng = random.Random(seed)
    config = random_config(rng)
    cluster = random_cluster(rng, nodes, jobs + 1)
    policy = Sia(config)
    policy.decide(random_question(cluster, seed), {})
    proposals, _ = policy.decide(
        random_question(cluster, seed, leave_out=rng.randint(1, jobs + 1)), {}
    )
    assert len(proposals) == jobs


@settings(max_examples=60)
@given(*CASES, st.booleans())
def test_without_freezable_jobs_icefrog_decides_as_sia(nodes, jobs, seed, certified):
    rng = random.Random(seed)
    config = random_config(rng)
    cluster = random_cluster(rng, nodes, jobs)
    if certified:
        freezing(rng, cluster)
        for job_id, record in cluster.records.items():
            if record.learned is not None and record.learned.prefixes is not None:
                none = dataclasses.replace(record.learned.prefixes, penalties=())
                learned = dataclasses.replace(record.learned, prefixes=none)
                cluster.records[job_id] = dataclasses.replace(record, learned=learned)
    asked = random_question(cluster, seed)
    assert IceFrog(config).decide(asked, {}) == Sia(config).decide(asked, {})


@settings(max_examples=150)
@given(*CASES)
def test_an_overdue_job_waits_only_while_others_entitled_hold_all_it_could_use(nodes, jobs, seed):
    rng = random.Random(seed)
    config = goodput_config(rng)
    config = dataclasses.replace(
        config, goodput=dataclasses.replace(config.goodput, wait_s=rng.choice([1.0, 1800.0]))
    )
    cluster = random_cluster(rng, nodes, jobs)
    with_progress(rng, cluster)
    cluster.jobs = [
        dataclasses.replace(job, start_time=cluster.time - rng.uniform(0, 7200))
        if job.allocation
        else job
        for job in cluster.jobs
    ]
    asked = random_question(cluster, seed)
    before = random_state(rng, asked)
    policy = MarginalValue(config)
    proposals, state = policy.decide(asked, before)
    chosen = {p.job_id: p.alternatives[0] for p in proposals}
    arrays = policy.weigh(asked).table
    columns, candidates = arrays.configurations, arrays.candidates
    smallest = wait_bound.smallest_columns(arrays)
    wait_s, now = config.goodput.wait_s, asked.snapshot.time

    def overdue(job):
        waits = state["waits"].get(job.job.key, now)
        return job.held is None and now - waits >= wait_s

    entitled = np.array([asked.capacity[t] for t in columns.types])
    for row, job in enumerate(candidates):
        recent = job.job.start_time is not None and job.job.start_time + wait_s > now
        if job.held is not None and (config.controller.queue == "slurm" or recent):
            if arrays.held[row] < 0:
                continue
            kind = columns.kind[arrays.held[row]]
            sizes = [columns.gpus[c] for c in (smallest[row, kind], arrays.held[row]) if c >= 0]
            entitled[kind] -= min(sizes)
        elif overdue(job) and chosen[job.job.job_id].gpus:
            best = chosen[job.job.job_id]
            entitled[columns.types.index(best.gpu_type)] -= best.gpus
    for row, job in enumerate(candidates):
        if overdue(job) and not chosen[job.job.job_id].gpus:
            for kind, column in enumerate(smallest[row]):
                assert column < 0 or columns.gpus[column] > entitled[kind]


@settings(max_examples=10)
@given(st.sampled_from((4, 8, 16)), st.integers(0, 2**32))
def test_jobs_whose_smallest_sizes_fit_together_wait_no_longer_than_the_bound(gpus, seed):
    rng = random.Random(seed)
    wait_s, round_s = 300.0, 60.0
    config = dataclasses.replace(
        goodput_config(rng), controller=ControllerSettings(queue="controller", mode="act")
    )
    config = dataclasses.replace(
        config, goodput=dataclasses.replace(config.goodput, wait_s=wait_s, p=1.0, charge=0.0)
    )
    # On one node, as GPUs that are free on several nodes may be of no use to a job.
    cluster = Cluster([node("n1", gpus)])
    job_id = 0
    while gpus > 0:
        job_id += 1
        least = min(gpus, rng.choice([1, 2, 4]))
        gpus -= least

        cluster.add(
            job_id, elastic=f"{least}-{least * 8}", gpus=least, record={"learned": scaling(rng)}
        )
    cluster.jobs = [dataclasses.replace(j, submit_time=cluster.time) for j in cluster.jobs]
    policy, state = MarginalValue(config), {}
    waited = dict.fromkeys(cluster.records, 0.0)
    ran = dict.fromkeys(cluster.records, 0.0)
    for turn in range(24):
        for key, record in cluster.records.items():
            if rng.random() < 0.1:
                cluster.records[key] = dataclasses.replace(record, learned=scaling(rng))
        plan, state = decide_round(
            cluster.snapshot(),
            cluster.records,
            config=config,
            policy=policy,
            state=state,
            seed=turn,
        )
        cluster.carry_out(plan)
        state = json.loads(json.dumps(state))
        cluster.time += round_s
        for job in cluster.jobs:
            key = job.job_id
            ran[key] = ran[key] + round_s if job.allocation else 0.0
            if ran[key] >= wait_s:
                waited[key] = 0.0
            if not job.allocation:
                waited[key] += round_s

            assert waited[key] <= wait_s + 2 * round_s


@settings(max_examples=60)
@given(*CASES)
def test_whole_rounds_of_sia_keep_capacity_and_classes(nodes, jobs, seed):
    rng = random.Random(seed)
    config = random_config(rng)
    cluster = random_cluster(rng, nodes, jobs)
    policy, state = Sia(config), {}
    for _ in range(2):
        snapshot = cluster.snapshot()
        plan, state = decide_round(
            snapshot, cluster.records, config=config, policy=policy, state=state, seed=seed
        )
        check_capacity(plan, snapshot)
        for decision in plan.decisions:
            target = decision.target
            if target is not None:
                directive = snapshot.job[decision.job_id].directive
                assert directive.allows(target.gpus, target.gpu_type) or target == decision.current
        cluster.carry_out(plan)
        cluster.time += 60
        state = json.loads(json.dumps(state))


@settings(max_examples=60)
@given(*CASES)
def test_whole_rounds_of_goodput_keep_capacity(nodes, jobs, seed):
    rng = random.Random(seed)
    config = goodput_config(rng)
    cluster = random_cluster(rng, nodes, jobs)
    with_progress(rng, cluster)
    policy, state = MarginalValue(config), {}
    for _ in range(2):
        snapshot = cluster.snapshot()
        plan, state = decide_round(
            snapshot, cluster.records, config=config, policy=policy, state=state, seed=seed
        )
        check_capacity(plan, snapshot)
        cluster.time += 60.0
