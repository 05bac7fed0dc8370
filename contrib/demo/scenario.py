"""Scenarios: which jobs are submitted, and what must be observed before each phase begins.

The full scenario makes elastic jobs change in every way. Bob's jobs leave few GPUs at first. Each
of his later jobs is so large that one of alice's has to move, grow, shrink, or at last wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from contrib.demo.cluster_view import ClusterView
from contrib.demo.demo_cluster import PROJECT, SHARED_DIR

EXAMPLES = f"{PROJECT}/docs/examples"
BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Training of an elastic job.

    Attributes:
        rate: samples/s on an emulated v100.
        library: whether the script uses the training library.
        more: further arguments, which do not change the result.
    """

    samples: int = 2048
    epochs: int
    rate: int
    library: bool = True
    more: str = ""

    @property
    def steps(self) -> int:
        """Total number of optimisation steps."""
        return self.epochs * math.ceil(self.samples / BATCH)

    @property
    def arguments(self) -> str:
        """Arguments of the example scripts that determine the result."""
        return f"--samples {self.samples} --epochs {self.epochs} --global-batch {BATCH}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoJob:
    """Job of a scenario.

    Attributes:
        options: options of sbatch.
        training: None for a rigid job.
    """

    name: str
    user: str
    options: str
    training: Training | None = None

    @property
    def script(self) -> str:
        """Batch script on the cluster."""
        if self.training is None:
            return f"{SHARED_DIR}/rigid.sbatch"
        return f"{EXAMPLES}/train_{'library' if self.training.library else 'plain'}.sbatch"

    @property
    def end_file(self) -> str:
        """File whose creation ends a rigid job."""
        return f"{SHARED_DIR}/{self.name}.done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Submissions, ends and cancellations of jobs, once a condition is observed.

    Attributes:
        announcement: line that is shown when it begins.
        condition: whether it may begin.
        condition_text: the condition in words.
        submit: jobs to submit.
        end: names of rigid jobs to end.
        cancel: names of jobs to cancel.
    """

    announcement: str
    condition: Callable[[ClusterView], bool]
    condition_text: str
    submit: tuple[DemoJob, ...] = ()
    end: tuple[str, ...] = ()
    cancel: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Phases in order; `expected_changes` are the kinds of change that must occur."""

    phases: tuple[Phase, ...]
    expected_changes: tuple[str, ...]

    @property
    def jobs(self) -> dict[str, DemoJob]:
        """All jobs, by name."""
        return {job.name: job for phase in self.phases for job in phase.submit}

    @property
    def trainings(self) -> dict[str, Training]:
        """Trainings of the elastic jobs, by name."""
        return {n: job.training for n, job in self.jobs.items() if job.training}


def rigid(name: str, gpus: int, kind: str, *, node: str = "", qos: str = "") -> DemoJob:
    """Return a job of bob with `gpus` GPUs on each node, which runs until its end file exists."""
    options = f"--gres=gpu:{kind}:{gpus}"
    options += f" --nodelist={node} --nodes={len(node.split(','))}" if node else ""
    options += f" --qos={qos}" if qos else ""
    return DemoJob(name=name, user="bob", options=options)


def elastic(name: str, directive: str, least: int, training: Training) -> DemoJob:
    """Return a job of alice, submitted at its MIN."""
    kind = directive.partition("types=")[2]
    options = f"--elastic={directive} --gres=gpu:{kind}:{least} --ntasks-per-node={least}"
    return DemoJob(name=name, user="alice", options=options, training=training)


def full() -> Scenario:
    """Return the full scenario, of about two and a half minutes."""
    gpt = elastic("gpt", "4-8,types=a100", 4, Training(epochs=12, rate=32))
    vit = elastic("vit", "2,types=v100", 2, Training(epochs=5, rate=64))
    script = Training(epochs=6, rate=96, library=False, more="--save-every 10")
    plain = elastic("plain", "1-2,types=v100", 1, script)
    first = (
        rigid("ingest", 4, "a100", node="g02"),
        rigid("sim", 4, "a100", node="g04"),
        rigid("prep", 2, "v100", node="g03,g05"),
        rigid("render", 4, "v100", node="g06"),
    )
    return Scenario(
        expected_changes=("move", "grow", "shrink", "in-place", "preempt"),
        phases=(
            Phase(
                announcement="bob's jobs hold 16 of the 24 GPUs",
                condition=lambda _: True,
                condition_text="nothing",
                submit=first,
            ),
            Phase(
                announcement="alice submits elastic jobs: gpt, vit and plain, an unmodified script",
                condition=lambda v: all(_runs(v, job.name) for job in first),
                condition_text="bob's jobs to run",
                submit=(gpt, vit, plain),
            ),
            Phase(
                announcement="prep ends; bob's eval needs a whole v100 node, 4 are free on two",
                condition=lambda v: all(_saved(v, name) for name in ("gpt", "vit", "plain")),
                condition_text="the first checkpoints",
                submit=(rigid("eval", 4, "v100"),),
                end=("prep",),
            ),
            Phase(
                announcement="ingest ends: a whole a100 node is idle",
                condition=lambda v: _runs(v, "eval") and _trains(v, "gpt", 12),
                condition_text="eval to run",
                end=("ingest",),
            ),
            Phase(
                announcement="bob's train needs a whole a100 node, his debug one v100",
                condition=lambda v: _trains(v, "gpt", 20, on=8),
                condition_text="gpt to train on 8 GPUs",
                submit=(rigid("train", 4, "a100"), rigid("debug", 1, "v100")),
            ),
            Phase(
                announcement="bob's urgent, of a higher QOS, needs one as well; gpt is at its MIN",
                condition=lambda v: _runs(v, "train") and _trains(v, "gpt", 10, on=4),
                condition_text="train to run, and gpt to train on 4 GPUs",
                submit=(rigid("urgent", 4, "a100", qos="urgent"),),
            ),
            Phase(
                announcement="urgent and debug end",
                condition=lambda v: _runs(v, "urgent", for_s=12),
                condition_text="urgent to run",
                end=("urgent", "debug"),
            ),
            Phase(
                announcement="alice's jobs are done; bob's end",
                condition=lambda v: all(_ended(v, name) for name in ("gpt", "vit", "plain")),
                condition_text="alice's jobs to complete",
                end=("sim", "render", "eval", "train"),
            ),
        ),
    )


def short(*, kill: bool = False) -> Scenario:
    """Return a scenario with one job that grows; with `kill` it is then cancelled."""
    etl = rigid("etl", 4, "a100", node="g02")
    others = (rigid("sim", 4, "a100", node="g04"), rigid("night", 3, "a100", node="g01"))
    # It must not complete before it grows, on a busy machine, or is killed.
    # The bug that `--break skip-sample` plants shows after a restart only.
    directive = "1-2,in-place=never,types=a100"
    gpt = elastic("gpt", directive, 1, Training(epochs=4, rate=40 if kill else 80))
    last = Phase(
        announcement="gpt is done; bob's jobs end",
        condition=lambda v: _ended(v, "gpt"),
        condition_text="gpt to complete",
        end=("sim", "night"),
    )
    killing = Phase(
        announcement="sabotage: gpt is cancelled",
        condition=lambda v: _trains(v, "gpt", 3, on=2),
        condition_text="gpt to train on 2 GPUs",
        cancel=("gpt",),
    )
    return Scenario(
        expected_changes=("grow",),
        phases=(
            Phase(
                announcement="bob's jobs leave one a100",
                condition=lambda _: True,
                condition_text="nothing",
                submit=(etl, *others),
            ),
            Phase(
                announcement="alice submits gpt",
                condition=lambda v: all(_runs(v, job.name) for job in (etl, *others)),
                condition_text="bob's jobs to run",
                submit=(gpt,),
            ),
            Phase(
                announcement="etl ends",
                condition=lambda v: _trains(v, "gpt", 4),
                condition_text="gpt to train",
                end=("etl",),
            ),
            *((killing,) if kill else ()),
            last,
        ),
    )


def _runs(view: ClusterView, name: str, *, for_s: float = 0.0) -> bool:
    job = view.jobs.get(name)
    return job is not None and job.state == "RUNNING" and view.time - job.since >= for_s


def _trains(view: ClusterView, name: str, steps: int, *, on: int | None = None) -> bool:
    """Return whether a job has done so many steps in its present run, or has ended."""
    job = view.jobs.get(name)
    if job is None:
        return False
    if job.ended:
        return True
    return job.state == "RUNNING" and job.steps_in_run >= steps and on in (None, job.ranks)


def _saved(view: ClusterView, name: str) -> bool:
    """Return whether a job has written a checkpoint; it cannot be resized before."""
    return any(job == name for job, _ in view.saves)


def _ended(view: ClusterView, name: str) -> bool:
    job = view.jobs.get(name)
    return job is not None and job.ended
