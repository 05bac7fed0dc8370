"""Start, stop and status of a cluster."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path

from clusterlib.compose import LABEL, compose_file, image_name
from clusterlib.context import project_archive
from clusterlib.engine import attempt, compose, ensure_engine, ok, reason, run
from clusterlib.image import build_image, prune_images
from clusterlib.layout import Layout
from clusterlib.progress import ClusterError, Task, task
from clusterlib.slurm_build import SlurmBuild

PROJECT_IN_IMAGE = "opt/src/slurm-elastic"
INSTALLER = f"{PROJECT_IN_IMAGE}/contrib/cluster/image/install-project"
# Everything install-project writes, relative to the root; the shell expands it.
INSTALLED = (
    f"{PROJECT_IN_IMAGE} opt/slurm-elastic/bin"
    " opt/slurm-elastic/lib/python3*/site-packages/slurm_elastic*"
    " usr/local/bin etc/slurm-elastic etc/slurm/*.lua etc/slurm/plugstack.conf*"
    " $(find usr/lib opt/slurm/lib -name elastic.so 2>/dev/null)"
)
READY_WITHIN = 90.0
#: Prints how many nodes are usable: as soon as all are, or after some seconds.
_READY = """
for _ in 1 2 3 4 5 6 7 8 9 10; do
    usable=0
    [ ! -e /run/cluster-ready ] || usable=$(sinfo -h -N -o %T | grep -cxE '{usable}')
    [ "$usable" != {nodes} ] || break
    sleep 0.5
done
echo "$usable"
"""
USABLE = ("idle", "mixed", "allocated", "completing", "reserved", "planned", "drained", "draining")


def build(name: str, slurm: SlurmBuild) -> None:
    """Build what changed, after another process that builds for the same cluster."""
    with _one_at_a_time(f"build-{name}"):
        ensure_engine()
        build_image(name, slurm)


def up(name: str, layout: Layout, slurm: SlurmBuild) -> None:
    """Build what changed, create or replace what changed, return when every node is usable."""
    build(name, slurm)
    # Two clusters that are created at once would choose the same subnet.
    with task("containers"), _one_at_a_time("clusters"):
        layout = replace(layout, subnet=_subnet(name), slurm=slurm.release)
        document = json.dumps(compose_file(name, layout)).encode()
        run(*compose(), "-p", name, "-f", "-", "up", "-d", "--remove-orphans", stdin=document)
    with task("nodes") as progress:
        _wait_until_ready(name, layout, progress)
    prune_images(name)


def down(name: str, *, images: bool = False) -> None:
    """Remove containers, networks and volumes, by name and label, and on request the image."""
    with task(f"removing {name}"):
        if ids := containers(name, "{{.ID}}"):
            run("docker", "rm", "-f", "-v", *ids)
        label = f"label=com.docker.compose.project={name}"
        for kind in ("volume", "network"):
            for item in run("docker", kind, "ls", "-q", "--filter", label).split():
                _remove(kind, item)
        if images and ok("docker", "image", "inspect", image_name(name)):
            run("docker", "image", "rm", image_name(name))
            prune_images(name)


def sync(name: str) -> None:
    """Install the project's present tree into the running containers; jobs go on undisturbed.

    Built once, in ctld, and copied from there: a build in each container would take longer.
    """
    hosts = containers(name)
    ctld = container(name, "ctld")
    with task("project into ctld"):
        run("docker", "exec", ctld, "rm", "-rf", f"/{PROJECT_IN_IMAGE}")
        run("docker", "cp", "-", f"{ctld}:/", stdin=project_archive(PROJECT_IN_IMAGE))
        run("docker", "exec", ctld, "bash", f"/{INSTALLER}")
    with task("project into the nodes"), tempfile.TemporaryFile() as archive:
        pack = ["docker", "exec", ctld, "sh", "-c", f"cd / && tar -cf - {INSTALLED}"]
        subprocess.run(pack, stdout=archive, check=True)
        for host in hosts:
            if host != ctld:
                archive.seek(0)
                # Directories are emptied first: a module that was renamed must not stay.
                unpack = ["docker", "exec", "-i", host, "tar", "-C", "/", "--recursive-unlink"]
                subprocess.run([*unpack, "-xf", "-"], stdin=archive, check=True)


def containers(name: str, fmt: str = "{{.Names}}") -> list[str]:
    """Return the cluster's containers, stopped ones as well."""
    listed = run("docker", "ps", "-a", "--filter", f"label={LABEL}={name}", "--format", fmt)
    return sorted(listed.splitlines())


def container(name: str, host: str) -> str:
    """Return the container of this host; in a farm, one container has all nodes."""
    present = containers(name)
    if not present:
        raise ClusterError(f"cluster {name} is down: start it with `cluster up`")
    for candidate in (f"{name}-{host}", *([f"{name}-farm"] if host.startswith("g") else [])):
        if candidate in present:
            return candidate
    hosts = " ".join(entry.removeprefix(f"{name}-") for entry in present)
    raise ClusterError(f"there is no {host} in cluster {name}; it has {hosts}")


def home_of(user: str) -> str:
    """Return a user's home on the nodes."""
    return "/root" if user == "root" else f"/shared/home/{user}"


def exec_command(name: str, host: str, user: str, *, terminal: bool = False) -> list[str]:
    """Return the beginning of a `docker exec` as this user, in the user's home."""
    home = home_of(user)
    user_variables = {"HOME": home, "USER": user, "LOGNAME": user}
    environment = [f"--env={key}={value}" for key, value in user_variables.items()]
    flags = ["-it"] if terminal else ["-i"]
    return ["docker", "exec", *flags, "-u", user, "-w", home, *environment, container(name, host)]


def controller(name: str, action: str) -> str:
    """Start or stop selasticd, or show its status; its own log is `cluster logs selasticd`."""
    host = container(name, "ctld")
    done = attempt("docker", "exec", host, "cluster-start", f"selasticd-{action}")
    words = (done.stdout + done.stderr).strip()
    if done.returncode:
        raise ClusterError(words)
    return words


def status(name: str) -> str:
    """Return a few lines: containers that are not running, and Slurm's state."""
    listed = containers(name, "{{.Names}} {{.State}}")
    if not listed:
        raise ClusterError(f"cluster {name} is down")
    stopped = [line for line in listed if not line.endswith(" running")]
    sinfo = attempt("docker", "exec", f"{name}-ctld", "sinfo", "-o", "%9P %.6D %10T %22G %N")
    head = f"cluster {name}: {len(listed)} containers, {len(stopped)} not running"
    return "\n".join([head, *stopped, (sinfo.stdout or sinfo.stderr).rstrip()])


def _remove(kind: str, item: str) -> None:
    """Remove a network or volume; Docker may need a moment after the last container has gone."""
    for _ in range(10):
        done = attempt("docker", kind, "rm", item)
        if done.returncode == 0:
            return
        time.sleep(0.3)
    if "active endpoints" in done.stderr:
        # Seen with Docker 20.10 after containers had been killed and started again.
        raise ClusterError(
            "Docker keeps an empty network until its restart (`up` can use it); all else is gone"
        )
    raise ClusterError(f"docker {kind} rm: {reason(done)}")


def _wait_until_ready(name: str, layout: Layout, progress: Task) -> None:
    """Look in ctld, as each `docker exec` costs as much as the start of some daemons."""
    looks = _READY.format(usable="|".join(USABLE), nodes=layout.nodes)
    while progress.seconds() < READY_WITHIN:
        usable = attempt("docker", "exec", f"{name}-ctld", "sh", "-c", looks).stdout.strip()
        if usable == str(layout.nodes):
            return
        progress.detail(f"{usable or 0} of {layout.nodes} ready")
        _check_alive(name)
        time.sleep(0.5)
    raise ClusterError(
        f"not all nodes are ready after {READY_WITHIN:.0f} s: see `cluster status`, `cluster logs`"
    )


def _check_alive(name: str) -> None:
    for line in containers(name, "{{.Names}} {{.State}}"):
        host, state = line.split()
        if state not in ("running", "created"):
            last = attempt("docker", "logs", "--tail", "1", host)
            raise ClusterError(f"{host} is {state}: {(last.stderr or last.stdout).strip()}")


@contextmanager
def _one_at_a_time(what: str) -> Iterator[None]:
    """Wait for this user's other processes that do the same."""
    lock = Path(tempfile.gettempdir(), f"slurm-elastic-{what}-{os.getuid()}.lock")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _subnet(name: str) -> str:
    """Return the cluster's present subnet, or the first free one of 10.89.*.0/24."""
    ids = run("docker", "network", "ls", "-q").split()
    used = _host_routes()
    for network in json.loads(run("docker", "network", "inspect", *ids)):
        for config in (network["IPAM"] or {}).get("Config") or []:
            if network["Name"] == f"{name}_default":
                return str(config["Subnet"])
            if ":" not in config.get("Subnet", ":"):
                used.append(IPv4Network(config["Subnet"]))
    for third in range(256):
        candidate = IPv4Network(f"10.89.{third}.0/24")
        if not any(candidate.overlaps(network) for network in used):
            return str(candidate)
    raise ClusterError("no free network in 10.89.0.0/16")


def _host_routes() -> list[IPv4Network]:
    """Return the networks to which the host has routes, without the default route."""
    table = Path("/proc/net/route")
    rows = [line.split() for line in table.read_text().splitlines()[1:]] if table.exists() else []
    return [IPv4Network((_address(row[1]), _address(row[7]))) for row in rows if row[7] != "0" * 8]


def _address(little_endian: str) -> str:
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(little_endian)))
