"""Rights of selastic's account that are documented and used, and data hidden from users."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.container_cluster.added_settings import added_settings
from tests.support.container_cluster.selasticd import Daemon, eager_config, gpus
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

CONF = "/etc/slurm/slurm.conf"
PAGE = Path(__file__).parents[3] / "docs" / "security.md"


def documented() -> set[str]:
    """Return the table of rights in docs/security.md: `update job ReqNodeList` and so on."""
    table = PAGE.read_text("utf-8").split("### What the account uses")[1].split("###")[0]
    words = set()
    for row in re.findall(r"^\| `([a-z ]+)` \| (.*?) \|", table, re.MULTILINE):
        words |= {f"{row[0]} {field}" for field in re.findall(r"`(\w+)`", row[1])} or {row[0]}
    return words


def used(log: str) -> set[str]:
    """Return the rights used in selasticd's log (-v), in the same form."""
    words = set()
    for line in re.findall(r"scontrol words=(.*?) rc=", log):
        verb, *rest = line.split()
        fields = [w.partition("=")[0] for w in rest if "=" in w]
        if verb in ("requeue", "release", "uhold"):
            words.add(verb)
        elif fields[0] == "jobid":
            words |= {f"update job {f}" for f in fields[1:]}
        else:
            words |= {f"{verb} reservation {f}" for f in fields}
    return words


@pytest.fixture
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    daemon = Daemon(cluster, eager_config())
    try:
        yield daemon
    finally:
        daemon.close()


def test_an_operator_is_enough_and_a_user_is_not(daemon: Daemon, cluster: SlurmCluster) -> None:
    level = "sacctmgr -i modify user selastic set adminlevel={}"
    job = cluster.sbatch("exec sleep 600", "--elastic=1-4", "-o/dev/null", "-wg01")
    cluster.wait(job, "RUNNING")
    try:
        cluster.exec(level.format("None"))
        daemon.start()
        daemon.wait_for(r"denied|[Nn]o permission|Invalid user")
        assert gpus(cluster, job) == 1
    finally:
        cluster.exec(level.format("Operator"))
    daemon.stop()
    daemon.start()
    until(lambda: gpus(cluster, job) == 4, seconds=90)
    daemon.selastic("update", str(job), "--elastic=1-2")
    until(lambda: gpus(cluster, job) == 2, seconds=90)
    more = used(daemon.log()) - documented()
    assert not more, f"docs/security.md does not list {more}"
    assert {"requeue", "release", "update job ReqNodeList"} <= used(daemon.log())


@pytest.fixture
def private(cluster: SlurmCluster) -> Iterator[None]:
    """Set PrivateData=jobs,usage,nodes during the context."""
    lines = "PrivateData=jobs,usage,nodes\n"
    with added_settings(cluster, lines, shown="PrivateData *= .*jobs"):
        yield


@pytest.mark.usefixtures("private")
def test_private_data_is_obeyed_by_every_verb(daemon: Daemon, cluster: SlurmCluster) -> None:
    job = cluster.sbatch("exec sleep 600", "--elastic=1-4", "-o/dev/null", "-Jsecretive", "-wg01")
    mine = cluster.sbatch(
        "exec sleep 600", "--elastic=1-2", "-o/dev/null", "-Jbobs", "-wg02", user="bob"
    )
    daemon.start()
    until(lambda: gpus(cluster, job) == 4, seconds=90)
    until(lambda: str(job) in daemon.selastic("history", user="root"), seconds=60)
    listed = cluster.exec("sacct -nXP -u bob -S now-2days -o jobidraw").stdout
    bobs = {mine, *map(int, re.findall(r"\d+", listed))}  # usage knows of earlier ones, too
    asked = (
        ("status", "--all"), ("plan", "--all"), ("history",), ("history", str(job)), ("usage",),
        ("usage", "--by-user"), ("usage", "-u", "alice"), ("show", "job", str(job)),
        ("explain", str(job)), ("topology", "--all"), ("check",), ("hold", str(job)),
        ("release", str(job)), ("update", str(job), "--elastic=1-2"),
        ("show", "job", str(job), "--profile"),
    )  # fmt: skip
    for words in asked:
        said = daemon.selastic(*words, user="bob", check=False)
        as_json = daemon.selastic(*words, "--json", user="bob", check=False)
        for text in (said, as_json):
            assert "alice" not in text.replace("alice", "", words.count("alice")), (words, text)
            assert "secretive" not in text, (words, text)
        named = {int(n) for n in re.findall(r'"(?:job_id|display_id)": "?(\d+)', as_json)}
        assert job not in named, (words, as_json)
        assert named <= bobs, (words, as_json)
    nobody, missing = (
        daemon.selastic("explain", number, user="bob", check=False).replace(number, "N")
        for number in (str(job), "999999")
    )
    assert nobody == missing, "a hidden job reads as one that does not exist"
    assert str(mine) in daemon.selastic("status", user="bob")
    assert "nodes are private here" in daemon.selastic("topology", user="bob", check=False)
    for words in (("status",), ("history",), ("usage",), ("topology",), ("explain", str(job))):
        assert str(job) in daemon.selastic(*words, user="root"), words
        assert str(job) in daemon.selastic(*words, user="alice", check=False) or "topology" in words
