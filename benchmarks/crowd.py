"""Users with hundreds of jobs on the container cluster, for `scale` and `transitions`.

    with Crowd("scale", users=4) as crowd:
        crowd.play(deaf=0.0)                      # somebody reports for the jobs
        people = crowd.people(seed=1, jobs=2000, selastic=True)

The jobs are drivers/crowd_job.sh: they work, save when asked and go on from what they saved,
and each writes down where it began, saved and ended.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import threading
import time
from collections import defaultdict
from types import TracebackType
from typing import Any, Self

from benchmarks.resize import ROOT, on_cluster

#: In the containers: the drivers, and a directory for each user's jobs.
CROWD = "/shared/scratch/crowd"
PYTHON = "/opt/slurm-elastic/bin/python"
DRIVERS = ("crowd_job.sh", "crowd_crew.py", "crowd_person.py", "crowd_watch.py")
NAMES = ("alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi")


def cluster_command(cluster: str) -> list[str]:
    """The beginning of a call of contrib/cluster/cluster."""
    return [str(ROOT / "contrib/cluster/cluster"), "--name", cluster]


class Crowd:
    """Users on a cluster of the kind `--farm`; as a context it ends what it started.

    Args:
        cluster: it; must be up.
        users: how many; alice and bob are always there.
    """

    def __init__(self, cluster: str, *, users: int) -> None:
        self.cluster = cluster
        extra = [f"user{i}" for i in range(len(NAMES), users)]
        self.users = [*NAMES, *extra][:users]
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        fresh = f"rm -rf {CROWD} && install -d -m 1777 {CROWD}"
        on_cluster(self.cluster, "sh", "-c", fresh)
        for name in DRIVERS:
            text = (ROOT / "benchmarks/drivers" / name).read_text()
            on_cluster(self.cluster, "tee", f"{CROWD}/{name}", stdin=text)
        for number, user in enumerate(self.users):
            if number >= 2:
                self._make(user, 2100 + number)
            own = f"install -d -o {user} -m 755 {CROWD}/{user}"
            on_cluster(self.cluster, "sh", "-c", own)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        # What `docker exec` began does not end with it.
        with contextlib.suppress(SystemExit):
            on_cluster(self.cluster, "sh", "-c", "pkill -f crowd_person; pkill -f crowd_crew; true")

    def _make(self, user: str, uid: int) -> None:
        command = cluster_command(self.cluster)
        add = f"id {user} >/dev/null 2>&1 || useradd -u {uid} -M -d /shared/home/{user} {user}"
        home = f"install -d -o {user} -m 755 /shared/home/{user}"
        for node in ("ctld", "g001"):
            words = [*command, "exec", node, "--", "sh", "-c", f"{add}; {home}"]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        account = f"sacctmgr -iQ add user {user} Account=research"
        on_cluster(self.cluster, "sh", "-c", account)

    def spawn(self, user: str, *words: str) -> subprocess.Popen[str]:
        """A driver as a user, until the end."""
        process = subprocess.Popen(
            [*cluster_command(self.cluster), "exec", "--user", user, "--", PYTHON, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def play(self, *, deaf: float) -> None:
        """Report for everybody's jobs from now on.

        Args:
            deaf: share of notices that are not heard.
        """
        for user in self.users:
            words = ("ctld:7321", f"{CROWD}/{user}", str(deaf))
            self.spawn(user, f"{CROWD}/crowd_crew.py", *words)
        wait = " && ".join(f"[ -e {CROWD}/{user}/crew ]" for user in self.users)
        on_cluster(
            self.cluster,
            "sh",
            "-c",
            f"for _ in $(seq 300); do {wait} && exit; sleep 0.1; done; exit 1",
        )

    def people(self, *, seed: int, jobs: int, selastic: bool) -> People:
        """Everybody at work, each with a share of the jobs."""
        parts = [jobs // len(self.users)] * len(self.users)
        parts[0] += jobs - sum(parts)
        return People(
            [
                self.spawn(
                    user,
                    f"{CROWD}/crowd_person.py",
                    *("--seed", f"{seed}/{user}", "--jobs", str(part)),
                    *("--directory", f"{CROWD}/{user}"),
                    *(["--selastic"] if selastic else []),
                )
                for user, part in zip(self.users, parts, strict=True)
            ]
        )

    def attempts(self) -> dict[str, int]:
        """What the jobs' own logs say: see `judged`."""
        text = on_cluster(
            self.cluster, "sh", "-c", f"cd {CROWD}; grep -H . */*/log 2>/dev/null || true"
        )
        logs: dict[str, list[list[str]]] = defaultdict(list)
        for line in text.splitlines():
            name, _, words = line.partition(":")
            logs[name].append(words.split())
        return judged(logs.values())


def judged(logs: Any) -> dict[str, int]:
    """How the attempts of jobs followed on each other.

    Args:
        logs: of each job, lines "begin|saved|resumed|end JOB RUN STEP TIME", in words.

    Returns:
        jobs; attempts; `resumed`: attempts that began where the one before had saved last;
        `lost`: attempts that began elsewhere, or whose predecessor was ended in its work.

    >>> judged([[["begin", "7", "0", "0"], ["saved", "7", "0", "5"], ["begin", "7", "1", "5"]]])
    {'jobs': 1, 'attempts': 2, 'resumed': 1, 'lost': 0}
    >>> judged([[["begin", "7", "0", "0"], ["begin", "7", "1", "0"]]])
    {'jobs': 1, 'attempts': 2, 'resumed': 0, 'lost': 1}
    """
    jobs = attempts = resumed = lost = 0
    for log in logs:
        jobs += 1
        attempts += sum(line[0] == "begin" for line in log)
        for before, line in itertools.pairwise(log):
            if line[0] == "begin":
                good = before[0] == "saved" and before[3] == line[3]
                resumed, lost = resumed + good, lost + (not good)
    return {"jobs": jobs, "attempts": attempts, "resumed": resumed, "lost": lost}


class People:
    """The processes of crowd_person.py, and what they say.

    Attributes:
        rows: JSON objects of all of them, in order of arrival.
    """

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self.rows: list[dict[str, Any]] = []
        self._threads = [
            threading.Thread(target=self._read, args=(p,), daemon=True) for p in processes
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.rows.append(json.loads(line))

    def count(self, what: str) -> int:
        """How often something was done."""
        return sum(r.get("did") == what for r in list(self.rows))

    def full(self) -> bool:
        """Whether all have submitted their first jobs."""
        return sum("full" in r for r in list(self.rows)) == len(self._processes)

    def go(self, until: float) -> None:
        """From now on people do what people do, until then (epoch s)."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{until}\n")
            process.stdin.flush()

    def wait(self, seconds: float) -> None:
        """For their end."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.1, end - time.monotonic()))
