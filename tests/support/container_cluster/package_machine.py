"""Containers in which built packages are tried, with Debian's Slurm."""

import re
import subprocess
import uuid
from pathlib import Path

from tests.support.container_cluster.slurm_cluster import CLUSTER_DIR  # puts clusterlib on the path

# isort: split

from clusterlib.engine import ensure_base_image

ROOT = Path(__file__).parents[3]
BUILT = ROOT / "dist" / "packages"
PROGRAMS = ROOT / "tests" / "packages"
QUIET = "DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0"
#: Where each is tried. No EL userland is at hand: bookworm has EL 9's Python, and rpm.
SUITES = {"trixie": "trixie", "bookworm": "bookworm", "el9": "bookworm"}
#: So that changes follow at once.
CONFIGURATION = """
[controller]
mode = "{mode}"
interval_s = 2
poll_s = 1
[resize]
min_interval_s = 2
per_hour = 3600
payback_s = 600
restart_s = 1
notice_s = 10
[slurm]
lease_s = 60
[api]
controller = "HOST:7321"
[metrics]
listen = "127.0.0.1:9341"
"""
_SLURM = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge procps"


class PackageMachine:
    """A fresh container with Slurm; commands run in it as root.

    Args:
        packages: name of a folder in dist/packages, which is /packages there.
    """

    def __init__(self, packages):
        self.suite = SUITES[packages]
        self.name = f"selastic-package-{uuid.uuid4().hex[:8]}"
        mounts = {BUILT / packages: "/packages"}
        mounts |= {PROGRAMS / name: f"/{name}" for name in ("start-site", "train", "train.sbatch")}
        mounts[PROGRAMS / "systemctl"] = "/usr/local/bin/systemctl"
        options = [f"--volume={source}:{target}:ro" for source, target in mounts.items()]
        command = ["docker", "run", "--detach", "--rm", "--init", "--name", self.name, *options]
        command += [site_image(self.suite), "sleep", "3600"]
        subprocess.run(command, check=True, capture_output=True)

    def run(self, script, *, code=0):
        """Run a shell script; return what it prints."""
        done = subprocess.run(
            ["docker", "exec", self.name, "bash", "-c", script],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == code, f"{script}\n{done.stdout[-4000:]}"
        return done.stdout

    def wait_for(self, script, seconds=60):
        """Repeat a command until it succeeds; return what it prints."""
        return self.run(
            f'for _ in $(seq {5 * seconds}); do out=$({script} 2>&1) && echo "$out" && exit 0;'
            ' sleep 0.2; done; echo "$out"; exit 1'
        )

    def configure(self, mode):
        """Write a configuration without waiting times, with metrics, and start selasticd anew."""
        text = CONFIGURATION.format(mode=mode)
        write = f"sed s/HOST/$(hostname)/ >/etc/slurm-elastic/elastic.toml <<'E'\n{text}E"
        self.run(f"{write}\nsystemctl restart selasticd")
        self.wait_for("selastic status")

    def wait_for_gpus(self, job, count):
        """Wait until a job runs on so many GPUs."""
        shown = f"squeue --noheader --states=RUNNING --jobs={job} --Format=tres-alloc:200"
        log = f"selastic explain {job}; tail -n 5 /tmp/train/log"
        self.wait_for(f"{{ {shown} | grep gpu={count} || {{ {log}; false; }}; }}", seconds=120)

    def submit_training(self):
        """Submit an elastic job of alice's that trains until `end_training`; return its id."""
        self.run("install -d -o alice /tmp/train")
        said = self.run("cd /tmp/train && runuser -u alice sbatch /train.sbatch")
        return re.search(r"Submitted batch job (\d+)", said)[1]

    def end_training(self, job):
        """Let the job end by itself; return what it printed and how Slurm shows it."""
        self.run("touch /tmp/train/end")
        ended = f"scontrol show job {job} | grep -E 'JobState=(COMPLETED|FAILED)'"
        return self.wait_for(ended) + self.run("cat /tmp/train/log")

    def files(self):
        """Return the files and links of the machine that a package could have brought."""
        listed = self.run("find / -xdev \\( -type f -o -type l \\) -not -path '/proc/*' -print")
        volatile = r"/(tmp|run|proc|sys|var/(log|cache|lib/(apt|dpkg|systemd|slurm)|spool)|root)/"
        return {f for f in listed.splitlines() if not re.match(volatile, f)}

    def close(self):
        """Remove the container."""
        subprocess.run(["docker", "rm", "--force", self.name], check=False, capture_output=True)


def site_image(suite):
    """Return an image with Slurm and munge; that of trixie is the first stage of the cluster's."""
    base = ensure_base_image(suite)
    image = f"slurm-elastic-site:{suite}"
    if suite == "trixie":
        recipe, options = (CLUSTER_DIR / "Dockerfile").read_text("utf-8"), ["--target=slurm"]
    else:
        quiet = f"RUN echo exit 101 >/usr/sbin/policy-rc.d; chmod +x /usr/sbin/policy-rc.d; {QUIET}"
        install = f"update && {QUIET} install --no-install-recommends {_SLURM}"
        recipe, options = f"FROM {base}\n{quiet} {install}\n", []
    command = ["docker", "build", "--quiet", "--tag", image, *options, "-"]
    subprocess.run(command, input=recipe, text=True, check=True, capture_output=True)
    return image
