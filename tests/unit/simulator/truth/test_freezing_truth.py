"""Freezing in simulations: certified layers over time, time saved, progress lost."""

import dataclasses

import pytest

from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.core.plan import Alternative, Proposal
from slurm_elastic.policies.policy_protocol import Capabilities, load
from slurm_elastic.simulator import simulation
from slurm_elastic.simulator.truth import architectures, freezing_truth
from slurm_elastic.simulator.truth.freezing_truth import BELIEFS, MAX_PENALTY
from slurm_elastic.simulator.truth.frozen_layers import FrozenLayers
from slurm_elastic.simulator.workloads import cluster_text
from slurm_elastic.simulator.workloads.workload import SubmittedJob, Workload
from tests.support.decisions.reasons import told
from tests.support.decisions.synthetic_applications import synthetic_application

KNOWN = ("cifar10", "imagenet", "yolov3", "bert", "deepspeech2")
CLUSTER = cluster_text.parse("t4:2x4,a100:1x8")
PROFILES = {
    "bert": synthetic_application("bert", seconds=60000.0, epochs=12),
    "net": synthetic_application("net", seconds=3000.0),
}


class Still:
    """Four a100 for everybody, for good."""

    capabilities = Capabilities(binding_proposals=True)

    def decide(self, question, state):
        wish = (Alternative(gpu_type="a100", gpus=4, value=1.0, reason=told("told so")),)
        return tuple(Proposal(job_id=j, alternatives=wish) for j in question.jobs), state


class Weighing(Still):
    capabilities = Capabilities(binding_proposals=True, predicts_frozen_layers=True)


def run(*applications, policy=None, freezing=None, **more):
    jobs = [
        SubmittedJob(name=f"{a}-{i}", time_s=60.0 * i, application=a, gpus=2, batch=64)
        for i, a in enumerate(applications)
    ]
    config = Config(controller=ControllerSettings(policy=policy or "still", queue="controller"))
    return simulation.simulate(
        Workload.of("w", jobs),
        PROFILES,
        CLUSTER,
        config=config,
        policy=load(config) if policy else more.pop("by", Still()),
        freezing=freezing,
        **more,
    )


def test_architectures_have_their_published_sizes():
    for name, parameters in (
        ("cifar10", 11.2e6), ("imagenet", 25.6e6), ("yolov3", 61.9e6), ("bert", 109e6),
        ("gptmedium", 355e6),
    ):  # fmt: skip
        layers = architectures.layers(name)
        assert sum(c.parameter_bytes for c in layers) / 4 == pytest.approx(parameters, rel=0.01)
        assert sum(c.forward_s for c in layers) == pytest.approx(1.0)
    assert architectures.layers("bert#7") == architectures.layers("bert")
    assert architectures.layers("unheard of") == ()


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("belief", BELIEFS)
def test_what_is_certified_grows_within_its_bounds(name, belief):
    truth = freezing_truth.of(name, BELIEFS[belief])
    layer_counts = [truth.certified(i / 1000) for i in range(1001)]
    assert not any(layer_counts[:100])
    assert len(set(layer_counts[950:])) == 1
    assert all(n < truth.layers and truth.penalty(n) <= MAX_PENALTY for n in layer_counts)
    thaws = {round(1000 * t) for t in BELIEFS[belief].thaws}
    falls = [i for i in range(1, 1001) if layer_counts[i] < layer_counts[i - 1]]
    assert all(min(abs(i - t) for t in thaws) <= 1 for i in falls)


@pytest.mark.parametrize(
    ("belief", "least", "most"),
    [("pessimistic", 1.0, 1.1), ("central", 1.1, 1.25), ("optimistic", 1.25, 1.5)],
)
def test_the_speedup_on_one_gpu_is_within_what_was_published(belief, least, most):
    """Egeria: 19-43 %; FreezeOut: 20 % at most. All for jobs that freeze what they may."""
    for name in KNOWN:
        truth = freezing_truth.of(name, BELIEFS[belief])
        seconds = 0.0
        for i in range(500):
            frozen = truth.certified(i / 500)
            step, _ = truth.times(1.0, 1.0, frozen)
            seconds += step / (1 - truth.lost(frozen)) / 500
        assert least < 1 / seconds < most


def test_beliefs_are_ordered():
    low, middle, high = (
        run("bert", freezing=b).jobs[0].jct_s for b in ("pessimistic", "central", "optimistic")
    )
    assert high < middle < low
    assert middle < run("bert").jobs[0].jct_s


def test_progress_lost_is_counted_and_prolongs_the_job(monkeypatch):
    result = run("bert", freezing="central")
    (frozen,) = result.freezing
    assert frozen.name == "bert-0"
    assert 0.1 < frozen.layers < 0.6
    assert 0 < frozen.lost < MAX_PENALTY
    assert result.summary()["freezing_lost"] == frozen.lost
    free = dataclasses.replace(BELIEFS["central"], cost=0.0)
    monkeypatch.setitem(freezing_truth.BELIEFS, "central", free)
    cheaper = run("bert", freezing="central")
    assert cheaper.freezing[0].lost == 0.0
    ratio = result.jobs[0].jct_s / cheaper.jobs[0].jct_s
    assert 1 < ratio < 1 + 1.5 * frozen.lost


def test_a_prefix_that_costs_more_than_it_gains_is_only_frozen_where_nobody_weighs(monkeypatch):
    """Penalties within max-penalty, and steps that frozen layers do not shorten."""
    useless = tuple(dataclasses.replace(c, backward_s=0.0) for c in architectures.layers("bert"))
    # Sent is next to nothing either.
    useless = (*(dataclasses.replace(c, parameter_bytes=0.0) for c in useless[:-1]), useless[-1])
    monkeypatch.setattr(architectures, "layers", lambda name: useless)
    blind = run("bert", freezing="central", by=Still())
    weighed = run("bert", freezing="central", by=Weighing())
    assert blind.freezing[0].layers > 0.1
    assert weighed.freezing[0].layers == 0
    assert weighed.jobs[0].jct_s < blind.jobs[0].jct_s


def test_without_the_option_and_without_layers_nothing_changes():
    plain = run("net", "bert")
    assert not plain.freezing
    assert "freezing_lost" not in plain.summary()
    assert not any("freezes nothing" in n for n in plain.notes)
    believed = run("net", "bert", freezing="central")
    assert believed.jobs[0].jct_s == plain.jobs[0].jct_s
    assert believed.jobs[0].gpu_s == plain.jobs[0].gpu_s
    assert [f.name for f in believed.freezing] == ["bert-1"]
    assert any(n.startswith("net: its layers are unknown") for n in believed.notes)


@pytest.mark.parametrize("clock", ["round", "event"])
def test_icefrog_decides_as_sia_while_nobody_freezes_and_finishes_sooner_when_they_do(clock):
    names = ("bert", "net", "bert", "bert")
    sia = run(*names, policy="sia", clock=clock)
    assert run(*names, policy="icefrog", clock=clock).jobs == sia.jobs
    frozen = run(*names, policy="icefrog", freezing="optimistic", clock=clock)
    assert sum(j.jct_s for j in frozen.jobs) < sum(j.jct_s for j in sia.jobs)
    assert frozen.jobs == run(*names, policy="icefrog", freezing="optimistic", clock=clock).jobs


def test_what_a_scheduler_is_told_of_layers_is_what_a_report_can_say():
    truth = freezing_truth.of("bert", BELIEFS["central"])
    layers = FrozenLayers(truth, weighs=False, compat=False)
    frozen_counts = set()
    for i in range(100):
        if layers.certify(i / 100):
            layers.freeze(None, gpu_type="a100", nodes=1, gpus=4)
        prefixes = layers.prefixes
        frozen_counts.add(prefixes.frozen)
        assert prefixes.frozen == prefixes.certified
        assert {n for n, _ in prefixes.penalties} <= {prefixes.frozen, prefixes.certified}
    assert len(frozen_counts) > 5
