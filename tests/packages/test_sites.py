"""Sites that differ (docs/install-sites.md), tried with the built packages."""

import pytest

from tests.support.container_cluster.package_machine import QUIET

NO_ANSWER = 3  # exit code of selastic


@pytest.fixture
def installed(machine):
    """Return a function that starts Slurm as a site has it, and installs the packages."""

    def install(settings):
        machine.run(f"{settings} /start-site")
        machine.run(f"{QUIET} install --no-install-recommends /packages/*.deb")
        machine.run("cp /usr/share/slurm-elastic/lua/job_submit.lua /etc/slurm/")
        machine.run("systemctl start selasticd")
        machine.wait_for("selastic status")
        return machine

    return install


@pytest.mark.parametrize("machine", ["trixie"], indirect=True)
def test_slurm_without_munge(installed):
    machine = installed("AUTH=slurm SLURMDBD=yes")
    machine.run("sacctmgr -i add user selastic account=root adminlevel=Operator")
    machine.configure("act")
    job = machine.submit_training()
    machine.wait_for_gpus(job, 2)
    # Slurm does not need munged, slurm-elastic does.
    machine.run("pkill munged")
    assert "RUNNING" in machine.run("squeue --noheader --format=%T")
    assert "munge" in machine.run("selastic status", code=NO_ANSWER)
    assert "error: munge does not work here" in machine.run("selastic check || true")


@pytest.mark.parametrize("machine", ["trixie"], indirect=True)
def test_slurm_without_slurmdbd(installed):
    machine = installed("")
    machine.configure("act")
    job = machine.submit_training()
    # Slurm refuses the first change; the job goes on.
    machine.wait_for("grep 'Problem=slurm-refused' /var/log/selasticd.log")
    assert "account selastic is unknown" in machine.run("selastic check || true")
    assert "JobState=COMPLETED" in machine.end_training(job)
