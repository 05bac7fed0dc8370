"""The scene: who submits what, and what has to be seen before the next act begins.

The full one needs all that elasticity is for. Bob's jobs leave alice's little
room at first; then his next ones come, each so large that one of hers has to
do something else: move, grow into what ended, shrink, and at last wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from contrib.demo.cluster import PROJECT, STAGE
from contrib.demo.view import View

EXAMPLES = f"{PROJECT}/docs/examples"
BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What an elastic job trains.

    Attributes:
        rate: samples/s of an emulated v100.
        library: whether the script uses the library.
        more: arguments that do not change the result.
    """

    samples: int = 2048
    epochs: int
    rate: int
    library: bool = True
    more: str = ""

    @property
    def steps(self) -> int:
        """Optimisation steps in all."""
        return self.epochs * math.ceil(self.samples / BATCH)

    @property
    def arguments(self) -> str:
        """What decides the result, as the example scripts take it."""
        return f"--samples {self.samples} --epochs {self.epochs} --global-batch {BATCH}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job to be submitted.

    Attributes:
        options: sbatch's.
        training: None for a rigid job.
    """

    name: str
    user: str
    options: str
    training: Training | None = None

    @property
    def script(self) -> str:
        """Its batch script on the cluster."""
        if self.training is None:
            return f"{STAGE}/rigid.sbatch"
        return f"{EXAMPLES}/train_{'library' if self.training.library else 'plain'}.sbatch"

    @property
    def until(self) -> str:
        """The file that ends a rigid job."""
        return f"{STAGE}/{self.name}.done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One thing that happens.

    Attributes:
        says: what the audience reads.
        when: what must be seen first.
        awaits: the same, in words.
        submit, end, cancel: jobs.
    """

    says: str
    when: Callable[[View], bool]
    awaits: str
    submit: tuple[Job, ...] = ()
    end: tuple[str, ...] = ()
    cancel: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Acts in their order; `wants`: the changes that the verdict asks for."""

    acts: tuple[Act, ...]
    wants: tuple[str, ...]

    @property
    def jobs(self) -> dict[str, Job]:
        """All jobs, by name."""
        return {job.name: job for act in self.acts for job in act.submit}

    @property
    def trainings(self) -> dict[str, Training]:
        """What the elastic ones train."""
        return {n: job.training for n, job in self.jobs.items() if job.training}


def rigid(name: str, gpus: int, kind: str, *, node: str = "", qos: str = "") -> Job:
    """One of bob's: so many GPUs of each node, for as long as the scene needs it."""
    options = f"--gres=gpu:{kind}:{gpus}"
    options += f" --nodelist={node} --nodes={len(node.split(','))}" if node else ""
    options += f" --qos={qos}" if qos else ""
    return Job(name=name, user="bob", options=options)


def elastic(name: str, directive: str, least: int, training: Training) -> Job:
    """One of alice's, submitted at its MIN."""
    kind = directive.partition("types=")[2]
    options = f"--elastic={directive} --gres=gpu:{kind}:{least} --ntasks-per-node={least}"
    return Job(name=name, user="alice", options=options, training=training)


def full() -> Scene:
    """All of it; about two and a half minutes."""
    gpt = elastic("gpt", "4-8,types=a100", 4, Training(epochs=6, rate=32))
    vit = elastic("vit", "2,types=v100", 2, Training(epochs=5, rate=64))
    script = Training(epochs=6, rate=96, library=False, more="--save-every 10")
    plain = elastic("plain", "1-2,types=v100", 1, script)
    first = (
        rigid("ingest", 4, "a100", node="g02"),
        rigid("sim", 4, "a100", node="g04"),
        rigid("prep", 2, "v100", node="g03,g05"),
        rigid("render", 4, "v100", node="g06"),
    )
    return Scene(
        wants=("move", "grow", "shrink", "preempt"),
        acts=(
            Act(
                says="bob's jobs hold 16 of the 24 GPUs",
                when=lambda _: True,
                awaits="nothing",
                submit=first,
            ),
            Act(
                says="alice submits three elastic jobs: gpt, vit and the unmodified script plain",
                when=lambda v: all(_runs(v, job.name) for job in first),
                awaits="bob's jobs to run",
                submit=(gpt, vit, plain),
            ),
            Act(
                says="prep ends, and bob's eval wants a whole v100 node: 4 are free, but on two",
                when=lambda v: all(_saved(v, name) for name in ("gpt", "vit", "plain")),
                awaits="the first checkpoints",
                submit=(rigid("eval", 4, "v100"),),
                end=("prep",),
            ),
            Act(
                says="ingest ends: a whole a100 node is idle",
                when=lambda v: _runs(v, "eval") and _trains(v, "gpt", 12),
                awaits="eval to run",
                end=("ingest",),
            ),
            Act(
                says="bob's train wants a whole a100 node, his debug one v100",
                when=lambda v: _trains(v, "gpt", 20, on=8),
                awaits="gpt to train on 8 GPUs",
                submit=(rigid("train", 4, "a100"), rigid("debug", 1, "v100")),
            ),
            Act(
                says="bob's urgent wants one as well, and gpt is at its MIN; its QOS ranks higher",
                when=lambda v: _runs(v, "train") and _trains(v, "gpt", 10, on=4),
                awaits="train to run, and gpt to train on 4 GPUs",
                submit=(rigid("urgent", 4, "a100", qos="urgent"),),
            ),
            Act(
                says="urgent and debug end",
                when=lambda v: _runs(v, "urgent", for_s=12),
                awaits="urgent to run",
                end=("urgent", "debug"),
            ),
            Act(
                says="alice's jobs are done; bob's end",
                when=lambda v: all(_over(v, name) for name in ("gpt", "vit", "plain")),
                awaits="alice's jobs to complete",
                end=("sim", "render", "eval", "train"),
            ),
        ),
    )


def short(*, kill: bool = False) -> Scene:
    """One job that grows; with `kill` it is cancelled after that. For `--break`."""
    etl = rigid("etl", 4, "a100", node="g02")
    others = (rigid("sim", 4, "a100", node="g04"), rigid("night", 3, "a100", node="g01"))
    # slow if it shall be killed: it must not be done before
    gpt = elastic("gpt", "1-2,types=a100", 1, Training(epochs=4, rate=40 if kill else 160))
    last = Act(
        says="gpt is done; bob's jobs end",
        when=lambda v: _over(v, "gpt"),
        awaits="gpt to complete",
        end=("sim", "night"),
    )
    killing = Act(
        says="sabotage: gpt is cancelled",
        when=lambda v: _trains(v, "gpt", 3, on=2),
        awaits="gpt to train on 2 GPUs",
        cancel=("gpt",),
    )
    return Scene(
        wants=("grow",),
        acts=(
            Act(
                says="bob's jobs leave one a100",
                when=lambda _: True,
                awaits="nothing",
                submit=(etl, *others),
            ),
            Act(
                says="alice submits gpt",
                when=lambda v: all(_runs(v, job.name) for job in (etl, *others)),
                awaits="bob's jobs to run",
                submit=(gpt,),
            ),
            Act(
                says="etl ends",
                when=lambda v: _trains(v, "gpt", 4),
                awaits="gpt to train",
                end=("etl",),
            ),
            *((killing,) if kill else ()),
            last,
        ),
    )


def _runs(view: View, name: str, *, for_s: float = 0.0) -> bool:
    job = view.jobs.get(name)
    return job is not None and job.state == "RUNNING" and view.time - job.since >= for_s


def _trains(view: View, name: str, steps: int, *, on: int | None = None) -> bool:
    """Whether a job has made so many steps in its present run; true as well if it is over."""
    job = view.jobs.get(name)
    if job is None:
        return False
    return job.over or (job.state == "RUNNING" and job.stepped >= steps and on in (None, job.count))


def _saved(view: View, name: str) -> bool:
    """Whether a job has written a checkpoint: before that it cannot be resized."""
    return any(job == name for job, _ in view.saves)


def _over(view: View, name: str) -> bool:
    job = view.jobs.get(name)
    return job is not None and job.over
