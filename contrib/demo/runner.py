"""One run of the demo: cluster, scenario, checks, picture."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from contrib.demo import checks, sacct, scenario, timeline, training_logs
from contrib.demo.cluster_watch import ClusterWatch
from contrib.demo.colours import colours
from contrib.demo.demo_cluster import SHARED_DIR, DemoCluster, DemoError
from contrib.demo.gpu_rows import SINFO, Rack, racks
from contrib.demo.scenario import Scenario
from contrib.demo.scenario_runner import ScenarioRunner, prepare, reference_script
from contrib.demo.screen import Screen, console

_FILES = Path(__file__).parent / "files"
_ON_CLUSTER = {
    "elastic.toml": "/etc/slurm-elastic/elastic.toml",
    "rigid.sbatch": f"{SHARED_DIR}/rigid.sbatch",
    "forgetful.py": f"{SHARED_DIR}/broken/train_library.py",
}
_REFERENCE_S = 120.0
#: Output of sacct; a folder with this file was created by the demo.
_SACCT_FILE = "sacct.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Options of the command line; see `--help`."""

    name: str = "demo"
    out: Path = Path("demo-out")
    keep: bool = False
    short: bool = False
    sabotage: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """Observations of one scenario."""

    racks: tuple[Rack, ...]
    sacct_text: str
    watch: ClusterWatch
    missed: tuple[str, ...]


def run_demo(options: DemoOptions) -> bool:
    """Run the demo and return whether every check holds."""
    kill = options.sabotage == "kill-job"
    chosen = scenario.short(kill=kill) if options.short else scenario.full()
    screen = console()
    _create_output_folder(options.out)
    with _cluster(options) as cluster:
        outcome = _run_scenario(cluster, chosen, options, screen)
    evidence = _evidence(chosen, outcome, options.out)
    results = checks.evaluate(evidence)
    pictures = [options.out / "timeline.png", options.out / "timeline.svg"]
    _draw(chosen, outcome, evidence, pictures)
    _summary(screen, evidence, results, outcome.missed)
    screen.print(f"\npicture: {pictures[0]}   logs: {options.out}/", soft_wrap=True)
    return all(check.holds for check in results)


def _create_output_folder(out: Path) -> None:
    """Create the output folder before any long work; a folder of another origin is refused."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        is_ours = (out / _SACCT_FILE).exists() or not (out / "jobs").exists()
        if is_ours:
            (out / _SACCT_FILE).touch()
    except OSError as error:
        raise DemoError(f"{out}: {error.strerror}; choose another --out") from None
    if not is_ours:
        raise DemoError(f"{out}/jobs is not the demo's; choose another --out")


@contextmanager
def _cluster(options: DemoOptions) -> Iterator[DemoCluster]:
    """Start a fresh cluster, and remove it afterwards unless `--keep` is given."""
    cluster = DemoCluster(options.name)
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
            command = f"contrib/cluster/cluster --name {options.name} down"
            print(f"the cluster stays up; to remove it: {command}")
        else:
            cluster.down()


def _run_scenario(
    cluster: DemoCluster, chosen: Scenario, options: DemoOptions, out: Console
) -> _Outcome:
    prepare(cluster, {path: (_FILES / name).read_text() for name, path in _ON_CLUSTER.items()})
    nodes = racks(cluster.run(SINFO))
    reference = threading.Thread(target=_train_reference, args=(cluster, chosen), daemon=True)
    with ClusterWatch(cluster) as watch:
        screen = Screen(
            racks=nodes,
            colours=_colours(chosen),
            steps={name: training.steps for name, training in chosen.trainings.items()},
            start=time.time(),
            console=out,
        )
        forgetful = options.sabotage == "skip-sample"
        runner = ScenarioRunner(cluster, chosen, watch, screen, forgetful=forgetful)
        with screen:
            reference.start()
            runner.run()
    reference.join(timeout=_REFERENCE_S)
    _fetch(cluster, options.out)
    sacct_text = cluster.run(sacct.COMMAND)
    (options.out / _SACCT_FILE).write_text(sacct_text)
    return _Outcome(racks=nodes, sacct_text=sacct_text, watch=watch, missed=tuple(runner.missed))


def _train_reference(cluster: DemoCluster, chosen: Scenario) -> None:
    """Train the reference at low priority, beside the jobs."""
    try:
        cluster.run(reference_script(chosen), user="alice")
    except DemoError:
        return  # the checks then fail for lack of a reference


def _fetch(cluster: DemoCluster, out: Path) -> None:
    """Fetch the files of the jobs, and the controller's log."""
    shutil.rmtree(out / "jobs", ignore_errors=True)
    cluster.fetch(out / "jobs", ["--exclude=checkpoints", "--exclude=ckpt", "."])
    (out / "selasticd.log").write_text(cluster.run("cat /var/log/selastic/selasticd.log"))


def _evidence(chosen: Scenario, outcome: _Outcome, out: Path) -> checks.Evidence:
    attempts = sacct.parse(outcome.sacct_text)
    trainings = chosen.trainings
    changes = sacct.changes(sacct.with_companions(attempts, chosen.jobs))
    return checks.Evidence(
        elastic=tuple(trainings),
        rigid=tuple(name for name in chosen.jobs if name not in trainings),
        attempts=attempts,
        changes=[c for c in changes if c.name in trainings],
        logs={name: training_logs.read(out / "jobs" / name, t) for name, t in trainings.items()},
        references={
            name: training_logs.read(out / "jobs" / "reference" / name, t)
            for name, t in trainings.items()
        },
        library=tuple(name for name, t in trainings.items() if t.library),
        expected_changes=chosen.expected_changes,
    )


def _draw(
    chosen: Scenario, outcome: _Outcome, evidence: checks.Evidence, paths: list[Path]
) -> None:
    content = timeline.Timeline(
        racks=outcome.racks,
        attempts=sacct.with_companions(evidence.attempts, chosen.jobs),
        changes=evidence.changes,
        placements=outcome.watch.placements,
        saves=outcome.watch.view.saves,
        colours=_colours(chosen),
        elastic=evidence.elastic,
        title="Elastic jobs on 24 GPUs: which job held which GPU when",
    )
    timeline.draw(content, paths)


def _colours(chosen: Scenario) -> dict[str, str]:
    elastic = tuple(chosen.trainings)
    return dict(colours(elastic, (name for name in chosen.jobs if name not in elastic)))


def _summary(
    out: Console,
    evidence: checks.Evidence,
    results: tuple[checks.Check, ...],
    missed: tuple[str, ...],
) -> None:
    out.print("\nWhat sacct shows")
    for line in checks.summary(evidence):
        out.print(f"  {line}", soft_wrap=True)
    for condition in missed:
        out.print(f"  the scenario went on without {condition}", style="red")
    out.print("\nVerdict, from sacct and the jobs' own logs alone")
    for check in results:
        out.print(f"  {'ok  ' if check.holds else 'FAIL'}  ", end="", style=_style(check))
        out.print(check.name + (f" ({check.details})" if check.details else ""), soft_wrap=True)
        for fault in check.faults[:5]:
            out.print(f"        {fault}", style="red", soft_wrap=True)
        if len(check.faults) > 5:
            out.print(f"        and {len(check.faults) - 5} more", style="red")
    failed = sum(not check.holds for check in results)
    total = len(results)
    out.print(f"{failed} of {total} checks failed" if failed else f"all {total} checks hold")


def _style(check: checks.Check) -> str:
    return "green" if check.holds else "bold red"
