"""Policy sia on a real cluster: each application ends on the GPU type that suits it.

Two a100 (g01) and three v100 (g03) are free; everything else is taken.
"""

import re
from collections.abc import Iterator

import pytest

from tests.support.container_cluster.selasticd import (
    ADDRESS,
    PYTHON,
    Daemon,
    eager_config,
    reservations,
    running,
)
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until
from tests.support.container_cluster.typed_trainings import (
    fill_up,
    kind,
    measured,
    ratio,
    train,
)

#: A report with a number that is none, from the job's own user.
NAN = """
import sys
from slurm_elastic.rpc import frames
report = {"job_id": int(sys.argv[2]), "run": 0, "phase": "training", "gpus": 1,
          "step_time_s": 0.4, "steps_measured": 9, "global_batch": 32, "micro_batch": 32,
          sys.argv[3]: float("nan")}
try:
    frames.call(sys.argv[1], {"v": 1, "op": "report", "report": report}, timeout_s=5)
except frames.RequestRejectedError as error:
    print(error)
"""


def configuration(mode: str) -> str:
    """Return a configuration with policy sia."""
    return eager_config(mode=mode, policy="sia")


@pytest.fixture
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    with running(cluster, configuration("observe"), reporters=()) as daemon:
        yield daemon


def test_each_application_ends_on_the_type_that_suits_it(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    fill_up(cluster)

    # While the controller only observes, a job of each application runs on each type.
    jobs = {(app, k): train(cluster, app, k) for app in ("typed", "even") for k in ("v100", "a100")}
    for job in jobs.values():
        until(lambda job=job: measured(daemon, job), seconds=90, what=f"{job} is not measured")
    assert {key: kind(cluster, job) for key, job in jobs.items()} == {key: key[1] for key in jobs}

    # Those on the type that suits them go; a new controller moves the others, from its ledger.
    typed, even = jobs["typed", "v100"], jobs["even", "a100"]
    gone = [jobs["typed", "a100"], jobs["even", "v100"]]
    cluster.exec(["scancel", *map(str, gone)])
    for job in gone:
        cluster.wait(job, "CANCELLED")
    daemon.stop()
    daemon.start()
    for job in (typed, even):  # it does not move a job from which it has not heard
        until(lambda job=job: measured(daemon, job), what=f"{job} has not reported again")
    daemon.configure(configuration("act"))
    daemon.selastic("reconfigure", user="root")
    until(
        lambda: (kind(cluster, typed), kind(cluster, even)) == ("a100", "v100"),
        seconds=60,
        what=daemon.log,
    )

    # Why, in words and in numbers.
    for job, name in ((typed, "typed"), (even, "even")):
        until(lambda job=job: "would give" in daemon.selastic("explain", str(job)), what=name)
        text = daemon.selastic("explain", str(job))
        for kinds in ("a100", "v100"):
            assert re.search(rf"Learned: .*\d {kinds}: \S+ samples/s ±\d+% \(", text), text
        shown = daemon.selastic("show", str(job))
        assert f"Application={name} Class=strong-scaling Batch=32" in shown
    assert ratio(daemon, typed) > 1.5
    assert ratio(daemon, even) < 1.5  # the configuration says 2

    # A report that cannot be is refused by its name and changes nothing.
    for name in ("step_time_s", "grad_var", "micro_step_s"):
        said = cluster.exec([PYTHON, "-c", NAN, ADDRESS, str(typed), name], user="alice").stdout
        assert f"field {name}: nan is outside" in said
    assert ratio(daemon, typed) > 1.5

    # The knowledge outlives the controller, and the jobs: the next one of its name begins with it.
    daemon.kill()
    daemon.start()
    until(lambda: ratio(daemon, typed) > 1.5)
    until(lambda: 0 < ratio(daemon, even) < 1.5)
    late = train(cluster, "even", "v100", "--begin=now+1hour")
    until(lambda: 0 < ratio(daemon, late) < 1.5)
    assert "nothing measured yet" in daemon.selastic("explain", str(late))
    until(
        lambda: (kind(cluster, typed), kind(cluster, even)) == ("a100", "v100"),
        what=daemon.log,
    )
    daemon.check_log()
    cluster.cancel()
    until(lambda: not reservations(cluster), what="reservations are left")
