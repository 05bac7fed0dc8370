"""Submissions by a user's own client, which sends requests that no sbatch would send.

Needs the container cluster, as the surface `submit` does.
"""

import os
import random
import subprocess
import time
from pathlib import Path

from slurm_elastic.core.directive import Directive, DirectiveError
from tests.fuzz.grammar import BREAKERS, Directives
from tests.fuzz.submit import BAD, CLUSTER_DIR, GRES, LOG, RESERVATIONS, TEXTS
from tests.fuzz.tally import MOST_CRASHES, Tally
from tests.support.container_cluster.slurm_cluster import SlurmCluster

BATCH = 200
SOURCE = Path(__file__).with_name("fuzz_requests.c")
PROGRAM = "/tmp/fuzz-requests"
#: An answer that takes longer is a finding: slurmctld holds its locks meanwhile. Slurm's own
#: clients give up after 10 s.
SLOW_MS = 8000

#: Lists of a million names are missing: slurmctld itself, without any plugin, expands them and is
#: gone for seconds, or for good.
NODES = (
    *(b"g[1-999999999][]", b"g[1-999999999][2-1]", b"g[9007199254740992-9007199254740999]"),
    *(b"g" + 4000 * b"[1]", b"g[1-9][1-9][1-9]", b"g[1-" + 400 * b"9" + b"]"),
    *(b"g[1-5000]" + 9000 * b"x", b"g01", b"g[01-06]", b"g[", b"]", b"g01," * 3000),
)
LONG = (b"x" * 100_000, b"a," * 100_000, b"gres/gpu:1," * 20_000, b"\xff" * 70_000, b'"' * 30_000)
FIELDS = {
    "req_nodes": NODES,
    "exc_nodes": NODES,
    "comment": TEXTS + LONG,
    "admin_comment": (*TEXTS, b'{"at":1,"elastic":"1-999","shape":{},"v":1}'),
    "reservation": RESERVATIONS + LONG,
    "features": TEXTS + LONG,
    "tres_per_node": tuple(b"gres/" + g for g in GRES) + LONG,
    "tres_per_job": tuple(b"gres/" + g for g in GRES) + LONG,
    "tres_per_task": tuple(b"gres/" + g for g in GRES),
    "name": TEXTS + LONG,
    "partition": (b"gpu", b"gpu,gpu", b"none", *LONG),
    "dependency": TEXTS + LONG,
    "extra": TEXTS,
    "licenses": TEXTS,
    "min_nodes": (b"0", b"1", b"6", b"65536", b"4294967293", b"4294967295"),
    "num_tasks": (b"0", b"1", b"24", b"4294967293", b"4294967295"),
    "ntasks_per_node": (b"0", b"1", b"65533"),
}
SOUND = (b"2-16", b"8-16", b"1-4,types=a100:v100", b"12", b"2-8,unit=2")


def run(seconds: float, seed: int) -> Tally:
    """Submit as bob for so long."""
    tally, draw, supply = Tally(), random.Random(seed), Directives(seed)
    cluster = SlurmCluster(os.environ.get("SELASTIC_CLUSTER", "selastic"))
    status = [str(CLUSTER_DIR / "cluster"), "--name", cluster.name, "status"]
    if subprocess.run(status, capture_output=True, check=False).returncode:
        tally.notes["no cluster is up"] += 1
        return tally
    cluster.exec(f"gcc -O1 -Wall -x c -o {PROGRAM} - -lslurm", stdin=SOURCE.read_text())
    end = time.monotonic() + seconds
    while not tally.inputs or (time.monotonic() < end and len(tally.crashes) < MOST_CRASHES):
        jobs = [_job(draw, supply) for _ in range(BATCH)]
        begun = int(cluster.exec(f"stat -c %s {LOG}").stdout)
        lines = "".join(
            " ".join(f"{name}={text.hex()}" for name, text in job.items()) + "\n" for job in jobs
        )
        done = cluster.exec(PROGRAM, user="bob", stdin=lines, timeout=900)
        for job, line in zip(jobs, done.stdout.splitlines(), strict=True):
            code, took, _, *words = line.split(" ")
            fault = _judge(job, int(code), int(took), bytes.fromhex("".join(words)))
            tally.notes["accepted" if code == "0" else "refused"] += 1
            if fault:
                shown = {name: text[:80] for name, text in job.items()}
                tally.crashes.append(f"seed {seed}: {fault}: {shown}: {line[:300]}")
        tally.inputs += len(jobs)
        text = cluster.exec(f"tail -c +{begun + 1} {LOG} | LC_ALL=C tr -d '\\200-\\377'").stdout
        tally.crashes += [line for line in text.splitlines() if any(b in line for b in BAD)][:3]
    return tally


def _job(draw: random.Random, supply: Directives) -> dict[str, bytes]:
    job = {
        name: draw.choice(FIELDS[name]) for name in draw.sample(sorted(FIELDS), draw.randrange(4))
    }
    for name, text in job.items():
        if not draw.randrange(8):
            at = draw.randrange(len(text) + 1)
            job[name] = text[:at] + draw.choice(BREAKERS) + text[at:]
    if draw.randrange(4):
        job["spank"] = b"ELASTIC=" + (draw.choice(SOUND) if draw.randrange(3) else supply.one())
    return {name: text for name, text in job.items() if text}


def _judge(job: dict[str, bytes], code: int, took: int, said: bytes) -> str:
    if took > SLOW_MS:
        return "slurmctld was kept waiting"
    if said and not (said.startswith(b"elastic: ") and all(0x20 <= b <= 0x7E for b in said)):
        return "says it in an unsound way"
    names = job.get("reservation", b"").replace(b" ", b",").split(b",")
    if code == 0 and any(name.startswith(b"selastic_") for name in names):
        return "a reservation of the controller's is open to all"
    if code == 0 and "admin_comment" in job:
        return "a user writes AdminComment"
    if "spank" not in job:
        return ""
    try:
        Directive.parse(job["spank"][8:].decode("utf-8", "surrogateescape"))
    except DirectiveError:
        return "accepts a faulty directive" if code == 0 else ""
    return "" if code or said else "says nothing"
