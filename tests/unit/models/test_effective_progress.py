"""Effective progress: goodput with frozen layers, and the choice of the prefix."""

import dataclasses
import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.core.application import (
    Application,
    JobClass,
    LayerCost,
    Learned,
    Noise,
    Observation,
    Prefixes,
    TypeProfile,
)
from slurm_elastic.models import effective_progress
from slurm_elastic.models.effective_progress import (
    ConfigurationSet,
    allowed,
    part,
    prefix,
    progress,
    thawed,
)
from slurm_elastic.models.goodput import GoodputModel
from slurm_elastic.models.goodput_tables import WHOLE, RemainingWork

T4 = TypeProfile("t4", least=4, most=64, single=100.0)
A100 = TypeProfile("a100", least=4, most=64, single=300.0)
NET = Application(name="net", initial_batch=32, max_batch=1024, batch=256, types=(T4, A100))
SEEN = (
    Observation("t4", 1, 1, 32, 0.33, 0.32),
    Observation("t4", 1, 2, 32, 0.40, 0.32),
    Observation("t4", 1, 4, 64, 0.75, 0.62),
    Observation("t4", 2, 8, 32, 0.50, 0.32),
)
EVEN = tuple(LayerCost(1.0, 2.0, 10.0) for _ in range(10))
#: Front layers compute, rear layers are sent: as in CNNs.
CNN = tuple(LayerCost(1.0, 2.0, 1.0 + 20.0 * (i > 7)) for i in range(10))
SHAPES = ConfigurationSet(
    ("t4", "t4", "t4", "t4", "a100", "a100"), (1, 1, 1, 2, 1, 1), (1, 2, 4, 8, 1, 8)
)


def freezes(*penalties, certified=9, costs=EVEN, most=0.05, layers=10):
    return Prefixes(
        layers=layers, certified=certified, penalties=penalties, max_penalty=most, costs=costs
    )


def learned(prefixes=None, application=NET, seen=SEEN):
    return Learned(application, seen, Noise(1.0, 200.0), prefixes)


def ask(prefixes=None, **more):
    known = learned(prefixes, **more)
    model = GoodputModel.of(known)
    return model, progress(model, known, SHAPES)


def test_examples_in_the_docs():
    assert doctest.testmod(effective_progress).failed == 0


def test_without_frozen_layers_it_is_goodput():
    model, plain = ask()
    assert np.abs(plain.best / model.goodputs_of(SHAPES) - 1).max() < 1e-12
    assert not plain.prefix.any()
    explicit = model.goodputs_of(SHAPES, RemainingWork(1.0, 1.0))
    assert np.abs(explicit / model.goodputs_of(SHAPES) - 1).max() < 1e-12
    assert part(freezes((4, 0.01)), 0) == WHOLE
    # What would cost all progress is not chosen, and changes nothing.
    _, dear = ask(freezes((4, 1.0), most=1.0))
    assert np.abs(dear.best / plain.best - 1).max() < 1e-12
    assert not dear.prefix.any()


def test_a_prefix_takes_away_backward_passes_and_gradients_and_costs_its_penalty():
    rigid_batch = dataclasses.replace(NET, job_class=JobClass.STRONG_SCALING, batch=128)
    known = learned(freezes((5, 0.02)), rigid_batch)
    model = GoodputModel.of(known)
    found = progress(model, known, ConfigurationSet(("t4",), (1,), (4,)))
    fit = model.parameters("t4")
    # Half of all backward passes are two thirds of the half; a tenth of a message is latency.
    compute = fit.alpha_c + fit.beta_c * (2 / 3) * 32
    network = fit.network_time(1, 4) * (0.1 + 0.9 / 2)
    step = (compute**fit.gamma + network**fit.gamma) ** (1 / fit.gamma)
    efficiency = (200 + 1) / (200 + 128 / 32)
    assert found.best[0] == pytest.approx(128 / step * efficiency * 0.98, rel=1e-9)
    assert found.prefix.tolist() == [5]


def test_only_what_is_certified_known_and_affordable_may_be_frozen():
    assert allowed(None) == ((0, 0.0),)
    several = freezes((2, 0.001), (5, 0.01), (7, 0.2), (9, 0.02))
    assert allowed(several) == ((0, 0.0), (2, 0.001), (5, 0.01), (9, 0.02))
    assert allowed(dataclasses.replace(several, certified=5)) == allowed(several)[:3]
    # The last layer always trains.
    assert allowed(freezes((10, 0.0), certified=10)) == ((0, 0.0),)


def test_a_prefix_that_gains_less_than_it_costs_is_not_frozen():
    tiny = (LayerCost(0.01, 0.02, 1.0), *EVEN[1:])
    _, found = ask(freezes((1, 0.04), costs=tiny))
    assert not found.prefix.any()
    _, found = ask(freezes((1, 0.04), (6, 0.045), costs=tiny))
    assert (found.prefix == 6).all()


def test_more_gpus_gain_a_frozen_job_less_when_rear_layers_are_what_is_sent():
    _, plain = ask()
    _, frozen = ask(freezes((8, 0.001), costs=CNN))
    assert (frozen.prefix == 8).all()
    assert frozen.best[3] / frozen.best[0] < 0.95 * plain.best[3] / plain.best[0]


@pytest.mark.parametrize(
    "known",
    [
        learned(freezes((5, 0.01), costs=())),
        learned(freezes((5, 0.01)), seen=()),
        learned(freezes((5, 0.01)), dataclasses.replace(NET, job_class=JobClass.RIGID, gpus=4)),
    ],
    ids=["no profile", "never ran", "rigid"],
)
def test_what_cannot_be_predicted_freezes_all_that_it_may_and_counts_as_it_is(known):
    model = GoodputModel.of(known)
    found = progress(model, known, SHAPES)
    assert (found.best == model.goodputs_of(SHAPES)).all()
    assert (found.prefix == 5).all()
    assert prefix(model, known, gpu_type="t4", nodes=1, gpus=4) == 5
    assert prefix(model, known, gpu_type="unknown", nodes=1, gpus=4) == 5


@settings(max_examples=60)
@given(
    st.lists(st.floats(0, 1), min_size=10, max_size=10),
    st.integers(0, 10),
    st.floats(0, 1),
    st.lists(st.tuples(*[st.floats(0.01, 10)] * 3), min_size=10, max_size=10),
)
def test_it_never_loses_and_never_freezes_more_than_it_may(penalties, certified, most, costs):
    prefixes = Prefixes(
        layers=10,
        certified=certified,
        penalties=tuple(enumerate(penalties, start=1)),
        max_penalty=most,
        costs=tuple(LayerCost(*c) for c in costs),
    )
    model, found = ask(prefixes)
    goodput = model.goodputs_of(SHAPES)
    assert (found.best >= goodput).all()
    assert (found.best[found.prefix == 0] == goodput[found.prefix == 0]).all()
    for frozen in found.prefix.tolist():
        assert frozen <= min(certified, 9)
        assert not frozen or penalties[frozen - 1] <= most
    for i, (kind, nodes, gpus) in enumerate(
        zip(SHAPES.types, SHAPES.nodes, SHAPES.gpus, strict=True)
    ):
        alone = prefix(model, learned(prefixes), gpu_type=kind, nodes=nodes, gpus=gpus)
        assert alone == found.prefix[i]


def test_a_measurement_with_frozen_layers_is_read_as_one_without():
    whole = Observation("t4", 1, 4, 64, 0.75, 0.62)
    left = part(freezes((6, 0.0), costs=CNN), 6)
    frozen = dataclasses.replace(
        whole, step_s=0.62 * left.compute + 0.13 * left.network, micro_step_s=0.62 * left.compute
    )
    back = thawed(frozen, left)
    assert (back.step_s, back.micro_step_s) == pytest.approx((0.75, 0.62))
    assert thawed(whole, WHOLE) == whole


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"penalties": ((1, 1.5),)}, "penalty of 1 layers: 1.5 must be a fraction"),
        ({"penalties": ((1, -0.1),)}, "penalty of 1 layers: -0.1"),
        ({"penalties": ((1, float("nan")),)}, "penalty of 1 layers: nan"),
        ({"penalties": ((3, 0.1), (2, 0.1))}, "must ascend"),
        ({"penalties": ((11, 0.1),)}, "must ascend within the layers"),
        ({"max_penalty": 2.0}, "max_penalty: 2 must be a fraction"),
        ({"certified": 11}, "certified=11: must be from 0 to the 10 layers"),
        ({"frozen": -1}, "frozen=-1"),
        ({"costs": EVEN[1:]}, "costs of 9 layers, but the model has 10"),
        ({"costs": (LayerCost(-1.0, 2.0, 1.0), *EVEN[1:])}, "costs of layer 1"),
        ({"costs": (LayerCost(0.0, 0.0, 1.0),) * 10}, "take no time at all"),
    ],
)
def test_prefixes_that_cannot_be_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(freezes((1, 0.01)), **changes)
