"""Plays a scene: waits for what each act needs to see, then lets it happen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from contrib.demo.cluster import PROJECT, STAGE, Cluster
from contrib.demo.errors import DemoError
from contrib.demo.happenings import happenings
from contrib.demo.scene import EXAMPLES, Act, Job, Scene
from contrib.demo.screen import Screen
from contrib.demo.view import View
from contrib.demo.watch import Watch

#: The next act begins after this long even if what it needs has not been seen: the verdict will
#: tell. Eight ranks that start on two busy cores have been seen to take a minute.
_PATIENCE_S = 120.0
#: The same for the end of the last jobs.
_END_PATIENCE_S = 240.0


class Director:
    """Carries out one scene.

    Attributes:
        ids: of the jobs submitted so far, by name.
        missed: what had not been seen when patience ended.

    Args:
        forgetful: elastic jobs of the library run the script with the bug.
    """

    def __init__(
        self, cluster: Cluster, scene: Scene, watch: Watch, screen: Screen, *, forgetful: bool
    ) -> None:
        self._cluster, self._scene, self._watch, self._screen = cluster, scene, watch, screen
        self._forgetful = forgetful
        self._shown = View()
        self.ids: dict[str, int] = {}
        self.missed: list[str] = []

    def play(self) -> None:
        """All acts, and then until every job is over."""
        for act in self._scene.acts:
            self._await(act)
            self._screen.announce(act.says, self._shown)
            self._do(act)
        if not self._until(self._all_over, _END_PATIENCE_S):
            self.missed.append("all jobs to be over")

    def _await(self, act: Act) -> None:
        if not self._until(act.when, _PATIENCE_S):
            self.missed.append(act.awaits)
            text = f"after {_PATIENCE_S:.0f} s no longer waiting for {act.awaits}"
            self._screen.tell(text, self._shown, style="red")

    def _until(self, seen: Callable[[View], bool], patience_s: float) -> bool:
        """Look until `seen`; whether it was, in time."""
        end = time.monotonic() + patience_s
        while True:
            view = self._watch.next()
            for text in self._watch.decisions():
                self._screen.tell(f"controller: {text}", view, style="cyan")
            for text in happenings(self._shown, view):
                self._screen.tell(text, view)
            self._shown = view
            self._screen.show(view)
            if seen(view):
                return True
            if time.monotonic() > end:
                return False

    def _all_over(self, view: View) -> bool:
        return all(name in view.jobs and view.jobs[name].over for name in self.ids)

    def _do(self, act: Act) -> None:
        jobs = self._scene.jobs
        if act.end:
            files = " ".join(jobs[name].until for name in act.end)
            self._cluster.run(f"touch {files}", user="bob")
        for name in act.cancel:
            self._cluster.run(f"scancel {self.ids[name]}", user=jobs[name].user)
        for user in dict.fromkeys(job.user for job in act.submit):
            self._submit(user, [job for job in act.submit if job.user == user])

    def _submit(self, user: str, jobs: Iterable[Job]) -> None:
        """One person's jobs, in one go."""
        jobs = list(jobs)
        script = "\n".join([f"set -e; cd {STAGE}", *(self.command(job) for job in jobs)])
        said = self._cluster.run(script, user=user)
        ids = [line.split(";")[0] for line in said.splitlines() if line.strip()]
        if len(ids) != len(jobs) or not all(word.isdecimal() for word in ids):
            raise DemoError(f"sbatch answered {said!r}")
        self.ids |= {job.name: int(word) for job, word in zip(jobs, ids, strict=True)}

    def command(self, job: Job) -> str:
        """The shell line that submits a job."""
        line = f"sbatch --parsable --job-name={job.name} {job.options} {job.script}"
        training = job.training
        if training is None:
            return f"UNTIL={job.until} {line}"
        examples = EXAMPLES
        if self._forgetful and training.library:
            examples = f"{STAGE}/broken"
        environment = f"OUT={STAGE}/{job.name} EXAMPLES={examples} REAL_EXAMPLES={EXAMPLES}"
        return f"{environment} {line} {training.arguments} --rate {training.rate} {training.more}"


def reference_script(scene: Scene) -> str:
    """Trains the same alone: one process, nothing emulated, never interrupted."""
    runs = [
        f"nice -n 19 python3 {EXAMPLES}/train_{'library' if t.library else 'plain'}.py"
        f" --out {STAGE}/reference/{name} {t.arguments} >/dev/null || exit"
        for name, t in scene.trainings.items()
    ]
    head = "export EMULATED_DEVICES=/none OMP_NUM_THREADS=1"
    return "\n".join([head, *runs, f"touch {STAGE}/reference/done"])


def prepare(cluster: Cluster, files: dict[str, str]) -> None:
    """Put the demo's files in place; make the QOS that ranks higher; start the controller."""
    for path, text in files.items():
        cluster.run(f"install -D -m 755 /dev/stdin {path}", stdin=text)
    cluster.run(
        f"install -d -m 1777 {STAGE} && install -d -o alice -g alice {STAGE}/reference"
        " && sacctmgr -iQ add qos urgent set priority=1000 >/dev/null"
        " && sacctmgr -iQ modify account research,teaching set qos+=urgent >/dev/null"
    )
    if PROJECT not in cluster.run(f"ls -d {EXAMPLES}"):
        raise DemoError("the cluster's image has no examples")
    cluster.start_controller()
