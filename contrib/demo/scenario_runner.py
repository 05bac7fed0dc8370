"""Execution of a scenario: each phase begins once its condition is observed."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence

from contrib.demo.cluster_view import ClusterView
from contrib.demo.cluster_watch import ClusterWatch
from contrib.demo.demo_cluster import PROJECT, SHARED_DIR, DemoCluster, DemoError
from contrib.demo.events import events
from contrib.demo.scenario import EXAMPLES, DemoJob, Phase, Scenario
from contrib.demo.screen import Screen

#: A phase begins after this time even if its condition was not observed; the checks then fail.
#: Eight ranks that start on two busy cores have taken a minute.
_PHASE_TIMEOUT_S = 120.0
#: Longest wait for the end of the last jobs.
_END_TIMEOUT_S = 240.0


class ScenarioRunner:
    """Execution of one scenario.

    Args:
        cluster: cluster on which it runs.
        scenario: its phases.
        watch: source of views of the cluster.
        screen: live display.
        forgetful: whether elastic jobs of the library run the script with the bug.

    Attributes:
        ids: ids of the jobs submitted so far, by name.
        missed: conditions that were not observed in time.
    """

    def __init__(
        self,
        cluster: DemoCluster,
        scenario: Scenario,
        watch: ClusterWatch,
        screen: Screen,
        *,
        forgetful: bool,
    ) -> None:
        self._cluster, self._scenario, self._watch, self._screen = cluster, scenario, watch, screen
        self._forgetful = forgetful
        self._shown = ClusterView()
        self.ids: dict[str, int] = {}
        self.missed: list[str] = []

    def run(self) -> None:
        """Carry out all phases, and wait until every job has ended."""
        for phase in self._scenario.phases:
            self._await(phase)
            self._screen.announce(phase.announcement, self._shown)
            self._carry_out(phase)
        if not self._wait_for(self._all_ended, _END_TIMEOUT_S):
            self.missed.append("all jobs to end")

    def _await(self, phase: Phase) -> None:
        if not self._wait_for(phase.condition, _PHASE_TIMEOUT_S):
            self.missed.append(phase.condition_text)
            text = f"after {_PHASE_TIMEOUT_S:.0f} s no longer waiting for {phase.condition_text}"
            self._screen.log(text, self._shown, style="red")

    def _wait_for(self, condition: Callable[[ClusterView], bool], timeout_s: float) -> bool:
        """Show views until one meets the condition; return whether one did in time."""
        end = time.monotonic() + timeout_s
        while True:
            view = self._watch.next()
            for text in self._watch.decisions():
                self._screen.log(f"controller: {text}", view, style="cyan")
            for text in events(self._shown, view):
                self._screen.log(text, view)
            self._shown = view
            self._screen.show(view)
            if condition(view):
                return True
            if time.monotonic() > end:
                return False

    def _all_ended(self, view: ClusterView) -> bool:
        return all(name in view.jobs and view.jobs[name].ended for name in self.ids)

    def _carry_out(self, phase: Phase) -> None:
        jobs = self._scenario.jobs
        if phase.end:
            files = " ".join(jobs[name].end_file for name in phase.end)
            self._cluster.run(f"touch {files}", user="bob")
        for name in phase.cancel:
            self._cluster.run(f"scancel {self.ids[name]}", user=jobs[name].user)
        for user in dict.fromkeys(job.user for job in phase.submit):
            self._submit(user, [job for job in phase.submit if job.user == user])

    def _submit(self, user: str, jobs: Sequence[DemoJob]) -> None:
        """Submit jobs of one user, in one call."""
        script = "\n".join([f"set -e; cd {SHARED_DIR}", *(self.command(job) for job in jobs)])
        answer = self._cluster.run(script, user=user)
        ids = [line.split(";")[0] for line in answer.splitlines() if line.strip()]
        if len(ids) != len(jobs) or not all(word.isdecimal() for word in ids):
            raise DemoError(f"sbatch answered {answer!r}")
        self.ids |= {job.name: int(word) for job, word in zip(jobs, ids, strict=True)}

    def command(self, job: DemoJob) -> str:
        """Return the shell line that submits a job."""
        line = f"sbatch --parsable --job-name={job.name} {job.options} {job.script}"
        training = job.training
        if training is None:
            return f"UNTIL={job.end_file} {line}"
        examples = EXAMPLES
        if self._forgetful and training.library:
            examples = f"{SHARED_DIR}/broken"
        environment = f"OUT={SHARED_DIR}/{job.name} EXAMPLES={examples} REAL_EXAMPLES={EXAMPLES}"
        return f"{environment} {line} {training.arguments} --rate {training.rate} {training.more}"


def reference_script(scenario: Scenario) -> str:
    """Return a script with the same trainings, each in one process without interruption."""
    runs = [
        f"nice -n 19 python3 {EXAMPLES}/train_{'library' if t.library else 'plain'}.py"
        f" --out {SHARED_DIR}/reference/{name} {t.arguments} >/dev/null || exit"
        for name, t in scenario.trainings.items()
    ]
    head = "export EMULATED_DEVICES=/none OMP_NUM_THREADS=1"
    return "\n".join([head, *runs, f"touch {SHARED_DIR}/reference/done"])


def prepare(cluster: DemoCluster, files: dict[str, str]) -> None:
    """Install the demo's files, create the QOS with higher priority, and start the controller."""
    # One command: each takes some tenth of a second of a core.
    installed = [
        f"base64 -d <<'END' | install -D -m 755 /dev/stdin {path}\n"
        f"{base64.encodebytes(text.encode()).decode()}END"
        for path, text in files.items()
    ]
    commands = [
        f"install -d -m 1777 {SHARED_DIR} || exit",
        "set -euo pipefail",
        *installed,
        f"install -d -o alice -g alice {SHARED_DIR}/reference",
        "sacctmgr -iQ add qos urgent set priority=1000 >/dev/null",
        "sacctmgr -iQ modify account research,teaching set qos+=urgent >/dev/null",
        f"ls -d {EXAMPLES} || true",
    ]
    if PROJECT not in cluster.run("\n".join(commands)):
        raise DemoError("the cluster's image has no examples")
    cluster.start_controller()
