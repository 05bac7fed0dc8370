"""The commands of docs/install*.md, run as they stand there on fresh machines of each release.

    make packages PACKAGES=trixie
    python -m tests.releases.install_page                 # each release at hand; prints a table
    python -m tests.releases.install_page 25.11 --pyslurm

A machine is a container of Debian trixie with systemd, a Slurm of one host, and the packages. One
machine of each release has Slurm's commands on the path, one has Slurm under a prefix.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.releases.release_trial import SERIES, missing
from tests.support.container_cluster.package_machine import (  # puts clusterlib on the path
    PREFIX,
    QUIET,
    PackageMachine,
)

# isort: split

from clusterlib.slurm_build import DEBIAN_RELEASE, choose

PAGES = [
    Path(__file__).parents[2] / "docs" / f"install{page}.md" for page in ("", "-sites", "-library")
]
PACKAGES = "trixie"
CONFIGURATION = "/etc/slurm-elastic/elastic.toml"
#: Questions of apt-get are answered; what only recommends is left out, as there is no use for it.
ANSWERS = """
set -e
cd /tmp
export DEBIAN_FRONTEND=noninteractive
apt-get() { command apt-get --yes --no-install-recommends -o Dpkg::Use-Pty=0 "$@"; }
"""
#: Files of a second cluster on the same host.
SECOND_CLUSTER = """
sed -e 's/^ClusterName=.*/ClusterName=b/' -e 's/^NodeName=n[12].*//' -e 's/Nodes=ALL/Nodes=b1/' \\
    -e 's|/var/lib/slurm$|/var/lib/slurm-b|' -e 's/slurmctld\\.log/slurmctld-b.log/' \\
    -e 's/slurmctld\\.pid/slurmctld-b.pid/' /etc/slurm/slurm.conf >/etc/slurm/b.conf
echo "NodeName=b1 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=17011 CPUs=8 RealMemory=1000 \\
Gres=gpu:a100:2
SlurmctldPort=16817" >>/etc/slurm/b.conf
echo 'NodeName=b1 Name=gpu Type=a100 File=/dev/fakegpu[0-1]' >>/etc/slurm/gres.conf
mkdir -p /var/spool/b1 /var/lib/slurm-b /var/lib/selastic-b
chown slurm: /var/lib/slurm-b
chown selastic: /var/lib/selastic-b
sacctmgr -i add cluster b
export SLURM_CONF=/etc/slurm/b.conf
slurmctld -i
slurmd -N b1
cat >/etc/slurm-elastic/b.toml <<T
[controller]
state_dir = "/var/lib/selastic-b"
[api]
listen = "127.0.0.1:7322"
controller = "127.0.0.1:7322"
T
"""
#: A newer version of the same packages in /tmp.
NEWER_PACKAGES = """
for package in /packages/*.deb; do
    rm -rf /tmp/newer
    dpkg-deb --raw-extract "$package" /tmp/newer
    version=$(sed -n 's/^Version: //p' /tmp/newer/DEBIAN/control)
    sed -i "s/$version/$version+1/" /tmp/newer/DEBIAN/control
    dpkg-deb --build /tmp/newer /tmp >/dev/null
done
rm -rf /tmp/newer
"""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of commands or settings on the page.

    Attributes:
        section: words at the beginning of the paragraph or heading above it.
        lines: its text.
    """

    section: str
    lines: str


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of a page, each with its heading, or the bold words above it."""
    section = ""
    parts = re.split(r"^```\n", text, flags=re.MULTILINE)
    for number, part in enumerate(parts):
        if number % 2:
            yield Block(section=section, lines=part)
            continue
        for match in re.finditer(r"^#+ (.+)$|^\*\*(.+?)[,.*]", part, re.MULTILINE):
            section = match[1] or match[2]


def pages_text() -> str:
    """Return the text of all pages on installing."""
    return "\n".join(page.read_text("utf-8") for page in PAGES)


def page_commands(section: str, number: int = 0) -> str:
    """Return a block of docs/install*.md by its section, and by its number in that."""
    found = [b.lines for b in blocks(pages_text()) if b.section == section]
    assert number < len(found), f"docs/install*.md have no block {number} in {section}"
    return found[number]


class InstallPage:
    """Sections of the page on one machine, in their order.

    Args:
        machine: with a Slurm that has been started.
    """

    def __init__(self, machine: PackageMachine) -> None:
        self.machine = machine
        self.job = ""

    def commands(self, section: str, number: int = 0) -> str:
        """Run a block of the page; return what it prints."""
        return self.machine.run(ANSWERS + page_commands(section, number))

    def inline(self, *commands: str) -> str:
        """Run commands that stand in a sentence of a page."""
        text = pages_text()
        for command in commands:
            assert f"`{command}`" in text, f"docs/install*.md have no {command}"
        return self.machine.run(ANSWERS + "\n".join(commands))

    def first_look(self) -> None:
        """From packages to `selastic check`."""
        self.machine.run("cp /packages/*.deb /tmp")
        said = self.commands("Five minutes to a first look")
        assert "error:" not in said, said

    def directive(self) -> None:
        """sbatch takes --elastic, and the plan shows the job."""
        self.machine.run("rm $(dirname ${SLURM_CONF:-/etc/slurm/slurm.conf})/job_submit.lua")
        said = self.commands("The directive")
        assert "elastic: 1-2 GPUs" in said, said
        assert "ncompatible" not in said, said
        self.machine.wait_for("selastic status | grep 1-2")
        self.machine.run("scancel --user=root")

    def acting(self) -> None:
        """First `advise` in one partition, then a job that grows."""
        settings = [line.partition("#")[0].strip() for line in self._settings()]
        for line in settings:
            key = line.partition(" = ")[0]
            edit = (
                f"sed -i '/^\\[controller\\]/,/^\\[api\\]/s/^#{key} = .*/{line}/' {CONFIGURATION}"
            )
            self.machine.run(f"{edit}; grep -F '{line}' {CONFIGURATION}")
        self.inline("systemctl reload selasticd", "selastic plan")
        self.machine.wait_for("selastic status | grep -i advise")
        self.machine.configure("act")
        self.job = self.machine.submit_training()
        self.machine.wait_for_gpus(self.job, 2)

    def _settings(self) -> list[str]:
        section, *lines = page_commands("From observing to acting").splitlines()
        assert section == "[controller]"
        return lines

    def upgrade(self) -> None:
        """A newer version of the packages: the job runs on, and is resized again."""
        self.machine.run(
            "rm /tmp/slurm-elastic*.deb; echo '# ours' >>/etc/slurm-elastic/elastic.toml"
        )
        self.machine.run(NEWER_PACKAGES)
        before = self._restarts()
        self.inline("apt-get install ./slurm-elastic*.deb", "systemctl restart selasticd")
        self.inline("touch /etc/slurm/job_submit.lua")
        self.machine.wait_for("selastic status | grep train.sbatch")
        assert self._restarts() == before
        assert "+1" in self.machine.run("dpkg-query --show 'slurm-elastic*'")
        assert "# ours" in self.machine.run(f"cat {CONFIGURATION}")
        for size in (1, 2):
            self.machine.run(f"selastic update {self.job} --elastic=1-{size}")
            self.machine.wait_for_gpus(self.job, size)

    def _restarts(self) -> str:
        return self.machine.run(f"scontrol show job {self.job} | grep -o 'Restarts=[0-9]*'")

    def several_clusters(self) -> None:
        """A second cluster of the same slurmdbd, and its controller, on the same host."""
        self.machine.run(SECOND_CLUSTER)
        start, status = page_commands("Several clusters").splitlines()
        account = "setpriv --reuid selastic --regid selastic --init-groups"
        start = start.replace(" selasticd ", f" {account} selasticd ", 1)
        self.machine.run(f"{start} >/var/log/selasticd-b.log 2>&1 & echo $! >/run/selasticd-b.pid")
        self.machine.wait_for(status)
        submit = "sbatch --elastic=1-2 --gpus=1 --wrap 'sleep 600' --job-name=of-b"
        said = self.machine.run(f"cd /tmp; SLURM_CONF=/etc/slurm/b.conf {submit}")
        assert "elastic: 1-2 GPUs" in said, said
        self.machine.wait_for(f"{status} | grep of-b")
        assert "of-b" not in self.machine.run("selastic status")
        self.machine.run(
            "kill $(cat /run/selasticd-b.pid /run/slurm/slurmctld-b.pid /run/slurmd-b1.pid)"
        )

    def wheel(self) -> None:
        """The library in an environment of a researcher, by pip and by uv."""
        self.machine.trust_host()
        activate, *commands = page_commands("Conda, venv, uv").splitlines()
        assert activate.startswith("conda activate")
        for number, command in enumerate(commands):
            enter = (
                f"python3 -m venv /tmp/environment{number}; . /tmp/environment{number}/bin/activate"
            )
            tool = "pip install -q uv" if command.startswith("uv ") else ":"
            check = "python -c 'import slurm_elastic, numpy'"
            self.machine.run(f"set -e; {enter}; {tool}; {command}\n{check}")

    def pyslurm(self) -> None:
        """Pyslurm beside the controller, which reads through it."""
        self.machine.trust_host()
        self.machine.environment |= {
            "SLURM_INCLUDE_DIR": f"{PREFIX}/include", "SLURM_LIB_DIR": f"{PREFIX}/lib",
        }  # fmt: skip
        self.machine.run(
            "apt-get -qq install --yes --no-install-recommends python3-dev python3-pip"
        )
        self.commands("pyslurm")
        self.machine.run("systemctl restart selasticd")
        self.machine.wait_for("selastic ping | grep 'through pyslurm'")

    def prefix(self) -> None:
        """The first look where Slurm lies under a prefix."""
        self.machine.run(f"cp /packages/*.deb /tmp; rm {PREFIX}/etc/job_submit.lua")
        lines = page_commands("Five minutes to a first look").splitlines(keepends=True)
        install, look = "".join(lines[:2]), "".join(lines[2:])
        self.machine.run(ANSWERS + install)
        self.commands("Slurm under a prefix")
        said = self.machine.run(ANSWERS + look)
        assert "error:" not in said, said

    def remove(self) -> None:
        """Nothing is left but what the page names; the job goes on and ends by itself."""
        self.commands("Removing")
        self._removed()
        self.machine.run(f"{ANSWERS} apt-get purge 'slurm-elastic*'")
        self._end_of_job()
        self.machine.run("userdel selastic; sacctmgr -i delete user selastic")

    def without_packages(self) -> None:
        """The wheel, what `selastic install` puts in place, and the plugin from its source."""
        self.machine.trust_host()
        self.machine.run("cp /dist/slurm_elastic-*.whl /tmp")
        commands, make = page_commands("Without packages"), page_commands("Without packages", 1)
        if self.machine.environment.get("SLURM_CONF"):
            service = "".join(page_commands("Slurm under a prefix").splitlines(keepends=True)[:2])
            commands = f"{commands.rpartition('make -C')[0]}\n{service}{make}"
        self.machine.run(ANSWERS + commands)
        self.machine.run("systemctl daemon-reload; systemctl start selasticd")
        self.machine.run("sacctmgr -i add user selastic account=root adminlevel=Operator")
        # A job_submit.lua of the packages looks for the modules in their folder.
        folder = "$(dirname ${SLURM_CONF:-/etc/slurm/slurm.conf})"
        script = "/usr/local/share/slurm-elastic/lua/job_submit.lua"
        self.machine.run(f"rm {folder}/job_submit.lua; cp -n {script} {folder}/")
        self.machine.wait_for("selastic status")
        assert "error:" not in self.machine.run("selastic check")
        self.machine.configure("act")
        self.job = self.machine.submit_training()
        self.machine.wait_for_gpus(self.job, 2)

    def uninstall(self) -> None:
        """The same without packages."""
        folder = "$(dirname ${SLURM_CONF:-/etc/slurm/slurm.conf})"
        commands = page_commands("Removing").partition("apt-get")[0]
        plugin = "$(scontrol show config | sed -n 's/^PluginDir *= //p')/elastic.so"
        remove = f"rm {folder}/plugstack.conf.d/elastic.conf {plugin}"
        self.machine.run(f"set -e; {commands}\n{remove}; selastic uninstall")
        self._removed()
        self._end_of_job()

    def _removed(self) -> None:
        """Slurm takes jobs, also after a restart, and refuses --elastic; the job is still there."""
        running = self.machine.run(f"squeue --noheader --jobs={self.job} --format=%T")
        assert "RUNNING" in running, running
        kill = "pkill slurmctld; while pgrep slurmctld; do sleep 0.1; done"
        self.machine.run(f"{kill}; slurmctld -i")
        self.machine.wait_for("cd /tmp; sbatch --output=/dev/null --wrap true")
        refused = self.machine.run("cd /tmp; sbatch --elastic=1-2 --wrap true", code=255)
        assert "unrecognized option '--elastic=1-2'" in refused, refused

    def _end_of_job(self) -> None:
        ended = self.machine.end_training(self.job)
        assert "JobState=COMPLETED" in ended, ended
        assert "ended at step" in ended, ended
        self.machine.wait_for('[ -z "$(squeue --noheader --user=alice)" ]')  # its companions
        self.machine.run("rm -r /tmp/train")


#: Sections in their order: column of the table → method.
ON_PATH = {
    "first look": InstallPage.first_look,
    "directive": InstallPage.directive,
    "acting": InstallPage.acting,
    "upgrade": InstallPage.upgrade,
    "several clusters": InstallPage.several_clusters,
    "removing": InstallPage.remove,
}
#: What does not depend on the release, and what follows on the same machine of Debian's.
ON_DEBIAN = {
    "first look": InstallPage.first_look,
    "wheel": InstallPage.wheel,
    **ON_PATH,
    "without packages": InstallPage.without_packages,
    "uninstall": InstallPage.uninstall,
}
#: Where Slurm lies under a prefix.
UNDER_PREFIX = {
    "prefix": InstallPage.prefix,
    "prefix: acting": InstallPage.acting,
    "pyslurm": InstallPage.pyslurm,
    "prefix: removing": InstallPage.remove,
    "without packages": InstallPage.without_packages,
    "uninstall": InstallPage.uninstall,
}
PYSLURM_SERIES = "25.11"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a machine has Slurm, and the sections that are tried there."""

    prefix: bool
    sections: Mapping[str, Callable[[InstallPage], None]]


def layouts_of(series: str, *, pyslurm: bool) -> list[Layout]:
    """Return the machines of a release; Debian's Slurm lies under no prefix."""
    if choose(series).release == DEBIAN_RELEASE:
        return [Layout(prefix=False, sections=ON_DEBIAN)]
    without = () if pyslurm and series == PYSLURM_SERIES else ("pyslurm",)
    under_prefix = {name: step for name, step in UNDER_PREFIX.items() if name not in without}
    return [Layout(prefix=False, sections=ON_PATH), Layout(prefix=True, sections=under_prefix)]


def try_layout(series: str, layout: Layout) -> dict[str, str]:
    """Run the sections until one fails; return the result of each by its column."""
    results: dict[str, str] = {}
    machine = PackageMachine(PACKAGES, systemd=True)
    try:
        machine.run(f"{QUIET} update")
        machine.replace_slurm(series, prefix=layout.prefix)
        machine.run("SLURMDBD=yes /start-site")
        page = InstallPage(machine)
        for name, section in layout.sections.items():
            begun = time.monotonic()
            try:
                section(page)
            except AssertionError as error:
                results[name] = "no"
                print(f"{series}: {name}: {error}", file=sys.stderr, flush=True)
                break
            results[name] = f"yes, {time.monotonic() - begun:.0f} s"
            print(f"{series}: {name}: {results[name]}", file=sys.stderr, flush=True)
    finally:
        machine.close()
    return results


def table(results: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the lines of a table, a row for each section."""
    names = [
        n
        for n in dict.fromkeys((*ON_PATH, *UNDER_PREFIX, *ON_DEBIAN))
        if any(n in row for row in results.values())
    ]
    head = ["", *results]
    rows = [[name, *(row.get(name, "-") for row in results.values())] for name in names]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def main() -> int:
    """Return 0: every section passed; 1: one failed; 2: no release could be tried."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.releases.install_page", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("releases", nargs="*", default=SERIES, metavar="RELEASE")
    parser.add_argument(
        "--pyslurm", action="store_true", help=f"build pyslurm on {PYSLURM_SERIES}, too"
    )
    args = parser.parse_args()
    results: dict[str, dict[str, str]] = {}
    for series in args.releases:
        if reason := missing(series):
            print(f"install page: {series} skipped: {reason}", file=sys.stderr)
            continue
        row = results.setdefault(choose(series).release, {})
        for layout in layouts_of(series, pyslurm=args.pyslurm):
            row |= try_layout(series, layout)
    print("\n".join(table(results)))
    if not results:
        return 2
    return 1 if any("no" in row.values() for row in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
