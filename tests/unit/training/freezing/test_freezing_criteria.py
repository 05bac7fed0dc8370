"""Criteria, penalty and safeguards of freezing on artificial curves."""

import doctest
import math
import random

import pytest
import torch

from slurm_elastic.core.directive import DirectiveError
from slurm_elastic.models import frozen_penalty as penalties
from slurm_elastic.models.frozen_penalty import LEAST, Descent, cap, compound
from slurm_elastic.training.freezing import criteria
from slurm_elastic.training.freezing.criteria import (
    CriterionInputs,
    GradientChange,
    GradientNorm,
    Plasticity,
    similarity_loss,
)
from slurm_elastic.training.freezing.freezer import Freezing, freezing_settings
from slurm_elastic.training.freezing.guards import CriticalPeriod, ThawGuard, batch_changed


def look(frozen: int = 0, **fields) -> CriterionInputs:
    defaults = {"layers": 4, "epoch": 0, "progress": 0.5, "gradients": []}
    return CriterionInputs(frozen=frozen, **(defaults | fields))


def passes(criterion: Plasticity, curve, frozen: int = 0) -> int | None:
    """Return the number of the first reading after which the front layer has converged."""
    for count, value in enumerate(curve, start=1):
        if criterion.see(look(frozen, plasticity=value)) > frozen:
            return count
    return None


@pytest.mark.parametrize("module", [penalties, criteria])
def test_examples_in_docstrings_hold(module) -> None:
    assert doctest.testmod(module).failed == 0


def test_plasticity_that_falls_and_flattens_passes_when_it_is_flat() -> None:
    curve = [math.exp(-t / 8) for t in range(200)]
    at = passes(Plasticity(window=5), curve)
    assert at is not None
    # Flat means a fifth of the first slope: exp(-t/8) has that after 8 ln 5 readings; smoothing
    # and the five passes in a row come on top.
    assert 8 * math.log(5) < at < 8 * math.log(5) + 15


def test_plasticity_that_keeps_falling_or_moving_does_not_pass() -> None:
    assert passes(Plasticity(window=5), [100.0 - t for t in range(100)]) is None
    assert passes(Plasticity(window=5), [10.0 * (t % 12 < 6) for t in range(200)]) is None


def test_plasticity_of_a_layer_that_never_moves_passes() -> None:
    assert passes(Plasticity(window=3), [0.0] * 20) is not None


def test_each_layer_is_checked_from_the_start_and_faster_after_a_thaw() -> None:
    curve = [math.exp(-t / 4) for t in range(100)]
    criterion = Plasticity(window=8)
    first = passes(criterion, curve)
    assert first is not None
    assert passes(criterion, curve, frozen=1) == first
    criterion.thawed()
    again = passes(criterion, curve)
    assert again is not None
    assert again < first


def test_plasticity_continues_from_its_state() -> None:
    curve = [math.exp(-t / 8) for t in range(200)]
    whole = passes(Plasticity(window=5), curve)
    first, second = Plasticity(window=5), Plasticity(window=9)
    assert passes(first, curve[:10]) is None
    second.load_state_dict(first.state_dict())
    assert passes(second, curve[10:]) == whole - 10


def test_the_similarity_loss_ignores_scale_and_grows_with_another_relation() -> None:
    generator = torch.Generator().manual_seed(0)
    activation = torch.randn(8, 3, 5, 5, generator=generator)
    assert similarity_loss(activation, activation * 7) == pytest.approx(0, abs=1e-10)
    assert similarity_loss(activation, torch.randn(8, 3, 5, 5, generator=generator)) > 1e-3


def gradients(*norms: float) -> list[list[torch.Tensor]]:
    return [[torch.tensor([norm, 0.0])] for norm in norms]


def test_gradient_change_takes_the_layers_before_the_first_at_the_median() -> None:
    criterion = GradientChange(intervals=4)
    for progress in (0.05, 0.1):
        assert criterion.see(look(progress=progress, gradients=gradients(1, 1, 1, 1))) == 0
    # The first interval is only remembered.
    for progress in (0.3, 0.4):
        found = look(progress=progress, gradients=gradients(1.01, 1.1, 1.8, 1.9))
        assert criterion.see(found) == 0
    # Changes 1 %, 10 %, 80 %, 90 %; the median is 45 %.
    assert criterion.see(look(progress=0.6, gradients=gradients(1, 1, 1, 1))) == 2
    criterion.see(look(2, progress=0.61, gradients=gradients(1, 1)))
    again = criterion.see(look(2, progress=0.8, gradients=gradients(1, 1)))
    assert again >= 2
    criterion.thawed()
    assert criterion.see(look(progress=0.81, gradients=gradients(1, 1, 1, 1))) == 0


def test_gradient_norm_stops_before_the_smallest_within_its_cap() -> None:
    criterion = GradientNorm(alpha=0.5)
    assert criterion.see(look(gradients=gradients(3, 1, 2, 5))) == 0
    assert criterion.see(look(epoch=1, gradients=gradients(3, 1, 2, 5))) == 1
    criterion = GradientNorm(alpha=0.5)
    criterion.see(look(gradients=gradients(4, 3, 2, 1)))
    assert criterion.see(look(epoch=1, gradients=gradients(4, 3, 2, 1))) == 2


def test_the_cap_equals_its_closed_form() -> None:
    assert [cap(10, t, alpha=0.5) for t in range(6)] == [0, 5, 8, 9, 9, 9]
    assert cap(3, 1) == 1  # 3 x (1 - 2/3) is 1, not a rounding error more


def test_the_penalty_is_unbiased_by_gradient_noise() -> None:
    rng = random.Random(3)
    descent = Descent(layers=2)
    true = torch.tensor([0.1, 1.0])  # per dimension: the front layer has 1 % of the energy

    def step() -> torch.Tensor:
        return true + torch.tensor([[rng.gauss(0, 0.5) for _ in range(2)] for _ in range(300)])

    for _ in range(60):
        descent.add((step() * step()).sum(0).tolist())
    # Squared norms would say 0.26 / 1.51 = 17 %.
    assert 0.0 < descent.penalty(1) < 0.04
    assert descent.penalty(2) == 1.0


def test_the_penalty_is_high_after_few_measurements() -> None:
    descent = Descent(layers=2)
    for _ in range(LEAST - 1):
        descent.add([0.0, 1.0])
    assert descent.penalty(1) == 1.0
    descent.add([math.nan, 1.0])
    assert descent.penalty(1) == 1.0
    descent.add([0.0, 1.0])
    assert descent.penalty(1) == 0.0
    other = Descent(layers=2)
    other.load_state_dict(descent.state_dict())
    assert other.state_dict() == descent.state_dict()
    for _ in range(30):
        descent.add([0.0, -1.0])  # the loss does not descend at all
    assert descent.penalty(1) == 1.0
    assert compound(0.5, 0.5) == 0.75


def test_the_bootstrap_period_ends_when_the_loss_settles() -> None:
    bootstrap = CriticalPeriod(window=4, settled=0.1)
    for loss in [8.0] * 4 + [4.0] * 4 + [3.7] * 3:
        bootstrap.observe(loss)
        assert not bootstrap.over
    bootstrap.observe(3.7)
    assert bootstrap.over
    bootstrap.reset()
    assert not bootstrap.over


def test_rates_that_rise_or_fall_far_are_reasons_to_thaw() -> None:
    thaw = ThawGuard(worse=0.02)
    assert thaw.check_rates([0.1, 0.01]) == ""
    assert thaw.check_rates([0.05, 0.01]) == ""
    assert "rose from 0.01 to 0.011" in thaw.check_rates([0.05, 0.011])
    thaw.frozen()
    assert thaw.check_rates([0.006, 0.011]) == ""
    assert "fell from 0.05 to 0.005 since the freeze" in thaw.check_rates([0.005, 0.011])
    thaw.thawed()
    assert thaw.check_rates([0.0001, 0.011]) == ""


def test_a_worse_validation_loss_is_a_reason_to_thaw() -> None:
    thaw = ThawGuard(worse=0.02)
    assert [thaw.check_validation(v) for v in (1.0, 0.8, 0.9)] == ["", "", ""]
    assert not thaw.regressed
    assert thaw.check_validation(1.2) == "the validation loss is 1.05, it was 0.9"
    assert thaw.regressed
    thaw.check_validation(0.7)
    assert not thaw.regressed


def test_a_batch_that_doubles_or_halves_thaws_all_layers() -> None:
    assert batch_changed(64, 128)
    assert batch_changed(128, 64)
    assert not batch_changed(100, 199)


def test_the_directive_takes_precedence_over_the_script() -> None:
    def settings(freeze="off", **environment: str):
        return freezing_settings(freeze, environment)

    assert settings() == (None, "")
    assert settings("auto") == (Freezing(), "")
    assert settings(SLURM_SPANK_ELASTIC="2-8,freeze=auto") == (Freezing(), "")
    own = Freezing(criterion="gradient-norm", max_penalty=0.5)
    found, _ = settings(own, SLURM_SPANK_ELASTIC="2-8,freeze=auto,max-penalty=2%")
    assert found == Freezing(criterion="gradient-norm", max_penalty=0.02)
    assert settings(SLURM_SPANK_ELASTIC="2-8") == (None, "")
    assert settings("auto", SLURM_SPANK_ELASTIC="2-8") == (
        None,
        "no freezing: --elastic=2-8 does not say freeze=auto",
    )
    assert settings(SLURM_ELASTIC="1,freeze=auto") == (Freezing(), "")
    # In a job that variable may have lost against the command line.
    assert settings(SLURM_ELASTIC="1,freeze=auto", SLURM_JOB_ID="7") == (None, "")


@pytest.mark.parametrize(
    ("invalid_call", "message"),
    [
        (lambda: freezing_settings("on", {}), "freeze: 'on' is invalid: expected 'off'"),
        (lambda: Freezing(criterion="egeria"), "'egeria' is invalid: expected one of plasticity"),
        (lambda: Freezing(max_penalty=2.0), "max_penalty 2.0 is invalid: expected 0 to 1"),
        (lambda: Freezing(every=0), "every 0 is invalid: expected at least 1"),
        (lambda: Plasticity(window=1), "window 1 is invalid"),
        (lambda: Descent(layers=2).add([1.0]), "1 products for 2 layers"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(invalid_call, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        invalid_call()


def test_an_invalid_directive_is_named_in_the_error() -> None:
    with pytest.raises(DirectiveError, match="--elastic=2-x"):
        freezing_settings("off", {"SLURM_SPANK_ELASTIC": "2-x"})
