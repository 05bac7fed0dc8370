"""Docker and Compose: found, started or installed, then called."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from clusterlib.progress import ClusterError, NoEngineError, task

SUITE = "trixie"
MIRROR = "http://deb.debian.org/debian"
DOCKERD_LOG = Path("/var/log/dockerd.log")


def run(*command: str, stdin: bytes | None = None) -> str:
    """Run a command and return its output; a failure becomes one line."""
    done = attempt(*command, stdin=stdin)
    if done.returncode:
        raise ClusterError(f"{' '.join(command[:3])}: {reason(done)}")
    return done.stdout


def attempt(*command: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command and return its result; a failure raises nothing."""
    try:
        done = subprocess.run(
            command,
            input=stdin,
            stdin=None if stdin is not None else subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]} is not installed")
    out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    return subprocess.CompletedProcess(command, done.returncode, out, err)


def reason(done: subprocess.CompletedProcess[str]) -> str:
    """Return the line that says why a command failed: the first with an error, else the last."""
    lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line.lower()), lines[-1])


def ok(*command: str) -> bool:
    """Return whether the command succeeds."""
    return attempt(*command).returncode == 0


def require_docker() -> None:
    """Fail unless Docker answers; install and start nothing."""
    if not ok("docker", "version"):
        raise NoEngineError(
            "Docker does not answer; `cluster up` starts it (as root), or see `docker version`"
        )


def ensure_engine() -> None:
    """Make sure that Docker and Compose are there; install and start them if allowed."""
    if not shutil.which("docker") or not _can_reach_docker():
        if not shutil.which("dockerd"):
            _install("Docker", ["docker.io", "docker-cli"], ["docker.io"])
        _start_dockerd()
    if not _compose_or_none():
        _install("Docker Compose", ["docker-compose-v2"], ["docker-compose"])


def compose() -> tuple[str, ...]:
    """Return the Compose command, of either generation."""
    command = _compose_or_none()
    if not command:
        raise NoEngineError("install Docker Compose (package docker-compose or docker-compose-v2)")
    return command


def _compose_or_none() -> tuple[str, ...] | None:
    if ok("docker", "compose", "version"):
        return ("docker", "compose")
    return ("docker-compose",) if shutil.which("docker-compose") else None


def _can_reach_docker() -> bool:
    done = attempt("docker", "version")
    if "permission denied" in done.stderr:
        raise NoEngineError("no permission to use Docker: run as root or join the group `docker`")
    return done.returncode == 0


def _install(what: str, *choices: list[str]) -> None:
    """Install the first choice of packages that is available."""
    packages = " or ".join(" ".join(choice) for choice in choices)
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise NoEngineError(
            f"{what} is missing: install it (Debian, Ubuntu: apt-get install {packages})"
        )
    with task(f"installing {what}"):
        attempt("apt-get", "update")
        for choice in choices:
            if ok("apt-get", "install", "-y", "--no-install-recommends", *choice):
                return
    raise NoEngineError(f"{what} could not be installed: see `apt-get install {packages}`")


def _start_dockerd() -> None:
    if os.geteuid() != 0:
        raise NoEngineError("Docker does not answer: start it, or run this as root")
    with task("starting dockerd"):
        if Path("/run/systemd/system").is_dir():
            run("systemctl", "start", "docker")
        else:
            with DOCKERD_LOG.open("ab") as log:
                subprocess.Popen(
                    ["dockerd"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        for _ in range(60):
            if ok("docker", "version"):
                return
            time.sleep(0.5)
    raise NoEngineError(f"dockerd did not start within 30 s: see {DOCKERD_LOG}")


def ensure_base_image(suite: str = SUITE) -> str:
    """Pull the base image, or make it from Debian packages under the same name; return the name."""
    image = f"debian:{suite}-slim"
    if ok("docker", "image", "inspect", image):
        return image
    with task(f"base image {image}") as progress:
        progress.detail("pulling")
        if ok("docker", "pull", image):
            return image
        if os.geteuid() != 0:
            raise ClusterError(f"{image} cannot be pulled; as root, this command can make it")
        if not shutil.which("debootstrap"):
            _install("debootstrap", ["debootstrap", "debian-archive-keyring"])
        progress.detail("no registry answers, making it with debootstrap")
        _import_debootstrap(suite, image)
    return image


def _import_debootstrap(suite: str, image: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        settings = root / "etc" / "dpkg" / "dpkg.cfg.d"
        settings.mkdir(parents=True)
        (settings / "no-sync").write_text("force-unsafe-io\n")  # a failed build is begun anew
        run("debootstrap", "--variant=minbase", suite, str(root), MIRROR)
        archive = Path(folder, "root.tar")
        run(
            "tar", "-C", str(root), "--exclude=./var/cache/apt/archives/*", "-cf", str(archive), "."
        )
        run("docker", "import", str(archive), image)
