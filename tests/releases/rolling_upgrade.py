"""Upgrade of slurm-elastic under a running job, in the order of docs/install.md.

    python -m tests.releases.rolling_upgrade d9dbb70        # from that commit to the present tree
    python -m tests.releases.rolling_upgrade d9dbb70 --slurm 25.11

A small cluster has the older commit on all hosts, and an unmodified script trains there under
esrun. Then controller, launchers and plugins are replaced one after the other. After each, the same
attempt of the job must train on, and a resize must work and resume from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.container_cluster.selasticd import Daemon, eager_config, shown, total_gpus
from tests.support.container_cluster.slurm_cluster import (  # puts clusterlib on the path
    CLUSTER_DIR,
    SlurmCluster,
    until,
)

# isort: split

from clusterlib.context import project_archive
from clusterlib.lifecycle import PROJECT_IN_IMAGE

ROOT = CLUSTER_DIR.parents[1]
SAVER = ROOT / "tests" / "chaos" / "drivers" / "saver.py"
HOME = "/shared/home/alice/upgrade"
VENV = "/opt/slurm-elastic"
#: What the older commit calls itself, so that the two can be told apart.
OLD = "0.0.9"
NODES = ("g01", "g02", "g03")
SCRIPT = (
    f"exec esrun --checkpoint '{HOME}/saves/ckpt.json' --signal USR2"
    f" python3 {HOME}/saver.py rename {HOME} 100000"
)
#: Files of the package and its commands, and of the plugins, below the root.
LAUNCHER_FILES = "opt/slurm-elastic/bin opt/slurm-elastic/lib/python3*/site-packages/slurm_elastic*"
PLUGIN_FILES = "etc/slurm/plugstack.conf* $(find usr/lib opt/slurm/lib -name elastic.so)"


class RollingUpgrade:
    """One cluster on its way from the older commit to the present tree.

    Args:
        cluster: cluster of `NODES`, with the older commit installed.
    """

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        self.daemon = Daemon(cluster, eager_config(), reporters=())
        self.job = 0

    def run(self) -> None:
        """Submit the job, upgrade one part after the other, and print what was seen."""
        self.daemon.start()
        self._submit()
        self._resize(2)
        self._say("the older commit everywhere")
        for part, upgrade, size in (
            ("controller", self._controller, 4),
            ("launchers", self._launchers, 2),
            ("plugins", self._plugins, 4),
        ):
            attempt, restarts = self._rows()[-1]["attempt"], self._restarts()
            upgrade()
            step = self._newest("step")
            self._trains_on(step)
            assert self._rows()[-1]["attempt"] == attempt, "the upgrade has restarted the script"
            assert self._restarts() == restarts, "the upgrade has requeued the job"
            self._reports_arrive()
            self._resize(size)
            self._say(f"{part} upgraded")
        self.daemon.check_log()

    def close(self) -> None:
        """Cancel the job and stop selasticd."""
        self.daemon.close()

    def _submit(self) -> None:
        self.cluster.exec(["mkdir", "-p", HOME], user="alice")
        self.cluster.exec(f"cat >{HOME}/saver.py", user="alice", stdin=SAVER.read_text("utf-8"))
        options = ("--elastic=1-1,types=a100", "--requeue", f"-o{HOME}/log", "--open-mode=append")
        self.job = self.cluster.sbatch(SCRIPT, *options, "-t60")
        self.cluster.wait(self.job, "RUNNING")
        until(lambda: self._newest("saved") > 0, what=self._end_of_log)

    def _controller(self) -> None:
        """Install the present tree in the controller's environment, and restart selasticd."""
        archive = project_archive(PROJECT_IN_IMAGE)
        container = f"{self.cluster.name}-ctld"
        self.cluster.exec(["rm", "-rf", f"/{PROJECT_IN_IMAGE}"])
        subprocess.run(["docker", "cp", "-", f"{container}:/"], input=archive, check=True)
        install = f"{VENV}/bin/pip install -q --no-deps --no-build-isolation --force-reinstall"
        self.cluster.exec(f"{install} /{PROJECT_IN_IMAGE}")
        self.daemon.stop()
        self.daemon.start()

    def _launchers(self) -> None:
        """Install the present tree on the compute nodes."""
        self._copy(LAUNCHER_FILES)

    def _plugins(self) -> None:
        """Install the SPANK plugin everywhere, and the Lua modules where slurmctld runs."""
        self.cluster.exec(f"bash /{PROJECT_IN_IMAGE}/contrib/cluster/image/install-project")
        self.cluster.exec(["touch", "/etc/slurm/job_submit.lua"])
        self._copy(PLUGIN_FILES)
        answer = self.cluster.exec(
            ["sbatch", "--test-only", "--elastic=1-2", "--wrap=true"], user="alice"
        )
        assert "to start at" in answer.stderr, answer.stderr

    def _copy(self, files: str) -> None:
        """Copy files from ctld to the compute nodes."""
        name = self.cluster.name
        pack = ["docker", "exec", f"{name}-ctld", "sh", "-c", f"cd / && tar -cf - {files}"]
        archive = subprocess.run(pack, check=True, capture_output=True).stdout
        for node in NODES:
            unpack = ["docker", "exec", "-i", f"{name}-{node}", "tar", "-C", "/", "-xf", "-"]
            subprocess.run([*unpack, "--recursive-unlink"], input=archive, check=True)

    def _resize(self, size: int) -> None:
        """Resize the job by its owner, and check from which checkpoint it resumes."""
        starts = len(self._starts())
        self.daemon.selastic("update", str(self.job), f"--elastic=1-{size},types=a100")
        until(
            lambda: total_gpus(self.cluster, self.job) == size,
            what=lambda: self.daemon.log()[-800:],
        )
        until(lambda: len(self._starts()) > starts, what=self._end_of_log)
        for start, row in enumerate(rows := self._rows()):
            if "start" in row:
                newest = max((r["saved"] for r in rows[:start] if "saved" in r), default=0)
                assert row["start"] >= newest, f"resumed from {row['start']}, saved: {newest}"

    def _trains_on(self, step: int) -> None:
        until(lambda: self._newest("step") > step + 20, what=self._end_of_log)

    def _reports_arrive(self) -> None:
        """Wait for two more reports; of an unmodified script esrun reports how often it saved."""
        first = self._reported_step()
        until(lambda: self._reported_step() > first + 1, what=lambda: self.daemon.log()[-800:])

    def _reported_step(self) -> int:
        answer = json.loads(self.daemon.selastic("show", str(self.job), "--json"))
        return int(answer["step"] or 0)

    def _say(self, what: str) -> None:
        version = f"{VENV}/bin/python -c 'import slurm_elastic; print(slurm_elastic.__version__)'"
        versions = {
            host: self.cluster.exec(version, node=host).stdout.strip() for host in ("ctld", *NODES)
        }
        print(
            f"{what}: {', '.join(f'{h} {v}' for h, v in versions.items())}; job {self.job}:"
            f" {total_gpus(self.cluster, self.job)} GPUs, {self._restarts()} restarts,"
            f" {len(self._starts())} starts of the script, step {self._newest('step')}",
            flush=True,
        )

    def _rows(self) -> list[dict[str, Any]]:
        """Return the rows that the script has written, oldest first."""
        text = self.cluster.exec(f"cat {HOME}/log 2>/dev/null || true").stdout
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def _starts(self) -> list[dict[str, Any]]:
        return [row for row in self._rows() if "start" in row]

    def _newest(self, name: str) -> int:
        return max((int(r[name]) for r in self._rows() if name in r), default=0)

    def _restarts(self) -> int:
        return int(shown(self.cluster, self.job)["restart_cnt"])

    def _end_of_log(self) -> str:
        return self.cluster.exec(f"tail -n 20 {HOME}/log").stdout


def older_tree(commit: str, folder: Path) -> None:
    """Unpack a commit of the project, which calls itself `OLD`, into a folder.

    Raises:
        CalledProcessError: git does not know the commit.
    """
    words = ["git", "-C", str(ROOT), "archive", "--format=tar", commit]
    text = subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(text)) as archive:
        archive.extractall(folder, filter="data")
    (folder / "slurm_elastic" / "__init__.py").open("a").write(f'__version__ = "{OLD}"\n')


def main() -> int:
    """Return 0: the upgrade went through; 1: it did not, with the reason as the last line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.releases.rolling_upgrade",
        description="Upgrade a cluster under a running job.",
    )
    parser.add_argument("commit", help="older commit or tag")
    parser.add_argument("--slurm", default="24.11", metavar="RELEASE", help="(%(default)s)")
    parser.add_argument("--name", default="selastic-upgrade", help="of the cluster (%(default)s)")
    args = parser.parse_args()
    command = [str(CLUSTER_DIR / "cluster"), "--name", args.name]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        older_tree(args.commit, Path(folder))
        try:
            subprocess.run([*command, "up", "--slurm", args.slurm, "--nodes", "3"], check=True)
            older = [f"{folder}/contrib/cluster/cluster", "--name", args.name, "sync"]
            subprocess.run(older, check=True)
            upgrade = RollingUpgrade(SlurmCluster(args.name))
            try:
                upgrade.run()
            finally:
                upgrade.close()
        except (AssertionError, subprocess.CalledProcessError) as error:
            print(f"rolling upgrade: {error}", file=sys.stderr)
            return 1
        finally:
            subprocess.run([*command, "down", "--images"], capture_output=True, check=False)
    print(f"upgraded under a running job in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
