"""Jobs of a campaign: their submission by users, and their own logs at the end."""

from __future__ import annotations

import subprocess
import threading
import time
from collections import defaultdict

from tests.chaos.histories import History
from tests.chaos.schedule import LAYOUTS, Submission
from tests.chaos.script_histories import SaverHistory
from tests.support.container_cluster.light_trainings import PROGRAM
from tests.support.container_cluster.slurm_cluster import SlurmCluster

HOME = "/shared/scratch/chaos"
#: Checkpoints: leads to /small where the cluster has that (`cluster up --small-disk`).
SMALL = f"{HOME}/small"
EXAMPLES = "/opt/src/slurm-elastic/docs/examples"
DRIVER = f"{HOME}/train.py"
LAYOUTS_DRIVER = f"{HOME}/layouts.py"
#: Unmodified script: saves and loads its own checkpoints.
SAVER = f"{HOME}/saver.py"
#: Jobs reach selasticd through drivers/proxy.py.
PROXY = "ctld:7331"
#: 128 steps; about 100 s on one emulated v100.
STEPS = 128
TRAINING = "--samples 1024 --epochs 4 --global-batch 32"
#: Samples, epochs, and samples of a step, as in TRAINING.
LIGHT_SIZE = (1024, 4, 32)
RATE = 40
#: Looks for a job whose sbatch got no answer, 1 s apart.
_LOOKS = 20
#: Trainings at once that two cores can run.
TRAININGS = 2

#: Logs a beat every second while the batch script runs.
_BEATS = """\
beat() { echo "$(date +%s.%N) ${SLURM_RESTART_COUNT:-0} ${SLURMD_NODENAME:-$(hostname)}"; }
( while kill -0 $$ 2>/dev/null; do beat; sleep 1; done ) >>@/beats 2>/dev/null &
"""
#: Sleep counts over all attempts: the number of beats.
_SLEEP = """\
while [ $(wc -l <@/beats) -lt WORK ]; do sleep 1; done
echo done >@/done
"""
_TRAIN = """\
export OMP_NUM_THREADS=1 SLURM_ELASTIC_CONTROLLER=PROXY
mkdir -p SMALL; [ -e @/checkpoints ] || ln -s SMALL @/checkpoints
exec esrun python3 DRIVER --out @ --checkpoint-every 5
"""
_SCRIPT = """\
export SLURM_ELASTIC_CONTROLLER=PROXY
exec esrun --checkpoint '@/saves/PATTERN' SIGNAL python3 SAVER MANNER @ WORK
"""
_LIGHT = """\
export SLURM_ELASTIC_CONTROLLER=PROXY PYTHONPATH=PLACE
mkdir -p SMALL; [ -e @/checkpoints ] || ln -s SMALL @/checkpoints
exec esrun python3 -m MODULE --out @ TRAINING --rate RATE --checkpoint-every 5
"""
_BODIES = {"train": _TRAIN, "light": _LIGHT, "script": _SCRIPT}
_PATTERNS = {"folder": "step_*"}
_SIGNALS = {"rename": "--signal USR2"}


def _training(layout: str) -> str:
    """Return the command of a training, but for its options."""
    if layout == "replicas":
        return f"{DRIVER} {TRAINING} --rate {RATE}"
    return f"{LAYOUTS_DRIVER} {layout}"


def script(job: Submission) -> str:
    """Return the batch script of a job, without the #! line."""
    body = _BODIES.get(job.kind, _SLEEP)
    words = {
        "WORK": str(job.work),
        "SMALL": f"{SMALL}/{job.name}",
        "DRIVER": _training(job.manner),
        "PLACE": HOME,
        "MODULE": PROGRAM,
        "TRAINING": TRAINING,
        "RATE": str(RATE),
        "PROXY": PROXY,
        "PATTERN": _PATTERNS.get(job.manner, "ckpt.json"),
        "SIGNAL": _SIGNALS.get(job.manner, ""),
        "SAVER": SAVER,
        "MANNER": job.manner,
        "@": f"{HOME}/{job.name}",
    }
    text = _BEATS + body
    for word, value in words.items():
        text = text.replace(word, value)
    return text


def options(job: Submission) -> list[str]:
    """Return the options of sbatch for a job."""
    shape = ["--nodes=1", f"--gres=gpu:{job.least}", "--time=20", "--requeue"]
    if job.kind in _BODIES:
        shape.append(f"--ntasks-per-node={job.least}")
    if job.kind != "rigid":
        layout = LAYOUTS[job.manner].directive if job.kind == "train" else ""
        shape += [f"--elastic={job.least}-{job.most}{layout}", f"--nice={job.nice}"]
    return [
        f"--job-name={job.name}",
        "--open-mode=append",
        f"--output={HOME}/{job.name}/log",
        *shape,
    ]


class Load:
    """Submitted jobs, by name.

    Attributes:
        jobs: name → what was asked for.
        accepted: name → (id, epoch).
        refused: names that sbatch never took.
        asking: names whose sbatch has not come back yet.
    """

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        self.jobs: dict[str, Submission] = {}
        self.accepted: dict[str, tuple[int, float]] = {}
        self.refused: list[str] = []
        self.asking: set[str] = set()
        self._lock = threading.Lock()

    def submit(self, job: Submission) -> bool:
        """Submit a job as a user would, again for a while when slurmctld does not answer."""
        self.asking.add(job.name)
        try:
            return self._submit(job)
        finally:
            self.asking.discard(job.name)

    def _submit(self, job: Submission) -> bool:
        self.jobs[job.name] = job
        home = f"{HOME}/{job.name}"
        self.cluster.exec(["mkdir", "-p", home], user=job.user)
        for _ in range(4):
            try:
                done = self.cluster.exec(
                    ["sbatch", "--parsable", *options(job)],
                    user=job.user,
                    stdin=f"#!/bin/bash\n{script(job)}",
                    check=False,
                    timeout=90,
                )
                number = done.stdout.split(";")[0].strip() if done.returncode == 0 else ""
            except subprocess.TimeoutExpired:
                number = ""
            if number := number or self._there(job):
                with self._lock:
                    self.accepted[job.name] = (int(number), time.time())
                    self.cluster.jobs.append(int(number))
                return True
        with self._lock:
            self.refused.append(job.name)
        return False

    def _there(self, job: Submission) -> str:
        """Return a job's id if it was accepted although sbatch got no answer.

        A slurmctld that has just started may list no job at all: a list counts if it has jobs that
        were accepted before.
        """
        for _ in range(_LOOKS):
            listed = self.cluster.exec("squeue -h -t all -o '%j %i'", check=False, timeout=600)
            ids = dict(line.split() for line in listed.stdout.splitlines())
            if job.name in ids:
                return ids[job.name]
            if listed.returncode == 0 and (not self.accepted or ids.keys() & self.accepted.keys()):
                break
            time.sleep(1)
        return ""

    def done(self) -> set[str]:
        """Return the jobs that have logged their completion."""
        listed = self.cluster.exec(f"cd {HOME} && ls -d */done 2>/dev/null || true").stdout
        return {line.partition("/")[0] for line in listed.split()}

    def beats(self) -> dict[str, dict[int, list[tuple[float, str]]]]:
        """Return name → attempt → (epoch, host)."""
        text = self.cluster.exec(f"cd {HOME} && grep -H . */beats 2>/dev/null || true").stdout
        beats: dict[str, dict[int, list[tuple[float, str]]]] = {}
        for line in text.splitlines():
            path, _, rest = line.partition(":")
            words = rest.split()
            if len(words) == 3:
                runs = beats.setdefault(path.partition("/")[0], defaultdict(list))
                runs[int(words[1])].append((float(words[0]), words[2]))
        return beats

    def history(self, name: str) -> History:
        """Return the logs of a training."""
        home = f"{HOME}/{name}"
        named = f"cd {home} && grep -H . samples-rank*.jsonl 2>/dev/null || true"
        ranks: dict[str, list[str]] = defaultdict(list)
        for line in self.cluster.exec(named).stdout.splitlines():
            rank, _, row = line.partition(":")
            ranks[rank].append(row)
        losses = self.cluster.exec(f"cat {home}/losses.jsonl 2>/dev/null || true").stdout
        log = self.cluster.exec(f"cat {home}/log 2>/dev/null || true").stdout
        return History.read(ranks.values(), losses.splitlines(), log)

    def saver_history(self, name: str) -> SaverHistory:
        """Return the log of an unmodified script."""
        text = self.cluster.exec(f"cat {HOME}/{name}/log 2>/dev/null || true").stdout
        return SaverHistory.read(text.splitlines())

    def log(self, name: str) -> str:
        """Return the end of a job's log."""
        return self.cluster.exec(f"tail -n 15 {HOME}/{name}/log 2>/dev/null || true").stdout

    def reference(self, layout: str) -> str:
        """Return the name of an undisturbed run of a training, on one rank."""
        name = f"reference-{layout}-{STEPS}"
        program = f"{EXAMPLES}/train_library.py {TRAINING}"
        if layout != "replicas":
            program = f"{LAYOUTS_DRIVER} {layout} --step 0"
        out = f"{HOME}/{name}"
        self.cluster.exec(
            f"[ -e {out}/losses.jsonl ] && exit; OMP_NUM_THREADS=1 EMULATED_DEVICES=/absent"
            f" python3 {program} --out /tmp/ref.$$"
            f" && mkdir -p {out} && mv /tmp/ref.$$/*.jsonl {out}",
            user="alice",
            timeout=300,
        )
        return name

    def accounted(self) -> dict[str, list[tuple[str, float, float]]]:
        """Return name → (state, start, end) of each attempt that has ended, from sacct."""
        ids = ",".join(str(number) for number, _ in self.accepted.values())
        if not ids:
            return {}
        done = self.cluster.exec(
            "SLURM_TIME_FORMAT=%s sacct -DXPn --format=JobName,State,Start,End -j " + ids,
            check=False,
        )
        attempts: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
        for line in done.stdout.splitlines():
            name, state, start, end = line.split("|")
            if start.isdigit() and end.isdigit():
                attempts[name].append((state.split()[0], float(start), float(end)))
        return attempts
