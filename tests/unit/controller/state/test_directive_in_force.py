import dataclasses

import pytest

from slurm_elastic.controller.state.directive_in_force import (
    allowed_directive,
    directive_in_force,
    with_directive,
)
from slurm_elastic.controller.state.stored_job import StoredJob
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.reason import Reason
from tests.support.controller.job_records import job

SUBMITTED = job({"n1": 4})
RIGID = dataclasses.replace(SUBMITTED, submission=None)


def entry(override="", barred=()):
    stored = StoredJob(7, override=override)
    for gpus in barred:
        stored.trials.shapes.bar(("a100", gpus), Reason("waits"), now=1.0)
    return stored


@pytest.mark.parametrize(
    ("of", "stored", "in_force", "sizes"),
    [
        (SUBMITTED, entry(), "1-8", [1, 2, 3, 4, 5, 6, 7, 8]),
        (SUBMITTED, entry("1-2"), "1-2", [1, 2]),
        (SUBMITTED, entry(barred=[3, 4]), "1-8", [1, 2, 5, 6, 7, 8]),
        (SUBMITTED, entry("2-4", barred=[3]), "2-4", [2, 4]),
        (RIGID, entry(), None, []),
        # Its submission is not known at present.
        (RIGID, entry("2-4", barred=[3]), "2-4", [2, 3, 4]),
    ],
)
def test_shapes_that_failed_stay_in_force_and_are_not_allowed(of, stored, in_force, sizes):
    directive = directive_in_force(stored, of)
    assert directive == (Directive.parse(in_force) if in_force else None)
    allowed = allowed_directive(stored, of, ["a100"])
    assert [n for n in range(1, 9) if allowed and allowed.allows(n, "a100")] == sizes


def test_a_job_gets_the_directive_in_place_of_an_earlier_one():
    directive, submitted = Directive.parse("1-2"), SUBMITTED.submission.directive
    changed = with_directive(SUBMITTED, directive)
    assert (changed.directive, changed.submission) == (directive, SUBMITTED.submission)
    assert with_directive(changed, directive) is changed
    assert with_directive(changed, submitted) == SUBMITTED
    assert with_directive(SUBMITTED, submitted) is SUBMITTED
    assert with_directive(RIGID, None) is RIGID
