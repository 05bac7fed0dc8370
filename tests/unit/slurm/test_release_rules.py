"""Releases of Slurm: read from what commands print, compared as numbers."""

from pathlib import Path

import pytest

from slurm_elastic.slurm.release_rules import NEWEST, Release

PLUGIN = Path(__file__).parents[3] / "plugins" / "spank" / "slurm_release.c"


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("slurm 24.11.5", Release(24, 11, 5)),
        ("slurm-wlm 25.05.8", Release(25, 5, 8)),
        ("26.05.0-0rc1", Release(26, 5, 0)),
        ("slurm 23.11", Release(23, 11, 0)),
        ("scontrol: error", None),
    ],
)
def test_parse(text, release):
    assert Release.parse(text) == release


def test_releases_are_ordered_by_number_not_by_text():
    assert Release(23, 11, 11) < Release(24, 5) < Release(24, 11, 10) < Release(25, 5)
    assert str(Release(25, 5, 8)) == "25.05.8"


@pytest.mark.parametrize(
    ("version", "fits"),
    [("26.5.0", True), ("26.05.1", True), ("25.11.2", False), ("", False), ("26", False)],
)
def test_pyslurm_fits_a_release_by_its_numbers(version, fits):
    assert Release(26, 5, 3).fits(version) is fits


def test_a_release_that_is_too_old_is_refused_with_the_remedy():
    assert Release(23, 11).refusal() == ""
    assert Release(22, 5, 8).refusal() == (
        "Slurm 22.05.8 is too old: upgrade Slurm to 23.11 or newer"
    )


def test_the_plugin_knows_the_same_newest_release():
    assert f"interface <= SLURM_{NEWEST.major}_{NEWEST.minor:02d})" in PLUGIN.read_text("utf-8")
    assert not Release(26, 5, 12).is_untried
    assert Release(26, 11).is_untried


def test_faults_end_with_the_patch_level_that_mends_them():
    assert Release(24, 11, 5).faults()
    assert not Release(24, 11, 6).faults()
    assert Release(25, 11, 6).faults()
    assert not Release(25, 11, 7).faults()
    assert (Release(25, 5, 8).keeps_licenses, Release(25, 11, 7).keeps_licenses) == (False, True)


def test_a_requeued_job_waits_before_25_11_only():
    assert Release(23, 11, 11).wait_after_requeue_s == Release(25, 5, 8).wait_after_requeue_s == 2.0
    assert Release(24, 11, 5).wait_after_requeue_s == 1.1
    assert Release(25, 11).wait_after_requeue_s == 0.0
    assert Release(26, 5, 3).wait_after_requeue_s == 0.0
