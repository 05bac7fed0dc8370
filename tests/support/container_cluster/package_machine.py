"""Containers in which built packages are tried, with Debian's Slurm or another release of it."""

import re
import subprocess
import uuid
from pathlib import Path

from tests.support.container_cluster.slurm_cluster import CLUSTER_DIR  # puts clusterlib on the path

# isort: split

from clusterlib.context import host_ca
from clusterlib.engine import ensure_base_image
from clusterlib.image import build_slurm_image
from clusterlib.slurm_build import DEBIAN_RELEASE, choose

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
#: What a release of Slurm needs that is not Debian's.
_LIBRARIES = "libjson-c5 liblua5.4-0 libmariadb3 libyaml-0-2"
#: systemd as the first process, in a control group of its own.
_SYSTEMD_OPTIONS = (
    *("--cap-add=SYS_ADMIN", "--security-opt=seccomp=unconfined"),
    *("--security-opt=apparmor=unconfined", "--cgroupns=private", "--env=container=docker"),
    *("--tmpfs=/run", "--tmpfs=/run/lock"),
)
_SYSTEMD = "umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup && exec /sbin/init"
_SERVICES = "mariadb munge slurmctld slurmd slurmdbd"
#: Where Slurm lies that has a prefix of its own.
PREFIX = "/opt/slurm"


class PackageMachine:
    """A fresh container with Slurm; commands run in it as root.

    Args:
        packages: name of a folder in dist/packages, which is /packages there.
        systemd: whether systemd runs there; else a script stands for systemctl.

    Attributes:
        environment: variables of the commands.
    """

    def __init__(self, packages, *, systemd=False):
        self.suite = SUITES[packages]
        self.name = f"selastic-package-{uuid.uuid4().hex[:8]}"
        self.environment = {}
        mounts = {BUILT / packages: "/packages", BUILT.parent: "/dist"}
        mounts |= {PROGRAMS / name: f"/{name}" for name in ("start-site", "train", "train.sbatch")}
        if not systemd:
            mounts[PROGRAMS / "systemctl"] = "/usr/local/bin/systemctl"
        options = [f"--volume={source}:{target}:ro" for source, target in mounts.items()]
        options += _SYSTEMD_OPTIONS if systemd else ["--init"]
        start = ["sh", "-c", _SYSTEMD] if systemd else ["sleep", "3600"]
        image = systemd_image(self.suite) if systemd else site_image(self.suite)
        command = ["docker", "run", "--detach", "--rm", "--name", self.name, *options, image]
        subprocess.run([*command, *start], check=True, capture_output=True)

    def run(self, script, *, code=0):
        """Run a shell script; return what it prints."""
        variables = [f"--env={name}={value}" for name, value in self.environment.items()]
        done = subprocess.run(
            ["docker", "exec", *variables, self.name, "bash", "-c", script],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == code, f"{script}\n{done.stdout[-4000:]}"
        return done.stdout

    def write(self, path, content):
        """Write a file of bytes."""
        subprocess.run(
            ["docker", "exec", "-i", self.name, "sh", "-c", "mkdir -p ${0%/*}; cat >$0", path],
            input=content, check=True,
        )  # fmt: skip

    def replace_slurm(self, release, *, prefix=False):
        """Put a built release of Slurm in the place of Debian's.

        Args:
            release: as `cluster up --slurm` takes it; Debian's own needs nothing.
            prefix: keep it and its configuration under `PREFIX` only, and name it to commands in
                the environment; else its commands are on the path and slurm.conf in /etc/slurm.
        """
        build = choose(release)
        if build.release == DEBIAN_RELEASE:
            return
        self.run(f"{QUIET} install --no-install-recommends {_LIBRARIES}")
        place = "/opt/build/slurm"
        replace = CLUSTER_DIR / "slurm" / "replace-slurm"
        self.write(f"{place}/replace-slurm", replace.read_bytes())
        self.write(f"{place}/tree", build.tree.read_bytes())
        self.run(f"bash {place}/replace-slurm")
        if prefix:
            self.run(
                f"find /usr/local/bin /usr/local/sbin -lname '{PREFIX}/*' -delete;"
                " rm -rf /etc/ld.so.conf.d/slurm.conf /etc/slurm; ldconfig"
            )
            system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
            self.environment = {
                "PATH": f"{PREFIX}/bin:{PREFIX}/sbin:{system}",
                "SLURM_CONF": f"{PREFIX}/etc/slurm.conf",
            }

    def trust_host(self):
        """Trust the certificates that the host trusts: pip may need it."""
        if content := host_ca():
            self.write("/etc/ssl/certs/ca-certificates.crt", content)
            trusted = "/etc/ssl/certs/ca-certificates.crt"
            self.environment |= {"PIP_CERT": trusted, "SSL_CERT_FILE": trusted}  # of pip, of uv

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
        """Wait until a job has so many GPUs, those of its companions among them."""
        log = f"selastic explain {job}; tail -n 5 /tmp/train/log"
        shown = f"selastic show {job} | grep -w GPUs={count}"
        self.wait_for(f"{{ {shown} || {{ {log}; false; }}; }}", seconds=120)

    def submit_training(self):
        """Submit an elastic job of alice's that trains until `end_training`; return its id."""
        self.run("install -d -o alice /tmp/train")
        said = self.run("cd /tmp/train && runuser -u alice sbatch /train.sbatch")
        return re.search(r"Submitted batch job (\d+)", said)[1]

    def end_training(self, job):
        """Let the job end by itself; return what it printed and how Slurm shows it."""
        # esrun waits for a controller if the program ends before it has saved since its last start.
        saves = int(self.run("ls /tmp/train | grep -c done"))
        self.wait_for(f"[ $(ls /tmp/train | grep -c done) -ge {saves + 2} ]")
        self.run("touch /tmp/train/end")
        ended = f"scontrol show job {job} | grep -E 'JobState=(COMPLETED|FAILED)'"
        seen = "squeue; ps -u alice -o pid,ppid,etime,args; tail -n 20 /tmp/train/log"
        logs = "tail -n 20 /var/log/slurm/slurmctld.log /var/log/slurm/n?.log"
        return self.wait_for(f"{{ {ended} || {{ {seen}; {logs}; false; }}; }}") + self.run(
            "cat /tmp/train/log"
        )

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
    if suite == "trixie":
        return build_slurm_image()
    base = ensure_base_image(suite)
    image = f"slurm-elastic-site:{suite}"
    quiet = f"RUN echo exit 101 >/usr/sbin/policy-rc.d; chmod +x /usr/sbin/policy-rc.d; {QUIET}"
    install = f"update && {QUIET} install --no-install-recommends {_SLURM}"
    command = ["docker", "build", "--quiet", "--tag", image, "-"]
    recipe = f"FROM {base}\n{quiet} {install}\n"
    subprocess.run(command, input=recipe, text=True, check=True, capture_output=True)
    return image


def systemd_image(suite):
    """Return the same image with systemd, which starts none of Slurm's services by itself."""
    image = f"slurm-elastic-site:{suite}-systemd"
    install = f"{QUIET} install --no-install-recommends systemd systemd-sysv dbus"
    recipe = (
        f"FROM {site_image(suite)}\nRUN {QUIET} update; {install} >/dev/null;"
        f" systemctl disable {_SERVICES}\n"
    )
    command = ["docker", "build", "--quiet", "--tag", image, "-"]
    subprocess.run(command, input=recipe, text=True, check=True, capture_output=True)
    return image
