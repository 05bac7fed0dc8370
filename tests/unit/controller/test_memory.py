"""What is kept of jobs that are gone: nothing, however many have come and gone."""

import dataclasses
import time
from collections.abc import Collection
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.config.schema import ControllerSettings as Settings
from slurm_elastic.controller.batch_tuning import BatchTuner
from slurm_elastic.controller.report_handler import ReportHandler
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.transitions.orphan_cleanup import OrphanCleanup
from slurm_elastic.controller.transitions.transition_engine import TransitionEngine
from slurm_elastic.core.cluster import JobState, Snapshot
from slurm_elastic.core.report import Report
from tests.support.controller.job_records import FakeScontrol, Log, job, transition

LAYERS = (("a", 0.1, 0.2, 10.0, 100.0), ("b", 0.1, 0.2, 10.0, 100.0))


def entries(thing: Any, seen: set[int] | None = None) -> int:
    """Entries of all collections that hang on our own objects."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, dict):
        return len(thing) + sum(entries(v, seen) for v in thing.values())
    if isinstance(thing, Collection) and not isinstance(thing, str | bytes):
        return len(thing) + sum(entries(v, seen) for v in thing)
    if type(thing).__module__.startswith("slurm_elastic"):
        names = getattr(type(thing), "__slots__", ())
        values = [getattr(thing, n, None) for n in names] + list(
            vars(thing).values() if hasattr(thing, "__dict__") else []
        )
        return sum(entries(v, seen) for v in values)
    return 0


def test_a_thousand_jobs_leave_nothing_behind():
    config = Config(controller=Settings(queue="controller"))
    ledger, scontrol, log = Ledger(":memory:"), FakeScontrol(), Log()
    store = JobStore(ledger, config)
    cleanup = OrphanCleanup(scontrol, config, store, log)
    engine = TransitionEngine(
        scontrol=scontrol, ledger=ledger, config=config, account="selastic", log=log
    )
    handler = ReportHandler(
        store=store, engine=engine, tuner=BatchTuner(engine.outbox.tell), log=log
    )
    sizes = []
    for generation in range(10):
        jobs = [
            dataclasses.replace(
                job({"n1": 4}),
                job_id=number,
                submit_time=float(number),
                name=f"j{number}",
                state=JobState.PENDING if number % 4 == 0 else JobState.RUNNING,
            )
            for number in range(100 * generation, 100 * generation + 100)
        ]
        snapshot = Snapshot(time=time.time(), nodes=(), jobs=tuple(jobs))
        for each in jobs:
            if each.state is JobState.PENDING:
                cleanup.lease(each)
                continue
            told = Report(
                job_id=each.job_id,
                run=0,
                phase="training",
                gpus=4,
                step_time_s=0.5,
                steps_measured=10,
                global_batch=64,
                profile=LAYERS,
                application=f"app{each.job_id}",
            )
            handler.handle(told, each, act=True)
            handler.orders(each.job_id, 0, job=each)
            handler.await_first_step(dataclasses.replace(transition({"n1": 2}), job_id=each.job_id))
        for _ in range(2):
            store.observe(snapshot)
            store.records(snapshot, {})
            cleanup.leases(jobs, {}, retired=False)
            handler.forget(snapshot.job.keys())
        sizes.append(entries([store, cleanup, engine, handler]))
    engine.close()
    assert sizes[0] > 1000
    assert max(sizes[1:]) <= 1.02 * sizes[0], sizes
