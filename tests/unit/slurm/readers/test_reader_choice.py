"""Choice between pyslurm and JSON: by release, by trial, or by the configuration."""

import os

import pytest

from slurm_elastic.slurm.readers import reader_choice
from slurm_elastic.slurm.readers.reader_choice import choose, connect
from slurm_elastic.slurm.scontrol import SlurmUnreachableError


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Set Slurm's release and answer, pyslurm's version, and how the trial of pyslurm ends."""

    def install(release="24.11.5", pyslurm="24.11.0", trial="import sys", answer="true"):
        command = tmp_path / "scontrol"
        command.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && exec echo slurm {release}\n{answer}\n'
        )
        command.chmod(0o755)
        (tmp_path / "trial_of_pyslurm.py").write_text(trial)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(reader_choice, "_PROBE", "trial_of_pyslurm")
        monkeypatch.setattr(reader_choice, "pyslurm_version", lambda: pyslurm)

    return install


def test_pyslurm_that_fits_is_used(site):
    site()
    assert str(choose()) == "pyslurm (24.11.0 fits Slurm 24.11.5)"


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        ({"pyslurm": ""}, "pyslurm is not installed"),
        ({"release": "25.05.8"}, "pyslurm 24.11.0 does not fit Slurm 25.05.8"),
        (
            {"trial": "import os; os.kill(os.getpid(), 11)"},
            "pyslurm 24.11.0 crashed when tried (SIGSEGV)",
        ),
        (
            {"trial": "raise ImportError('no libslurm')"},
            "pyslurm 24.11.0 failed when tried (ImportError: no libslurm)",
        ),
    ],
)
def test_json_is_read_where_pyslurm_cannot_be_used(site, installed, reason):
    site(**installed)
    assert str(choose()) == f"json ({reason})"
    with pytest.raises(SlurmUnreachableError, match="install one that fits, or set reader"):
        choose("pyslurm")


def test_releases_are_compared_as_numbers(site):
    site(release="26.05.3", pyslurm="26.5.0")
    assert choose().name == "pyslurm"


def test_json_can_be_forced(site):
    site(trial="raise SystemExit(1)")
    assert str(choose("json")) == 'json ([slurm] reader = "json")'


def test_a_release_that_is_too_old_is_refused(site):
    site(release="22.05.8")
    with pytest.raises(SlurmUnreachableError, match=r"Slurm 22\.05\.8 is too old: upgrade"):
        choose()


SILENT = "echo Unable to contact slurm controller >&2; exit 1"


def test_pyslurm_is_not_trusted_before_slurmctld_has_answered(site):
    site(answer=SILENT, trial="import os; os.kill(os.getpid(), 11)")
    assert str(choose()) == "undecided (slurmctld does not answer)"


def test_the_reader_is_chosen_when_slurmctld_answers(site):
    site(answer=SILENT)
    reader = connect(reservation_prefix="selastic_")
    with pytest.raises(SlurmUnreachableError, match=r"^slurmctld: .*Unable to contact"):
        reader.settings()
    assert reader.choice.name == "undecided"
    site(answer="echo ClusterName = c", trial="import os; os.kill(os.getpid(), 11)")
    assert reader.settings()["cluster_name"] == "c"
    assert str(reader.choice) == "json (pyslurm 24.11.0 crashed when tried (SIGSEGV))"


def test_a_reader_that_is_forced_waits_for_slurmctld(site):
    site(answer=SILENT, pyslurm="")
    assert connect(reservation_prefix="selastic_", setting="json").choice.name == "json"
    site(answer=SILENT, trial="raise SystemExit(1)")
    assert choose("pyslurm").name == "undecided"


def test_slurmctld_that_stops_in_the_trial_does_not_make_pyslurm_a_misfit(site, tmp_path):
    stopped = tmp_path / "stopped"
    site(
        answer=f"[ ! -e {stopped} ] || {{ {SILENT}; }}",
        trial=f"open({str(stopped)!r}, 'w'); raise SystemExit('no answer')",
    )
    assert choose().name == "undecided"
