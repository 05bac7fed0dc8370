"""Users with hundreds of jobs on the container cluster, for `scale` and `transitions`.

    with SimulatedUsers("scale", users=4) as users:
        users.report(deaf=0.0)                    # report for the jobs of all users
        processes = users.start_users(seed=1, jobs=2000, selastic=True)

The jobs are busy_job.sh: they work, save on a notice and continue from their save, and log
where they began, saved and ended.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.support.container_commands import PYTHON, cluster_command, on_cluster

#: Folder in the containers with the programs, and one folder per user for its jobs.
USERS_DIR = "/shared/scratch/users"
PROGRAMS = ("busy_job.sh", "job_reporter.py", "simulated_user.py", "daemon_monitor.py")
#: Ends them in a container; the brackets keep the pattern from matching this command itself.
_END_ALL = "pkill -f [s]imulated_user; pkill -f [j]ob_reporter; true"
NAMES = ("alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi")


class SimulatedUsers:
    """Users on a cluster of the kind `--farm`; as a context, it ends what it has started.

    Args:
        cluster: its name; it must be up.
        users: number of users; alice and bob always exist.
    """

    def __init__(self, cluster: str, *, users: int) -> None:
        self.cluster = cluster
        extra = [f"user{i}" for i in range(len(NAMES), users)]
        self.users = [*NAMES, *extra][:users]
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        fresh = f"rm -rf {USERS_DIR} && install -d -m 1777 {USERS_DIR}"
        on_cluster(self.cluster, "sh", "-c", fresh)
        for name in PROGRAMS:
            text = Path(__file__).with_name(name).read_text()
            on_cluster(self.cluster, "tee", f"{USERS_DIR}/{name}", stdin=text)
        for number, user in enumerate(self.users):
            if number >= 2:
                self._make(user, 2100 + number)
            own = f"install -d -o {user} -m 755 {USERS_DIR}/{user}"
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
        # Processes that `docker exec` started do not end with it.
        with contextlib.suppress(SystemExit):
            on_cluster(self.cluster, "sh", "-c", _END_ALL)

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
        """Start a program as a user; it runs until the end."""
        process = subprocess.Popen(
            [*cluster_command(self.cluster), "exec", "--user", user, "--", PYTHON, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def report(self, *, deaf: float) -> None:
        """Report for the jobs of all users from now on.

        Args:
            deaf: share of notices that are ignored.
        """
        for user in self.users:
            words = ("ctld:7321", f"{USERS_DIR}/{user}", str(deaf))
            self.spawn(user, f"{USERS_DIR}/job_reporter.py", *words)
        wait = " && ".join(f"[ -e {USERS_DIR}/{user}/reporter ]" for user in self.users)
        on_cluster(
            self.cluster,
            "sh",
            "-c",
            f"for _ in $(seq 300); do {wait} && exit; sleep 0.1; done; exit 1",
        )

    def start_users(self, *, seed: int, jobs: int, selastic: bool) -> UserProcesses:
        """Start all users, each with a share of the jobs."""
        parts = [jobs // len(self.users)] * len(self.users)
        parts[0] += jobs - sum(parts)
        return UserProcesses(
            [
                self.spawn(
                    user,
                    f"{USERS_DIR}/simulated_user.py",
                    *("--seed", f"{seed}/{user}", "--jobs", str(part)),
                    *("--directory", f"{USERS_DIR}/{user}"),
                    *(["--selastic"] if selastic else []),
                )
                for user, part in zip(self.users, parts, strict=True)
            ]
        )

    def attempts(self) -> dict[str, int]:
        """Return the attempts of all jobs from the jobs' own logs; see `judged`."""
        text = on_cluster(
            self.cluster, "sh", "-c", f"cd {USERS_DIR}; grep -H . */*/log 2>/dev/null || true"
        )
        logs: dict[str, list[list[str]]] = defaultdict(list)
        for line in text.splitlines():
            name, _, words = line.partition(":")
            logs[name].append(words.split())
        return judged(logs.values())


def judged(logs: Any) -> dict[str, int]:
    """Return how the attempts of jobs followed on each other.

    Args:
        logs: of each job, lines "begin|saved|resumed|end JOB RUN STEP TIME", in words.

    Returns:
        jobs; attempts; `resumed`: attempts that began where the one before saved last;
        `lost`: attempts that began elsewhere, or whose predecessor was ended before a save.

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
                continues = before[0] == "saved" and before[3] == line[3]
                resumed, lost = resumed + continues, lost + (not continues)
    return {"jobs": jobs, "attempts": attempts, "resumed": resumed, "lost": lost}


class UserProcesses:
    """Processes of the simulated users, and the events that they print.

    Attributes:
        rows: JSON objects of all users, in order of arrival.
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

    def count(self, action: str) -> int:
        """Return how often an action was done."""
        return sum(r.get("did") == action for r in list(self.rows))

    def all_submitted(self) -> bool:
        """Return whether all users have submitted their first jobs."""
        return sum("submitted_all" in r for r in list(self.rows)) == len(self._processes)

    def act_until(self, until: float) -> None:
        """Let users act from now on, until then (epoch s)."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{until}\n")
            process.stdin.flush()

    def wait(self, seconds: float) -> None:
        """Wait until all users have ended."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.1, end - time.monotonic()))
