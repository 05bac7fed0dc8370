"""Progress as a beta distribution: learned from finished trainings, better than a constant one."""

import numpy as np
import pytest

from benchmarks.ones.beta_progress import (
    BetaProgress,
    EpochRecord,
    mean_log_likelihood,
)


def training(epochs, *, epoch_size=1000.0, loss=2.0):
    """Return the epochs of a training, whose loss falls with its progress."""
    return [
        EpochRecord(
            epoch_size=epoch_size,
            epochs=e,
            initial_loss=loss,
            loss=loss * (1 - 0.8 * e / epochs),
            accuracy=0.9 * e / epochs,
            progress=e / (epochs + 1),
        )
        for e in range(1, epochs + 1)
    ]


def test_a_training_that_was_not_learned_from_is_predicted_by_its_loss():
    known = [r for epochs in (6, 12, 24, 48) for r in training(epochs)]
    model = BetaProgress.fit(known)
    unseen = training(30)
    half = unseen[14]
    assert model.expected([half])[0] == pytest.approx(half.progress, abs=0.15)
    ones = np.ones(len(unseen))
    constant = mean_log_likelihood(ones, ones, np.array([r.progress for r in unseen]))
    assert model.log_likelihood(unseen) > constant
    drawn = model.drawn(unseen, np.random.default_rng(0))
    assert ((drawn > 0) & (drawn < 1)).all()


def test_no_finished_training_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        BetaProgress.fit([])
