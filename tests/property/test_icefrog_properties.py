"""Properties of policy `icefrog` on random clusters, jobs and frozen layers."""

import dataclasses
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.core.application import LayerCost, Prefixes
from slurm_elastic.policies.icefrog.icefrog import IceFrog
from slurm_elastic.policies.sia.sia import Sia
from tests.support.decisions.reasons import words
from tests.support.decisions.sia_strategies import (
    CASES,
    TYPES,
    random_cluster,
    random_config,
    random_question,
)


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


@settings(max_examples=100, deadline=None)
@given(*CASES)
def test_it_keeps_to_capacity_and_directives_and_repeats_itself(nodes, jobs, seed):
    rng = random.Random(seed)
    config = random_config(rng)
    cluster = random_cluster(rng, nodes, jobs)
    freezing(rng, cluster)
    asked = random_question(cluster, seed)
    proposals, state = IceFrog(config).decide(asked, {})
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
        learned = cluster.records[proposal.job_id].learned
        if "frozen" in words(best.reason):
            prefixes = learned.prefixes
            frozen = int(words(best.reason).partition("layers 1-")[2].partition(" ")[0])
            assert 0 < frozen <= min(prefixes.certified, prefixes.layers - 1)
            assert dict(prefixes.penalties)[frozen] <= prefixes.max_penalty
    assert all(used[t] <= asked.capacity[t] for t in TYPES)
    assert IceFrog(config).decide(asked, dict(state))[0] == proposals


@settings(max_examples=60, deadline=None)
@given(*CASES, st.booleans())
def test_without_freezable_jobs_it_decides_as_sia(nodes, jobs, seed, certified):
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
