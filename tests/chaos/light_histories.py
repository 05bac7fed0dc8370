"""What light trainings (tests/support/light_training) must show, beside what all must. Pure.

A change in place neither loses nor repeats a step: within one attempt the steps rise by one.
"""

from __future__ import annotations

from collections import defaultdict

from tests.chaos.histories import Attempt, History
from tests.support.container_cluster.light_trainings import expected_steps


def light_reference(samples: int, epochs: int, batch: int) -> History:
    """Return the history of an undisturbed training."""
    history = History()
    for step, (indices, loss) in enumerate(expected_steps(samples, epochs, batch), start=1):
        history.samples[step, (0, 0)].update(indices)
        history.losses[step, (0, 0)] = loss
    return history


def uneven_steps(history: History) -> list[str]:
    """Return the steps of an attempt that do not follow the one before, in words."""
    steps: dict[Attempt, list[int]] = defaultdict(list)
    for step, attempt in history.losses:
        steps[attempt].append(step)
    uneven = []
    for attempt, done in sorted(steps.items()):
        if attempt[1]:
            uneven.append(f"{len(done)} steps twice in one attempt, the first is {min(done)}")
        elif sorted(done) != list(range(min(done), max(done) + 1)):
            missing = sorted(set(range(min(done), max(done) + 1)) - set(done))
            uneven.append(f"an attempt lacks steps {missing[:3]} between two others")
    return uneven
