"""Real sbatch, srun and scontrol with the real slurmctld: hostile options and environments.

Needs the container cluster (contrib/cluster; SELASTIC_CLUSTER names it): a surface without one
counts no inputs.
"""

import json
import os
import random
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from slurm_elastic.core.directive import Directive, DirectiveError
from slurm_elastic.core.submission import SubmissionError, parse_admin_comment
from tests.fuzz.grammar import BREAKERS, Directives
from tests.fuzz.tally import MOST_CRASHES, Tally
from tests.support.container_cluster.slurm_cluster import CLUSTER_DIR, SlurmCluster

BATCH = 200
RUNNER = Path(__file__).with_name("fuzz_commands.py")
SCRIPT = b"/tmp/fuzz-job.sh"
LOG = "/var/log/slurm/slurmctld.log"
#: Users' names hold any bytes.
ASCII = r"| LC_ALL=C tr -d '\200-\377'"
KINDS = ("sbatch", "held", "srun", "update", "het", "salloc")
#: What the log must never say.
BAD = ("internal error", "job_submit/lua: ", "slurm_elastic:", "lua_pcall", "Segmentation", "fatal")

TEXTS = (
    *(b"", b" ", b"a\nb", b"\x1b[31mred", b"\xff\xfe", b"%s%n", b"$(touch /tmp/pwned)", b";id"),
    *(b"'", b'"', b"--", b"=", b",", b"[", b"((", b"x" * 300, b"x" * 5000, b"{}", b"\\", b"*"),
    *(b"g[1-999999999]", b"g[1-99999][]", b"g[2-1]", b"g01", b"0", b"-1", b"99999999999999999999"),
    *(b"elastic:2-4", b"elastic:4-2", b"elastic:", b"elastic: a plan", b"elastic:2-4\nmore"),
    *(b'{"elastic":"1-999","shape":{},"v":1}', b"selastic_1", b"gpu:2", b"1-3%2", b"\xe2\x80\xae"),
)
GRES = (
    *(b"gpu:2", b"gpu", b"gpu:a100:4", b"gpu:a100:1,gpu:v100:1", b"gpu:0", b"gpu:1k", b"shard:1"),
    *(b"gpu:\x1b[1m:2", b"gpu:a\nb:2", b"gpu:99999999999", b"gpu:a:b:2", b"license/x:1", b"gpu:-1"),
)
RESERVATIONS = (b"selastic_1", b"mine", b"a,selastic_2", b" selastic_3", b"selastic_\n", b",")
OPTIONS = {
    b"--comment": TEXTS,
    b"--job-name": TEXTS,
    b"--constraint": (*TEXTS, b"a100", b"a100|v100", b"[a100*1&v100*1]", b"a100&"),
    b"--extra": TEXTS,
    b"--gres": GRES,
    b"--gpus": (b"2", b"a100:4", b"0", b"a100:1,v100:1", b"\x1b[1m:2", b"4294967296"),
    b"--gpus-per-node": (b"1", b"v100:2", b"99999999"),
    b"--gpus-per-task": (b"1", b"a100:1"),
    b"--ntasks": (b"1", b"4", b"99999999"),
    b"--nodes": (b"1", b"0", b"2-4", b"4-2", b"500000"),
    b"--nodelist": TEXTS,
    b"--exclude": TEXTS,
    b"--reservation": RESERVATIONS,
    b"--array": (b"1-3", b"0-9%2", b"1,3,5", b"99999999", b"a"),
    b"--partition": (b"gpu", b"nope", b"gpu,gpu", b",", b"\x1b[31m"),
    b"--dependency": (b"afterok:1", b"singleton", b"x" * 3000),
    b"--requeue": (None,),
    b"--no-requeue": (None,),
    b"--time": (b"1", b"UNLIMITED", b"x"),
    b"--mem-per-gpu": (b"1G", b"99999999999"),
    b"--licenses": (b"x:1",),
    b"--chdir": TEXTS,
    b"--output": TEXTS,
    b"--open-mode": (b"append", b"truncate", b"x"),
}
BATCH_ONLY = (b"--array", b"--requeue", b"--no-requeue", b"--output", b"--open-mode")
#: Slurm's own way to give an option by the environment; the plugin takes it from sbatch and salloc.
INHERITED = b"SLURM_SPANK__SLURM_SPANK_OPTION_elastic_elastic"
ENVIRONMENT = (
    *(INHERITED, b"ELASTIC", b"SLURM_ELASTIC_RUN_ID", b"SLURM_SPANK_ELASTIC"),
    *(b"SPANK_ELASTIC", b"_SLURM_SPANK_OPTION_elastic_elastic", b"SBATCH_COMMENT"),
    *(b"SBATCH_RESERVATION", b"SBATCH_GRES"),
    *(b"SBATCH_CONSTRAINT", b"SBATCH_ARRAY_INX", b"SBATCH_OPEN_MODE", b"SBATCH_JOB_NAME"),
)


@dataclass
class Case:
    """One command.

    Attributes:
        argv: its words.
        env: added to the environment.
        stdin: what it reads.
        directives: what was asked; the last one counts.
        kind: one of `KINDS`.
    """

    argv: list[bytes]
    env: dict[bytes, bytes] = field(default_factory=dict)
    stdin: bytes = b""
    directives: list[bytes] = field(default_factory=list)
    kind: str = "sbatch"

    def json(self) -> dict[str, object]:
        """Return the case for fuzz_commands.py."""
        env = {name.hex(): value.hex() for name, value in self.env.items()}
        return {"argv": [w.hex() for w in self.argv], "env": env, "stdin": self.stdin.hex()}

    def reserved(self) -> bool:
        """Return whether it names a reservation of the controller."""
        words = [w for w in self.argv if w.lower().startswith((b"--reservation=", b"reservationn"))]
        names = [w.partition(b"=")[2] for w in words] or [self.env.get(b"SBATCH_RESERVATION", b"")]
        if self.kind in ("srun", "salloc") and not words:
            return False
        return any(n.startswith(b"selastic_") for n in names[-1].replace(b" ", b",").split(b","))

    def comment(self) -> bytes:
        """Return the portable form of the directive, if any."""
        words = [w for w in self.argv if w.startswith(b"--comment=")]
        text = words[-1][10:] if words else b""
        return text[8:] if text[:8] == b"elastic:" and text[8:9].strip() else b""


class Commands:
    """Endless sequence of commands.

    Args:
        seed: what they are made from.
        target: a held job of the user's own.
    """

    def __init__(self, seed: int, target: int) -> None:
        self.random = random.Random(seed)
        self.directives = Directives(seed)
        self.target = target

    def one(self) -> Case:
        """Return the next command."""
        draw = self.random
        kind = draw.choices(KINDS, (76, 8, 4, 4, 4, 4))[0]
        if kind == "update":
            return self._update()
        case = Case([], kind=kind)
        odd = draw.choice((0, 1, 1, 3))
        for name in draw.sample(sorted(OPTIONS), odd):
            value = draw.choice(OPTIONS[name])
            if kind in ("srun", "salloc") and name in BATCH_ONLY:
                continue
            case.argv.append(name if value is None else name + b"=" + self._mutated(value))
        if draw.randrange(10) < 7:
            text = self.directives.one()[:4000]
            if draw.randrange(10) < 4:
                text = draw.choice((b"2-16", b"1-4,types=a100:v100", b"4", b"2-8,unit=2"))
            if draw.randrange(8):
                case.directives.append(text)
                case.argv.append(b"--elastic=" + text)
            elif text:
                case.env[b"SLURM_ELASTIC"] = text
                case.directives.append(text)
        elif not draw.randrange(4):
            name = draw.choice(ENVIRONMENT)
            if kind != "srun" or name != INHERITED:  # srun alone obeys it
                case.env[name] = draw.choice((*TEXTS, b"2-4", b"4-2"))
        draw.shuffle(case.argv)
        # Held, so that nothing runs.
        begin = {
            "sbatch": b"sbatch --test-only",
            "held": b"sbatch -H",
            "het": b"sbatch -H",
            "srun": b"srun --test-only",
            "salloc": b"salloc --no-shell -I1 --begin=now+1hour",
        }
        end = {"srun": [b"true"], "salloc": [], "het": [b":", b"-n1", SCRIPT]}
        case.argv[:0] = begin[kind].split()
        case.argv += end.get(kind, [SCRIPT])
        return case

    def _update(self) -> Case:
        draw = self.random
        name = draw.choice((b"AdminComment", b"ReservationName", b"Comment", b"Extra", b"Features"))
        value = draw.choice(RESERVATIONS if name == b"ReservationName" else TEXTS)
        words = [b"scontrol", b"update", b"jobid=%d" % self.target, name + b"=" + value]
        return Case(words, kind="update")

    def _mutated(self, value: bytes) -> bytes:
        if self.random.randrange(6):
            return value
        at = self.random.randrange(len(value) + 1)
        return value[:at] + self.random.choice(BREAKERS) + value[at:]


def run(seconds: float, seed: int) -> Tally:
    """Try commands as bob for so long."""
    tally = Tally()
    cluster = SlurmCluster(os.environ.get("SELASTIC_CLUSTER", "selastic"))
    status = [str(CLUSTER_DIR / "cluster"), "--name", cluster.name, "status"]
    if subprocess.run(status, capture_output=True, check=False).returncode:
        tally.notes["no cluster is up"] += 1
        return tally
    cluster.exec(f"printf '#!/bin/sh\\ntrue\\n' >{SCRIPT.decode()}; chmod 644 {SCRIPT.decode()}")
    target = cluster.sbatch("true", "-H", "-o/dev/null", "--elastic=2-4", user="bob")
    record = _jobs(cluster)[target]
    commands = Commands(seed, target)
    before = _daemon(cluster)
    end = time.monotonic() + seconds
    while not tally.inputs or (time.monotonic() < end and len(tally.crashes) < MOST_CRASHES):
        cases = [commands.one() for _ in range(BATCH)]
        begun = int(cluster.exec(f"stat -c %s {LOG}").stdout)
        done = cluster.exec(
            ["python3", "-c", RUNNER.read_text()],
            user="bob",
            stdin=json.dumps([case.json() for case in cases]),
            timeout=600,
        )
        submitted: dict[int, Case] = {}
        for case, (code, err, out) in zip(cases, json.loads(done.stdout), strict=True):
            fault = _judge(case, code, bytes.fromhex(err))
            tally.notes[f"{case.kind} {'accepted' if code == 0 else 'refused'}"] += 1
            if fault:
                tally.crashes.append(
                    f"seed {seed}: {fault}: {case} rc {code} {bytes.fromhex(err)!r}"
                )
            if case.kind in ("held", "het") and code == 0:
                submitted[int(bytes.fromhex(out).split()[-1])] = case
        tally.inputs += len(cases)
        tally.crashes += _after(cluster, submitted, begun)
        if _daemon(cluster) != before:
            tally.crashes.append(f"seed {seed}: slurmctld was restarted")
            before = _daemon(cluster)
        if _jobs(cluster)[target] != record:
            tally.crashes.append(f"seed {seed}: AdminComment of {target} was changed")
    cluster.cancel()
    return tally


def _judge(case: Case, code: int, err: bytes) -> str:
    """Return the fault of an answer, or ""."""
    ours = [line for line in err.split(b"\n") if b"elastic: " in line and b": elastic: " in line]
    if code < 0:
        return "hung or killed"
    if any(not 0x20 <= byte <= 0x7E for line in ours for byte in line):
        return "control characters"
    if case.kind == "update":
        name = case.argv[3].partition(b"=")[0]
        if code == 0 and (name == b"AdminComment" or case.reserved()):
            return "a forbidden update"
        return ""
    if len(ours) > 1:
        return "says two things"
    if code == 0 and case.reserved():
        return "a reservation of the controller's is open to all"
    asked = case.directives[-1] if case.directives else case.comment()
    if not asked:
        empty = any(w == b"--elastic=" for w in case.argv)
        return "" if empty or case.reserved() or not ours else "meddles with a job of no directive"
    try:
        Directive.parse(
            asked.split()[0].decode("utf-8", "surrogateescape")
            if not case.directives
            else asked.decode("utf-8", "surrogateescape")
        )
    except DirectiveError:
        return "accepts a faulty directive" if code == 0 else ""
    if code == 0 and case.kind == "het":
        return "accepts a heterogeneous job"
    return "" if ours or code else "says nothing"


def _after(cluster: SlurmCluster, submitted: dict[int, Case], begun: int) -> list[str]:
    """Return the faults of submitted jobs and of the log; cancel the jobs."""
    faults = []
    if submitted:
        jobs = _jobs(cluster)
        for number, case in submitted.items():
            asked = bool(case.directives or case.comment())
            try:
                found = parse_admin_comment(jobs.get(number, ""))
            except SubmissionError as error:
                faults.append(f"{error}: {case}")
                continue
            if bool(found) != asked:
                faults.append(f"recorded {jobs.get(number)!r}: {case}")
        cluster.exec(["scancel", *map(str, submitted)], check=False)
    text = cluster.exec(f"tail -c +{begun + 1} {LOG} {ASCII}").stdout
    faults += [line for line in text.splitlines() if any(word in line for word in BAD)]
    return faults[:5]


def _jobs(cluster: SlurmCluster) -> dict[int, str]:
    """Return AdminComment by job."""
    text = cluster.exec(f"squeue --json {ASCII}").stdout
    return {job["job_id"]: job["admin_comment"] for job in json.loads(text, strict=False)["jobs"]}


def _daemon(cluster: SlurmCluster) -> str:
    return cluster.exec("pgrep -x slurmctld-wlm || pgrep -o slurmctld").stdout
