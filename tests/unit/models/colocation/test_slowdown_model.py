"""Speed beside a neighbour: monotone, learned from runs, with an error of its own."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.models.colocation.slowdown_model import AloneLoad, SharedRun, SlowdownModel

LEVELS = (0.1, 0.4, 0.7, 1.0)


def load(compute, memory_bus=0.3, application="net"):
    return AloneLoad(application=application, compute=compute, memory_bus=memory_bus)


def runs(*, applications=4, noise=0.0, seed=0):
    """Return runs in which what a GPU lacks for both jobs slows both down."""
    rng = np.random.default_rng(seed)
    measured = []
    for a, b in itertools.product(range(applications), repeat=2):
        for u1, u2 in itertools.product(LEVELS, repeat=2):
            speed = 1.0 - 0.3 * max(0.0, u1 + u2 - 1) + rng.normal(scale=noise)
            job, other = load(u1, application=f"n{a}"), load(u2, application=f"n{b}")
            measured.append(SharedRun(job=job, other=other, speed=speed))
    return measured


def test_two_busy_jobs_are_slow_before_anything_was_measured():
    prior = SlowdownModel.prior()
    light, heavy = load(0.2), load(1.0, 0.8)
    assert prior.speeds([(light, light)])[0] > 0.95
    assert prior.speeds([(heavy, heavy)])[0] < 0.8
    assert (prior.runs, prior.error) == (0, 0.15)


@pytest.mark.parametrize("boosted", [False, True])
def test_more_load_never_predicts_more_speed(boosted):
    if boosted:
        pytest.importorskip("sklearn")
    model = SlowdownModel.fit(runs(applications=5, noise=0.05), boosted=boosted)
    assert model.boosted is boosted
    for others in (LEVELS, reversed(LEVELS)):
        other = load(next(iter(others)))
        speeds = model.speeds([(load(u), other) for u in LEVELS])
        assert (np.diff(speeds) <= 1e-9).all()
        speeds = model.speeds([(other, load(u)) for u in LEVELS])
        assert (np.diff(speeds) <= 1e-9).all()


def test_what_was_measured_is_learned_with_its_error():
    exact = SlowdownModel.fit(runs(), boosted=False)
    predicted = exact.speeds([(load(1.0), load(1.0)), (load(0.4), load(0.4))])
    assert predicted == pytest.approx([0.7, 1.0], abs=0.03)
    noisy = SlowdownModel.fit(runs(noise=0.1), boosted=False)
    assert exact.error < 0.05 < noisy.error
    assert noisy.runs == 256


def test_a_few_runs_do_not_overthrow_the_prior():
    one = SlowdownModel.fit([SharedRun(job=load(0.1), other=load(0.1), speed=0.5)])
    assert one.speeds([(load(0.2), load(0.2))])[0] > 0.85


def test_without_pairs_there_are_no_speeds():
    assert SlowdownModel.prior().speeds([]).size == 0


def using(sent, read, application="net"):
    """Return a job with these parts of the most that the network and the storage carry."""
    return AloneLoad(
        application=application,
        compute=0.2,
        memory_bus=0.0,
        sent_bytes_s=sent * 1e9,
        read_bytes_s=read * 1e8,
    )


def shared_runs(loss_of_network, loss_of_storage):
    """Return runs of pairs that lose speed where they exceed the network or the storage."""
    loads = [
        using(n, r, application=f"{n}-{r}")
        for n, r in itertools.product((0.0, 0.4, 0.8, 1.0), repeat=2)
    ]
    measured = []
    for job, other in itertools.permutations(loads, 2):
        network = max(0.0, (job.sent_bytes_s + other.sent_bytes_s) / 1e9 - 1)
        storage = max(0.0, (job.read_bytes_s + other.read_bytes_s) / 1e8 - 1)
        speed = 1 - loss_of_network * network - loss_of_storage * storage
        measured.append(SharedRun(job=job, other=other, speed=speed))
    return measured


def test_a_pair_that_contends_for_a_link_is_predicted_and_the_resource_named():
    model = SlowdownModel.fit(shared_runs(0.4, 0.1), boosted=False)
    heavy, light, reading = using(0.9, 0.0), using(0.1, 0.0), using(0.0, 0.9)
    predicted = model.speeds([(heavy, heavy), (light, light), (reading, reading), (heavy, reading)])
    assert predicted == pytest.approx([0.68, 1.0, 0.92, 1.0], abs=0.04)
    assert model.contended(heavy, heavy) == "network"
    assert model.contended(reading, reading) == "storage"
    assert model.contended(light, reading) == ""


def moving(memory, application="net"):
    """Return a job that moves this part of what the node's memory carries."""
    return dataclasses.replace(using(0.0, 0.0, application), memory_bytes_s=memory * 1e11)


def test_a_pair_that_contends_for_the_nodes_memory_is_predicted_and_the_resource_named():
    loads = [moving(m / 8, application=f"{m}") for m in range(9)]
    measured = [
        SharedRun(
            job=a,
            other=b,
            speed=1 - 0.5 * max(0.0, (a.memory_bytes_s + b.memory_bytes_s) / 1e11 - 1),
        )
        for a, b in itertools.permutations(loads, 2)
    ]
    model = SlowdownModel.fit(measured, boosted=False)
    heavy, light = moving(0.9), moving(0.1)
    predicted = model.speeds([(heavy, heavy), (light, light), (heavy, light)])
    assert predicted == pytest.approx([0.6, 1.0, 1.0], abs=0.05)
    assert model.contended(heavy, heavy) == "memory"
    assert model.contended(light, light) == ""


def test_one_claim_of_an_absurd_load_does_not_hide_the_others():
    absurd = SharedRun(job=using(1e4, 0.0, "liar"), other=using(0.1, 0.0, "b"), speed=1.0)
    model = SlowdownModel.fit([*shared_runs(0.4, 0.1), absurd], boosted=False)
    assert model.scales.sent_bytes_s == pytest.approx(1e9)
    assert model.speeds([(using(0.9, 0.0), using(0.9, 0.0))])[0] < 0.8


def test_what_uses_no_network_is_predicted_as_if_there_were_none():
    pairs = [(load(u1), load(u2)) for u1, u2 in itertools.product(LEVELS, repeat=2)]
    model = SlowdownModel.fit(runs(noise=0.05), boosted=False)
    assert model.scales.sent_bytes_s == 1.0
    assert not model.weights[6:].any()
    assert model.contended(load(1.0), load(1.0)) in ("compute", "memory")
    assert SlowdownModel.prior().speeds(pairs) == pytest.approx(
        SlowdownModel.prior().speeds(
            [(dataclasses.replace(a, sent_bytes_s=1e9), b) for a, b in pairs]
        )
    )


parts = st.floats(0.0, 2.0)
uses = st.builds(
    lambda u, n, r, m: dataclasses.replace(
        using(n, r), compute=min(1.0, u), memory_bytes_s=m * 1e11
    ),
    parts, parts, parts, parts,
)  # fmt: skip


@settings(max_examples=30)
@given(
    measured=st.lists(
        st.tuples(uses, uses, st.floats(0.2, 1.05), st.sampled_from("abcd")),
        min_size=20,
        max_size=60,
    ),
    job=uses,
    other=uses,
    more=st.tuples(parts, parts, parts, parts),
)
def test_more_use_of_a_resource_never_predicts_more_speed(measured, job, other, more):
    learned = [
        SharedRun(job=dataclasses.replace(a, application=name), other=b, speed=speed)
        for a, b, speed, name in measured
    ]
    model = SlowdownModel.fit(learned, boosted=False)
    compute, sent, read, memory = more

    def heavier(one):
        return dataclasses.replace(
            one,
            compute=min(1.0, one.compute + compute),
            sent_bytes_s=one.sent_bytes_s + sent * 1e9,
            read_bytes_s=one.read_bytes_s + read * 1e8,
            memory_bytes_s=one.memory_bytes_s + memory * 1e11,
        )

    pairs = [(job, other), (heavier(job), other), (job, heavier(other))]
    light, more_itself, more_beside = model.speeds(pairs)
    assert max(more_itself, more_beside) <= light + 1e-9
