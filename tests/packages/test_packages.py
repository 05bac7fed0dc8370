"""Each package installed, used and removed in a fresh container: `make test-packages`.

They need Docker, Debian's mirror, and what `make packages` has built. `make test` builds those of
trixie, and installs, uses and removes them; the rest is tried on demand.
"""

import pytest

from tests.releases.install_page import InstallPage
from tests.support.container_cluster.package_machine import QUIET

#: Installing packages takes minutes where other tests run beside it.
pytestmark = pytest.mark.timeout(1200)

ACCOUNT_UID = "871"
PLUGSTACK = "/etc/slurm/plugstack.conf"
FETCH_METRICS = """
from urllib.request import urlopen
print(urlopen("http://127.0.0.1:9341/metrics").read().decode())
"""
#: What is loaded only when it is needed.
LIBRARIES = "/usr/lib/slurm-elastic/bin/python3 -I -c 'import highspy, msgspec, prometheus_client'"
INCLUDE = "include /etc/slurm/plugstack.conf.d"


@pytest.mark.parametrize("machine", ["trixie"], indirect=True)
def test_the_page_leads_from_packages_to_status_and_back(machine):
    """Run the commands of docs/install*.md as they stand there; a script stands for systemctl."""
    machine.run("SLURMDBD=yes /start-site")
    before = machine.files()
    page = InstallPage(machine)
    page.first_look()
    page.directive()
    shown = machine.run("selastic check")
    # What holds for every host of its own, and for this release.
    known = ("info:", "warning: Slurm 24.11.5 may crash", "warning: [api] controller")
    assert [line for line in shown.splitlines() if not line.startswith(known)] == []
    page.acting()
    assert "through json (pyslurm is not installed)" in machine.run("selastic ping")
    metrics = machine.run(f"python3 -c '{FETCH_METRICS}'")
    assert "\nselastic_active 1.0\n" in metrics
    assert 'reader="json"' in metrics
    page.remove()
    assert {f for f in machine.files() - before if "elastic" in f} == set()


@pytest.mark.parametrize("machine", ["trixie", "bookworm"], indirect=True)
def test_a_site_installs_uses_and_removes_the_packages(machine):
    before = machine.files()
    # To compile all of Debian's libraries would take longer than the rest; ours are compiled.
    machine.run("ln -sf /bin/true /usr/bin/py3compile")
    machine.run(f"{QUIET} install --no-install-recommends /packages/*.deb")
    assert machine.run("grep -l py3compile /var/lib/dpkg/info/slurm-elastic* || true") == ""
    assert "__pycache__" in machine.run("find /usr/lib/slurm-elastic -name __pycache__ | head -1")

    # The account has the documented uid; the daemon is neither enabled nor started.
    assert machine.run("id -u selastic").strip() == ACCOUNT_UID
    assert machine.run("find /etc/systemd -name 'selasticd*'") == ""
    assert machine.run("pgrep -f '[s]elasticd -D' || true") == ""
    for command in ("selastic", "selasticd", "esrun"):
        assert machine.run(f"{command} --help").lower().startswith("usage:"), command
    machine.run(LIBRARIES)
    # A terminal gets coloured help, from the distribution's rich-click.
    assert "Usage" in machine.run("script -qec 'selastic --help' /dev/null")

    machine.run("cp /usr/share/slurm-elastic/lua/job_submit.lua /etc/slurm/")
    machine.run("mkdir -p /etc/slurm; touch /etc/slurm/plugstack.conf")
    machine.run(f"grep -q '^{INCLUDE}' {PLUGSTACK} || echo '{INCLUDE}/*.conf' >>{PLUGSTACK}")
    machine.run("/start-site")
    if machine.suite == "bookworm":  # its Slurm 22.05 is older than what is supported
        said = machine.run("sbatch --help")
        assert "elastic" not in said
        assert "ncompatible" not in said
        refused = machine.run("selastic check", code=1)
        assert "Slurm 22.05.8 is too old" in refused
        assert "upgrade Slurm to 23.11 or newer" in refused
    else:
        _submit(machine)

    # Removal keeps configuration; sbatch is as before for those who do not use --elastic.
    machine.run("echo '# ours' >>/etc/slurm-elastic/elastic.toml")
    machine.run(f"{QUIET} remove 'slurm-elastic*'")
    assert "# ours" in machine.run("cat /etc/slurm-elastic/elastic.toml")
    assert machine.run("sbatch -o /dev/null --parsable --wrap true").strip().isdigit()
    refused = machine.run("sbatch --elastic=1-2 --wrap true", code=255)
    assert "unrecognized option '--elastic=1-2'" in refused

    machine.run(f"{QUIET} purge 'slurm-elastic*'")
    ours = {"/etc/slurm/job_submit.lua", "/etc/slurm/plugstack.conf"}
    left = {f for f in machine.files() - before if "slurm_elastic" in f or "elastic" in f}
    assert left - ours == set()
    assert machine.run("ls /var/lib/selastic", code=2)


def _submit(machine):
    """Submit an elastic job: the plugin passes the option on, the Lua modules record it."""
    assert "--elastic=MIN-MAX" in machine.run("sbatch --help")
    said = machine.run("cd /tmp && sbatch --elastic=1-2 --gpus=1 -o /dev/null --wrap 'sleep 600'")
    assert "elastic: 1-2 GPUs; starts at 1" in said
    assert "AdminComment={" in machine.run("scontrol show job 1")


@pytest.mark.parametrize("machine", ["el9"], indirect=True)
def test_the_rpm_is_installed_used_and_removed(machine):
    machine.run(f"{QUIET} install --no-install-recommends rpm python3 passwd")
    before = machine.files()
    # Dependencies are in the database of apt, not of rpm.
    machine.run("rpm --install --nodeps /packages/*.rpm")
    assert machine.run("id -u selastic").strip() == ACCOUNT_UID
    for command in ("selastic", "selasticd", "esrun"):
        assert machine.run(f"{command} --help").lower().startswith("usage:"), command
    machine.run(LIBRARIES)
    assert "__pycache__" in machine.run("find /usr/lib/slurm-elastic -name __pycache__ | head -1")
    machine.run("/start-site")
    assert "ncompatible" not in machine.run("sbatch --help")

    machine.run("echo '# ours' >>/etc/slurm-elastic/elastic.toml")
    machine.run("rpm --upgrade --nodeps --replacepkgs /packages/*.rpm")
    assert "# ours" in machine.run("cat /etc/slurm-elastic/elastic.toml")
    assert machine.run("selastic --version").startswith("selastic")
    machine.run("rpm --erase slurm-elastic slurm-elastic-{login,controller,plugins}")
    left = {f for f in machine.files() - before if "elastic" in f}
    assert left == {"/etc/slurm-elastic/elastic.toml.rpmsave"}
