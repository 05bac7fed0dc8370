"""One performance from beginning to end: cluster, scene, verdict, picture."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from contrib.demo import accounting, logs, scene, timeline, verdict
from contrib.demo.cluster import STAGE, Cluster
from contrib.demo.director import Director, prepare, reference_script
from contrib.demo.errors import DemoError
from contrib.demo.palette import colours
from contrib.demo.rows import SINFO, Rack, racks
from contrib.demo.scene import Scene
from contrib.demo.screen import Screen, console
from contrib.demo.watch import Watch

_FILES = Path(__file__).parent / "files"
_ON_CLUSTER = {
    "elastic.toml": "/etc/slurm-elastic/elastic.toml",
    "rigid.sbatch": f"{STAGE}/rigid.sbatch",
    "forgetful.py": f"{STAGE}/broken/train_library.py",
}
_REFERENCE_S = 120.0
#: What sacct said; its presence shows that a directory is the demo's.
_MARK = "sacct.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to play; see `--help`."""

    name: str = "demo"
    out: Path = Path("demo-out")
    keep: bool = False
    short: bool = False
    sabotage: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """What is left when the curtain falls."""

    racks: tuple[Rack, ...]
    sacct: str
    watch: Watch
    missed: tuple[str, ...]


def perform(options: Options) -> bool:
    """Play it; whether every check holds."""
    show = scene.short(kill=options.sabotage == "kill-job") if options.short else scene.full()
    screen = console()
    _make_room(options.out)
    with _cluster(options) as cluster:
        played = _play(cluster, show, options, screen)
    evidence = _evidence(show, played, options.out)
    checks = verdict.judge(evidence)
    pictures = [options.out / "timeline.png", options.out / "timeline.svg"]
    _draw(show, played, evidence, pictures)
    _summary(screen, evidence, checks, played.missed)
    screen.print(f"\npicture: {pictures[0]}   logs: {options.out}/", soft_wrap=True)
    return all(check.holds for check in checks)


def _make_room(out: Path) -> None:
    """A directory for what comes out, before anything takes time; only the demo's is replaced."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        ours = (out / _MARK).exists() or not (out / "jobs").exists()
        if ours:
            (out / _MARK).touch()
    except OSError as error:
        raise DemoError(f"{out}: {error.strerror}; choose another --out") from None
    if not ours:
        raise DemoError(f"{out}/jobs is not the demo's; choose another --out")


@contextmanager
def _cluster(options: Options) -> Iterator[Cluster]:
    """A fresh cluster, removed afterwards unless it is to be kept."""
    cluster = Cluster(options.name)
    if cluster.is_up():
        running = cluster.run("squeue -h -t R,PD -o %j 2>/dev/null || true").split()
        if running:
            raise DemoError(
                f"cluster {options.name} is up and runs {len(running)} jobs: take it down first "
                f"(contrib/cluster/cluster --name {options.name} down) or use another --name"
            )
        cluster.down()
    try:
        cluster.up()
    except KeyboardInterrupt:
        cluster.down()
        raise
    try:
        yield cluster
    finally:
        if options.keep:
            print(f"it stays up; to remove it: contrib/cluster/cluster --name {options.name} down")
        else:
            cluster.down()


def _play(cluster: Cluster, show: Scene, options: Options, out: Console) -> _Played:
    prepare(cluster, {path: (_FILES / name).read_text() for name, path in _ON_CLUSTER.items()})
    nodes = racks(cluster.run(SINFO))
    reference = threading.Thread(target=_train_reference, args=(cluster, show), daemon=True)
    with Watch(cluster) as watch:
        screen = Screen(
            racks=nodes,
            colours=_colours(show),
            steps={name: training.steps for name, training in show.trainings.items()},
            start=time.time(),
            console=out,
        )
        forgetful = options.sabotage == "skip-sample"
        director = Director(cluster, show, watch, screen, forgetful=forgetful)
        with screen:
            reference.start()
            director.play()
    reference.join(timeout=_REFERENCE_S)
    _fetch(cluster, options.out)
    sacct = cluster.run(accounting.command(director.ids.values()))
    (options.out / _MARK).write_text(sacct)
    return _Played(racks=nodes, sacct=sacct, watch=watch, missed=tuple(director.missed))


def _train_reference(cluster: Cluster, show: Scene) -> None:
    """Meanwhile, with what the cluster leaves of the host's processors."""
    try:
        cluster.run(reference_script(show), user="alice")
    except DemoError:
        return  # what is missing is seen by the verdict


def _fetch(cluster: Cluster, out: Path) -> None:
    """What the jobs wrote, and the controller's log for people who look for causes."""
    shutil.rmtree(out / "jobs", ignore_errors=True)
    cluster.fetch(out / "jobs", ["--exclude=checkpoints", "--exclude=ckpt", "."])
    (out / "selasticd.log").write_text(cluster.run("cat /var/log/selastic/selasticd.log"))


def _evidence(show: Scene, played: _Played, out: Path) -> verdict.Evidence:
    attempts = accounting.parse(played.sacct)
    trainings = show.trainings
    return verdict.Evidence(
        elastic=tuple(trainings),
        rigid=tuple(name for name in show.jobs if name not in trainings),
        attempts=attempts,
        changes=[c for c in accounting.changes(attempts) if c.name in trainings],
        logs={name: logs.read(out / "jobs" / name, t) for name, t in trainings.items()},
        references={
            name: logs.read(out / "jobs" / "reference" / name, t) for name, t in trainings.items()
        },
        library=tuple(name for name, t in trainings.items() if t.library),
        wants=show.wants,
    )


def _draw(show: Scene, played: _Played, evidence: verdict.Evidence, paths: list[Path]) -> None:
    play = timeline.Play(
        racks=played.racks,
        attempts=evidence.attempts,
        changes=evidence.changes,
        placements=played.watch.placements,
        saves=played.watch.view.saves,
        colours=_colours(show),
        elastic=evidence.elastic,
        title="Elastic jobs on 24 GPUs: which job held which GPU when",
    )
    timeline.draw(play, paths)


def _colours(show: Scene) -> dict[str, str]:
    elastic = tuple(show.trainings)
    return dict(colours(elastic, (name for name in show.jobs if name not in elastic)))


def _summary(
    out: Console,
    evidence: verdict.Evidence,
    checks: tuple[verdict.Check, ...],
    missed: tuple[str, ...],
) -> None:
    out.print("\nWhat sacct shows")
    for line in verdict.summary(evidence):
        out.print(f"  {line}", soft_wrap=True)
    for what in missed:
        out.print(f"  the scene went on without {what}", style="red")
    out.print("\nVerdict, from sacct and the jobs' own logs alone")
    for check in checks:
        out.print(f"  {'ok  ' if check.holds else 'FAIL'}  ", end="", style=_style(check))
        out.print(check.name + (f" ({check.saw})" if check.saw else ""), soft_wrap=True)
        for fault in check.faults[:5]:
            out.print(f"        {fault}", style="red", soft_wrap=True)
        if len(check.faults) > 5:
            out.print(f"        and {len(check.faults) - 5} more", style="red")
    bad = sum(not check.holds for check in checks)
    out.print(f"{bad} of {len(checks)} checks failed" if bad else f"all {len(checks)} checks hold")


def _style(check: verdict.Check) -> str:
    return "green" if check.holds else "bold red"
