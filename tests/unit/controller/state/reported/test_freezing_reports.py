"""From reports to what policies know of frozen layers, and from their choice back to the job."""

import dataclasses
import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.controller.state.reported import freezing_reports
from slurm_elastic.controller.state.reported.layer_profiles import StoredProfile
from slurm_elastic.core.application import LayerCost
from slurm_elastic.core.directive import Directive
from slurm_elastic.models import effective_progress
from slurm_elastic.models.goodput import GoodputModel
from tests.support.controller.batch_tuning import TuningController, report, running

AUTO = Directive.parse("1-8,freeze=auto,max-penalty=5%")
TOLD = {"layers": 4, "certified": 3, "frozen": 1, "penalty": 0.004, "certified_penalty": 0.04}
#: Rows of four layers, two of them with a normalisation, one with an activation.
ROWS = (
    ("conv1", 0.01, 0.02, 8.0, 90.0),
    ("norm1", 0.001, 0.002, 8.0, 2.0),
    ("conv2", 0.01, 0.02, 8.0, 900.0),
    ("norm2", 0.001, 0.002, 8.0, 2.0),
    ("relu", 0.0, 0.0, 8.0, 0.0),
    ("conv3", 0.01, 0.02, 8.0, 9000.0),
    ("fc", 0.001, 0.002, 8.0, 40.0),
)


def test_examples_in_the_docs():
    assert doctest.testmod(freezing_reports).failed == 0


def test_a_report_says_what_may_be_frozen():
    found = freezing_reports.of(report(**TOLD), AUTO, StoredProfile(ROWS, 16))
    assert (found.layers, found.certified, found.frozen) == (4, 3, 1)
    assert found.penalties == ((1, 0.004), (3, 0.04))
    assert found.max_penalty == 0.05
    assert [c.parameter_bytes for c in found.costs] == [92.0, 902.0, 9000.0, 40.0]
    assert found.costs[1].forward_s == pytest.approx(0.011)


@pytest.mark.parametrize(
    ("changes", "directive"),
    [
        ({}, Directive.parse("1-8")),
        ({"certified": 0}, AUTO),
        ({"certified": None}, AUTO),
        ({"kind": "script"}, AUTO),
        ({"layers": 2}, AUTO),  # contradicts itself
        ({"layers": None}, AUTO),
        ({"frozen": 9}, AUTO),
        ({}, None),
    ],
)
def test_without_consent_certificate_or_sense_nothing_may_be_frozen(changes, directive):
    assert freezing_reports.of(report(**TOLD | changes), directive, None) is None


def test_a_profile_of_another_model_is_not_used():
    for rows in (ROWS[:3], tuple((n, 0.0, 0.0, a, p) for n, _, _, a, p in ROWS)):
        found = freezing_reports.of(report(**TOLD), AUTO, StoredProfile(rows, 16))
        assert found.costs == ()
        assert effective_progress.allowed(found)[-1] == (3, 0.04)


@given(st.lists(st.tuples(*[st.floats(0, 10)] * 3), min_size=1, max_size=12), st.integers(1, 12))
def test_joined_rows_lose_nothing(numbers, layers):
    rows = [(str(i), f, b, 0.0, p) for i, (f, b, p) in enumerate(numbers)]
    found = freezing_reports.costs(rows, layers)
    if layers > len(rows) or not sum(f + b for f, b, _ in numbers):
        assert found == ()
        return
    assert len(found) == layers
    for at, attribute in ((1, "forward_s"), (2, "backward_s"), (4, "parameter_bytes")):
        whole = sum(getattr(c, attribute) for c in found)
        assert whole == pytest.approx(sum(r[at] for r in rows))


def test_times_with_frozen_layers_are_read_as_times_without():
    profile = StoredProfile(ROWS, 16)
    costs = freezing_reports.costs(ROWS, 4)
    assert isinstance(costs[0], LayerCost)
    left = effective_progress.part(freezing_reports.of(report(**TOLD), AUTO, profile), 1)
    whole = report(step_time_s=0.5, micro_step_s=0.2, accumulation=1)
    frozen = dataclasses.replace(
        whole,
        step_time_s=2 * 0.2 * left.compute + 0.1 * left.network,
        micro_step_s=0.2 * left.compute,
        layers=4,
        frozen=1,
    )
    back = freezing_reports.thawed(frozen, profile)
    assert (back.step_time_s, back.micro_step_s) == pytest.approx((0.5, 0.2))
    assert freezing_reports.thawed(whole, profile) == whole
    assert freezing_reports.thawed(frozen, None) == frozen
    measuring = dataclasses.replace(frozen, micro_step_s=None)
    assert freezing_reports.thawed(measuring, profile).step_time_s is None


def test_what_is_believed_of_a_shape_is_not_changed_by_frozen_layers():
    controller, of = TuningController(), running(directive=str(AUTO))
    controller.hear(of, report())
    before = controller.records(of)[7].learned
    controller.hear(of, report(**TOLD | {"step_time_s": 0.02, "micro_step_s": 0.02}))
    after = controller.records(of)[7].learned
    assert after.observations == before.observations
    assert after.prefixes.frozen == 1
    assert controller.records(of)[7].learned is after
    controller.hear(of, report(**TOLD | {"certified": 2}))
    assert controller.records(of)[7].learned.prefixes.certified == 2
    assert before.prefixes is None


def test_the_job_freezes_what_the_policy_counts_with_and_no_more_than_it_may():
    controller, of = TuningController(), running(gpus=1, directive=str(AUTO))
    controller.hear(of, report(profile=ROWS, profile_batch=16))
    # The first convolution saves a fifth; three of them almost two thirds, at 4 %.
    told = report(**TOLD)
    controller.hear(of, told)
    known = controller.records(of)[7].learned
    assert len(known.prefixes.costs) == 4

    def order(**changes):
        newest = report(**TOLD | changes)
        learned = controller.store.freezable(of, newest)
        controller.tuner.answer_report(of, newest, directive=AUTO, learned=learned)
        frozen = controller.outbox.orders(7, 0).frozen
        model = GoodputModel.of(learned)
        assert frozen == effective_progress.prefix(model, learned, gpu_type="a100", nodes=1, gpus=1)
        return frozen

    assert order() == 3
    assert order(certified_penalty=0.06) == 1
    assert order(certified=2, certified_penalty=0.004) == 2
    # Worth nothing: another prefix is as long, and dearer than what it gains.
    small = (*((n, f / 100, b / 100, a, p) for n, f, b, a, p in ROWS[:-1]), ("fc", 1, 2, 8, 40))
    controller.hear(of, report(**TOLD, profile=small, profile_batch=16))
    controller.records(of)
    assert order() == 0
    assert controller.store.freezable(of, report()) is None
