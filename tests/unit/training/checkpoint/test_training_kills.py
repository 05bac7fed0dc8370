"""SIGKILL of any rank at any point: published checkpoints stay, and the result is the same."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import Any

import pytest
import torch

from slurm_elastic.training.checkpoint.checkpoint_directory import (
    CheckpointDirectory,
    CompleteCheckpoint,
    open_checkpoint,
)
from slurm_elastic.training.parallel.fsdp import unsupported
from slurm_elastic.training.signals import STOPPED, exit_now
from tests.support.patience import PATIENCE_S
from tests.support.trainings.kill_points import KillPoint
from tests.support.trainings.small_buckets import SmallBuckets
from tests.support.trainings.training_runs import (
    BATCH,
    PROCESSES,
    SAMPLES,
    FakeLauncher,
    TrainingRuns,
    lines,
    wait,
)

EPOCHS = 5
STEPS = EPOCHS * -(-SAMPLES // BATCH)
#: A save is up to 30 operations on the directory, a start 450 lines of the library, a step with
#: its save 1,700. A count beyond that is reached a step later.
OPERATIONS, LINES_OF_A_START, LINES_OF_A_STEP = 35, 450, 1700
KILL_WAIT_S = 2.0
#: Five or six kills in each of these; `sizes` are numbers of ranks that an attempt may have.
TRAININGS: list[dict[str, Any]] = [
    {"optimizer": "sgd"},
    {"optimizer": "adamw", "background": True},
    {"optimizer": "sgd", "workers": 1, "micro_batch": 3},
    {"optimizer": "adamw", "directive": "1-8,parallel=pipeline"},
    {"optimizer": "sgd", "directive": "1-8,parallel=pipeline", "background": True},
    {"optimizer": "adamw", "shard": True},
    {"optimizer": "sgd", "model": "cosmology", "directive": "1-8,parallel=spatial"},
    {"optimizer": "adamw", "overlap": "sliced", "sizes": (2, 2, 3)},
    {"optimizer": "adamw", "overlap": "buckets", "faults": [SmallBuckets()], "sizes": (2, 2, 3)},
    {"optimizer": "sgd", "tensor": 2, "sizes": (2, 2, 4)},
    {
        "optimizer": "sgd",
        "overlap": "sliced",
        "directive": "2-8,unit=2,parallel=hybrid",
        "sizes": (4,),
    },
]
SIZES = (1, 2, 2, 2, 3)
#: Beside those at operations on checkpoints, each training has two of these kills.
OTHER_KILLS = ("line", "start", "line", "time", "early")
#: Exit codes of ranks that are not killed: lost connection, SIGTERM, SIGTERM before `init`.
ENDED = (1, STOPPED, -signal.SIGTERM)


@dataclass(frozen=True)
class Kill:
    """One attempt and its end.

    Attributes:
        size: number of ranks.
        kill_point: kills at a point of the program; None: at some time.
        after: without a kill point, steps of the attempt that have begun before.
        delay_s: without a kill point, delay after that.
        victims: the ranks that are killed.
        terminates: whether the others get SIGTERM, as from srun.
        every_s: between two checkpoints.
    """

    size: int
    kill_point: KillPoint | None
    after: int
    delay_s: float
    victims: tuple[int, ...]
    terminates: bool
    every_s: float

    def __str__(self) -> str:
        when = self.kill_point or f"{self.delay_s:.3f} s after begin of step {self.after}"
        how = "SIGTERM for the others" if self.terminates else "no SIGTERM"
        return f"{self.size} ranks, kills {self.victims} at {when}, every {self.every_s} s, {how}"


def kills(seed: int) -> list[Kill]:
    """Return kills at three or four operations on checkpoints, and two others."""
    draw = random.Random(seed)
    operations = random.Random(0).sample(range(1, OPERATIONS + 1), OPERATIONS)
    operations = operations[seed :: len(TRAININGS)]
    others = [OTHER_KILLS[(2 * seed + i) % len(OTHER_KILLS)] for i in range(2)]
    kinds = ["file"] * len(operations) + others
    draw.shuffle(kinds)
    sizes = TRAININGS[seed].get("sizes", SIZES)
    return [_kill(draw, kind, operations, sizes) for kind in kinds]


def _kill(
    draw: random.Random, kind: str, operations: list[int], sizes: tuple[int, ...] = SIZES
) -> Kill:
    size = draw.choice(sizes)
    one = (draw.randrange(size),)
    victims = draw.choice((one, one, one, tuple(range(size))))
    step, kill_point = draw.randint(1, 3), None
    if kind == "file":
        kill_point = KillPoint(kind="file", count=operations.pop(), step=step, victims=victims)
    elif kind in ("line", "start"):
        most = LINES_OF_A_START if kind == "start" else LINES_OF_A_STEP
        kill_point = KillPoint(
            kind="line",
            count=draw.randint(1, most),
            step=0 if kind == "start" else step,
            watched=draw.randrange(size),
            victims=victims,
        )
    return Kill(
        size=size,
        kill_point=kill_point,
        after=0 if kind in ("early", "start") else step,
        delay_s=draw.uniform(0, 0.3 if kind == "early" else 0.05),
        victims=victims,
        terminates=draw.random() < 0.9 or kind in ("early", "start"),
        every_s=0.0 if kind == "file" else draw.choice((0.0, 0.0, 0.05)),
    )


@dataclass
class KillHistory:
    """Kills of a run, for the message of a test that fails."""

    runs: TrainingRuns
    events: list[str]
    published: int = 0

    def __str__(self) -> str:
        return "\n".join([*self.events, self.runs.log()])


def attempt(runs: TrainingRuns, kill: Kill, history: KillHistory, **options: Any) -> None:
    """Run one attempt that ends with this kill."""
    # By the clock: slow steps, so that a fast machine is not done before.
    pace = {} if kill.kill_point else {"step_s": 0.05}
    runs.start(kill.size, kill_point=kill.kill_point, every_s=kill.every_s, **pace, **options)
    if kill.kill_point is None:
        here = runs.attempts
        wait(lambda: kill.after == 0 or begun(runs, here) >= kill.after, f"a step\n{history}")
        time.sleep(kill.delay_s)
        for victim in kill.victims:
            runs.ranks[victim].kill()
    ended(runs, kill, history, **options)


def ended(runs: TrainingRuns, kill: Kill, history: KillHistory, **options: Any) -> None:
    """Wait until all ranks have ended, and check that the newest checkpoint is complete."""
    ranks = [process.sentinel for process in runs.ranks]
    assert connection.wait(ranks, PATIENCE_S), f"nobody died\n{kill}\n{history}"
    died = time.monotonic()
    if kill.terminates:
        runs.signal(signal.SIGTERM)
    several = bool(options.keys() & {"directive", "shard"}) or options.get("overlap") == "sliced"
    if several:
        # Rank 0 may wait for a writer that is dead; srun would kill it after KillWait.
        for process in runs.ranks:
            process.join(max(0.0, died + KILL_WAIT_S - time.monotonic()))
            process.kill()
    codes = runs.join()
    took = time.monotonic() - died
    moment = runs.out / f"kill-point-{runs.attempts}"
    what = moment.read_text() if moment.exists() else ""
    history.events.append(f"{runs.attempts}: {kill}: {what} -> {codes} in {took:.2f} s")
    # A victim may get SIGTERM before it is killed.
    assert any(codes[rank] == -signal.SIGKILL for rank in kill.victims), str(history)
    for rank, code in enumerate(codes):
        killed = several or rank in kill.victims
        assert code in ENDED or (killed and code == -signal.SIGKILL), str(history)
    checkpoint = newest(runs)
    step = checkpoint.step if checkpoint else 0
    assert step >= history.published, str(history)
    now = begun(runs, runs.attempts)
    if kill.every_s == 0 and now and not options.get("background"):
        # With a save after every step no more than the last one is repeated.
        assert step in (history.published + now - 1, history.published + now), str(history)
    history.published = step


def begun(runs: TrainingRuns, attempt: int, rank: int = 0) -> int:
    """Return the number of steps that a rank has begun in this attempt."""
    return sum(line["attempt"] == attempt for line in lines(runs.out / f"begun-rank{rank}.jsonl"))


def newest(runs: TrainingRuns) -> CompleteCheckpoint | None:
    """Return the newest checkpoint; none may be incomplete."""
    log_lines: list[str] = []
    checkpoint = CheckpointDirectory(runs.out / "ckpt", keep=2, log=log_lines.append).newest()
    assert log_lines == []
    return checkpoint


def effective(runs: TrainingRuns) -> list[Counter[int]]:
    """Return how often each sample counts, by epoch: a step counts as last computed.

    Checks that a repeated step has the same samples.
    """
    last: dict[int, int] = {}
    shares: dict[tuple[int, int], list[int]] = {}
    epochs: dict[int, int] = {}
    for path in runs.out.glob("begun-rank*.jsonl"):
        for line in lines(path):
            step, attempt = line["step"], line["attempt"]
            last[step] = max(attempt, last.get(step, 0))
            epochs[step] = line["epoch"]
            shares.setdefault((step, attempt), []).extend(line["indices"])
    seen: list[Counter[int]] = [Counter() for _ in range(EPOCHS)]
    for (step, attempt), share in shares.items():
        if attempt == last[step]:
            seen[epochs[step]].update(share)
        assert set(share) <= set(shares[step, last[step]]), f"step {step} had other samples"
    return seen


def same(runs: TrainingRuns, plain: TrainingRuns, history: KillHistory) -> None:
    """Check that losses, samples, parameters and optimizer state equal those of another run."""
    expected = plain.losses()
    assert sorted(runs.losses()) == list(range(1, STEPS + 1)), str(history)
    for line in lines(runs.out / "losses.jsonl"):  # repeated ones as well
        assert line["loss"] == pytest.approx(expected[line["step"]], abs=1e-6), str(history)
    assert effective(runs) == [Counter(range(SAMPLES))] * EPOCHS, str(history)
    mine, theirs = newest(runs), newest(plain)
    assert mine is not None
    assert theirs is not None
    assert mine.step == theirs.step == STEPS
    # Each writer has a blob of its own of plain values.
    left, expected_left = (
        {n: t for n, t in c.read().items() if not n.startswith("blob.")} for c in (mine, theirs)
    )
    assert left.keys() == expected_left.keys()
    for name, value in expected_left.items():
        torch.testing.assert_close(left[name], value, rtol=0.0, atol=1e-6, msg=name)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], TrainingRuns]:
    """Return runs of one rank without kills, by model and optimizer."""
    runs = {}
    for model, optimizer in (("plain", "adamw"), ("plain", "sgd"), ("cosmology", "sgd")):
        alone = TrainingRuns(tmp_path_factory.mktemp(f"{model}-{optimizer}"))
        alone.run(1, model=model, optimizer=optimizer, epochs=EPOCHS, padding_kb=1)
        runs[model, optimizer] = alone
    return runs


@pytest.mark.parametrize("seed", range(len(TRAININGS)))
def test_a_training_with_kills_equals_an_undisturbed_one(
    runs: TrainingRuns, undisturbed: dict[tuple[str, str], TrainingRuns], seed: int
) -> None:
    history = KillHistory(runs, [f"seed {seed}"])
    options = TRAININGS[seed] | {"epochs": EPOCHS, "padding_kb": 1024}
    ranks = max(2, min(options.pop("sizes", SIZES)))
    for number, kill in enumerate(kills(seed)):
        # What a killed rank's data-loader workers inherit keeps connections open for 5 s.
        workers = {"workers": 0} if number not in (1, 3) else {}
        attempt(runs, kill, history, **options | workers)
    runs.start(ranks, **options)
    assert runs.join() == [0] * ranks, str(history)
    assert f"resumed from step {history.published} with {ranks} rank(s)" in runs.log()
    same(runs, undisturbed[options.get("model", "plain"), options["optimizer"]], history)
    left = [path for path in (runs.out / "ckpt").iterdir() if path.name != "latest"]
    # Two stay, and a third if the last kill came between a save and its end.
    assert len([open_checkpoint(path) for path in left]) <= 3, str(history)


@pytest.mark.skipif(bool(unsupported()), reason=unsupported())
@pytest.mark.parametrize("background", [False, True])
def test_a_training_whose_replicas_and_their_ranks_divide_parameters_survives_kills(
    runs: TrainingRuns, undisturbed: dict[tuple[str, str], TrainingRuns], background: bool
) -> None:
    history = KillHistory(runs, [])
    options: dict[str, Any] = {"tensor": 2, "shard": True, "background": background}
    options |= {"optimizer": "adamw", "epochs": EPOCHS, "padding_kb": 1024}
    draw = random.Random(int(background))
    operations = draw.sample(range(1, OPERATIONS + 1), 3)
    for kind in ("file", "line", "file", "time", "start", "file"):
        kill = _kill(draw, kind, operations)
        size = draw.choice((4, 4, 6))
        victims = kill.victims if len(kill.victims) == 1 else tuple(range(size))
        attempt(runs, replace(kill, size=size, victims=victims), history, **options)
    runs.start(4, **options)
    assert runs.join() == [0] * 4, str(history)
    assert f"resumed from step {history.published} with 4 rank(s), layout 2x1" in runs.log()
    same(runs, undisturbed["plain", "adamw"], history)


def test_a_training_with_five_kills_at_its_end_equals_an_undisturbed_one(
    runs: TrainingRuns, undisturbed: dict[tuple[str, str], TrainingRuns]
) -> None:
    history = KillHistory(runs, [])
    options: dict[str, Any] = {"optimizer": "adamw", "epochs": EPOCHS, "padding_kb": 1024}
    draw = random.Random(5)
    for victim in (0, 0, 0, 1, 1):
        last = STEPS - history.published
        count = draw.randint(1, LINES_OF_A_STEP if last else LINES_OF_A_START)
        victims = (victim,)
        kill_point = KillPoint(kind="line", count=count, step=last, victims=victims)
        kill = Kill(2, kill_point, 0, 0.0, victims, terminates=True, every_s=0.0)
        attempt(runs, kill, history, **options)
    runs.start(2, **options)
    assert runs.join() == [0, 0], str(history)
    same(runs, undisturbed["plain", "adamw"], history)


def test_kills_of_ranks_that_wait_at_their_checkpoint(
    runs: TrainingRuns, launcher: FakeLauncher, undisturbed: dict[tuple[str, str], TrainingRuns]
) -> None:
    history = KillHistory(runs, [])
    options: dict[str, Any] = {"optimizer": "adamw", "epochs": EPOCHS, "padding_kb": 1}
    for notice, victim in enumerate((0, 1), start=1):
        launcher.begin_attempt()
        launcher.order("run")
        runs.start(2, launcher=launcher, step_s=0.01, **options)
        runs.wait_for_step(history.published + 2)
        launcher.order("notice", notice=notice)
        saved = launcher.wait_for("saved", notice=notice)["step"]
        runs.ranks[victim].kill()
        ended(
            runs,
            Kill(2, None, 0, 0.0, (victim,), terminates=True, every_s=600.0),
            history,
            **options,
        )
        assert history.published == saved == max(runs.losses())
    runs.start(2, **options)
    assert runs.join() == [0, 0], str(history)
    same(runs, undisturbed["plain", "adamw"], history)


def test_kills_while_ranks_save_to_change_their_layout(
    runs: TrainingRuns, launcher: FakeLauncher, undisturbed: dict[tuple[str, str], TrainingRuns]
) -> None:
    history = KillHistory(runs, [])
    options: dict[str, Any] = {"optimizer": "sgd", "epochs": EPOCHS, "padding_kb": 1}
    options |= {"launcher": launcher, "directive": "1-8,parallel=hybrid"}
    now, then = "2x1", "1x2"
    for count, victim in ((4, 1), (12, 0), (15, 0), (16, 1)):
        launcher.set_orders(layout=now)
        kill_point = KillPoint(kind="file", count=count, step=1, victims=(victim,))
        runs.start(2, kill_point=kill_point, step_s=0.02, **options)
        wait(lambda: begun(runs, runs.attempts) > 1, f"a step\n{history}")
        launcher.set_orders(layout=then)
        ended(
            runs,
            Kill(2, kill_point, 0, 0.0, (victim,), terminates=True, every_s=600.0),
            history,
            **options,
        )
        now, then = then, now
    assert history.published > 0
    launcher.set_orders(layout=now)
    runs.start(2, **options)
    assert runs.join() == [0, 0], str(history)
    same(runs, undisturbed["plain", "sgd"], history)


def leave_with_children() -> None:
    def complain(*_: object) -> None:
        raise RuntimeError("as torch's data loader does when a worker dies")

    context = multiprocessing.get_context("fork")
    for _ in range(4):
        context.Process(target=time.sleep, args=(PATIENCE_S,)).start()
    signal.signal(signal.SIGCHLD, complain)
    exit_now(STOPPED)


def test_exit_now_ends_data_loader_workers() -> None:
    process = PROCESSES.Process(target=leave_with_children)
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == STOPPED
