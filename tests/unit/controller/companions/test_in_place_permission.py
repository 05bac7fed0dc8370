import dataclasses

import pytest

from slurm_elastic.controller.companions.in_place_permission import InPlacePermission
from slurm_elastic.controller.companions.placed_companions import PlacedCompanions
from slurm_elastic.core.cluster import JobState
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Report
from slurm_elastic.core.resize_kind import ResizeKind
from tests.support.controller.job_records import job

RUNNING = job({"n1": 4})
HALF = dataclasses.replace(RUNNING, allocation=dataclasses.replace(RUNNING.allocation, half=True))
DECLINED = job({"n1": 4}, directive="1-8,in-place=never")
PENDING = dataclasses.replace(RUNNING, state=JobState.PENDING)
LATE, LOST = Reason("companions-not-joined"), Reason("companion-failed", job="8")


def report(**fields):
    values = {"job_id": 7, "run": 0, "phase": "training", "gpus": 4, "nodes": 1}
    return Report(**(values | {"in_place": True, "restarts": True} | fields))


def permission(of=RUNNING, *, told=report(), placed=None, site_allows=True):  # noqa: B008
    return InPlacePermission(
        job=of,
        directive=of.directive,
        report=told,
        placed=placed or PlacedCompanions(),
        site_allows=site_allows,
    )


def failed(problem, kind=ResizeKind.IN_PLACE):
    placed = PlacedCompanions()
    placed.fail(problem, now=100.0, kind=kind)
    return placed


@pytest.mark.parametrize(
    ("of", "site_allows", "allowed", "is_considered"),
    [
        (RUNNING, True, True, True),
        (RUNNING, False, False, False),
        (PENDING, True, True, False),
        (DECLINED, True, False, True),
        (dataclasses.replace(RUNNING, submission=None), True, False, True),
        (HALF, True, False, False),
    ],
)
def test_site_and_directive_allow_changes_in_place(of, site_allows, allowed, is_considered):
    rules = permission(of, site_allows=site_allows)
    assert (rules.allowed, rules.is_considered) == (allowed, is_considered)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({}, None),
        ({"of": DECLINED}, "in-place-declined"),
        ({"told": None}, "in-place-unknown"),
        ({"told": report(run=1)}, "in-place-unknown"),
        ({"told": report(in_place=None)}, "in-place-unknown"),
        ({"told": report(in_place=False, not_in_place="spatial")}, "in-place-unsupported"),
        ({"placed": failed(LOST)}, "in-place-failed"),
        ({"placed": PlacedCompanions(unsuitable=True), "told": None}, "companions-unsuitable"),
    ],
)
def test_the_obstacle_is_named(options, code):
    obstacle = permission(**options).obstacle(200.0)
    assert (obstacle.code if obstacle else None) == code


@pytest.mark.parametrize(
    ("options", "elsewhere", "on_own"),
    [
        ({}, True, True),
        ({"told": None}, False, False),
        ({"told": report(run=1)}, False, False),
        ({"told": report(restarts=False)}, False, False),
        ({"of": DECLINED}, False, False),
        ({"site_allows": False}, False, False),
        ({"told": report(in_place=False)}, True, True),
        ({"placed": failed(LATE)}, True, True),  # ranks that are started anew need not join
        ({"placed": failed(LATE, ResizeKind.RESTART)}, False, True),
        ({"placed": failed(LOST)}, False, True),
        ({"placed": PlacedCompanions(unsuitable=True)}, False, True),
    ],
)
def test_ranks_are_started_again_elsewhere_or_on_the_jobs_own_gpus(options, elsewhere, on_own):
    rules = permission(**options)
    assert (rules.may_restart(200.0), rules.may_restart(200.0, on_own=True)) == (elsewhere, on_own)


def test_a_failed_change_in_place_is_no_obstacle_for_ever():
    rules = permission(placed=failed(LOST))
    assert rules.obstacle(699.0) is not None
    assert rules.obstacle(700.0) is None
