"""Properties of policy `goodput` on random clusters, jobs, lengths and waits."""

import dataclasses
import json
import random

import numpy as np
from hypothesis import given, settings

from slurm_elastic.config.policy_settings import GoodputSettings
from slurm_elastic.policies.goodput import wait_bound
from slurm_elastic.policies.goodput.marginal_value import MarginalValue
from slurm_elastic.round import decide_round
from tests.support.decisions.reasons import words
from tests.support.decisions.sia_strategies import (
    CASES,
    TYPES,
    random_cluster,
    random_config,
    random_question,
)


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


@settings(max_examples=150, deadline=None)
@given(*CASES)
def test_it_keeps_to_capacity_and_directives_and_repeats_itself(nodes, jobs, seed):
    rng = random.Random(seed)
    config = goodput_config(rng)
    cluster = random_cluster(rng, nodes, jobs)
    with_progress(rng, cluster)
    asked = random_question(cluster, seed)
    before = random_state(rng, asked)
    proposals, state = MarginalValue(config).decide(asked, before)
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
    again, same = MarginalValue(config).decide(asked, json.loads(json.dumps(before)))
    assert again == proposals
    assert json.loads(json.dumps(same)) == json.loads(json.dumps(state))


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=60, deadline=None)
@given(*CASES)
def test_whole_rounds_keep_capacity(nodes, jobs, seed):
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
        used = {n.name: 0 for n in snapshot.nodes}
        for decision in plan.decisions:
            for name, gpus in decision.target.shares if decision.target else ():
                used[name] += gpus
        assert all(used[n.name] <= n.gpus for n in snapshot.nodes)
        cluster.time += 60.0
