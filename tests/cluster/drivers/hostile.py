"""Submits alice's hostile jobs, reports for them as esrun, and attacks them as bob.

hostile.py submit HOME        one job to a node; prints their ids as JSON
hostile.py report ADDRESS     inside a job: reports for it, with hostile words
hostile.py attack ADDRESS J   as bob: what the controller answers, as JSON
hostile.py pose PORT          as bob: answers one request in the controller's place
hostile.py ask ADDRESS        what `pose` is believed
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from slurm_elastic.rpc import frames, protocol

PYTHON = "/opt/slurm-elastic/bin/python"
TOUCH = b"$(touch /tmp/pwned) `touch /tmp/pwned` ; touch /tmp/pwned #"
EVIL = (
    b"a\n2026-01-01 info: JobId=1 Fake=line\n\x1b[31m\x1b]0;t\x07\xff\xfe'\"\\ --x=%s%n =" + TOUCH
)
FORGED = b" JobId=1 Priority=4000000000 AdminComment={} "
NODES = ["g01", "g02", "g03", "g04", "g05"]


def submit(home: str) -> None:
    """Submit alice's hostile jobs, from a folder with a hostile name, without a shell."""
    place = os.fsencode(home) + b"/\x1b[7m\n'\"; $(touch /tmp/pwned) %s\xff"
    Path(os.fsdecode(place)).mkdir(parents=True)
    script = b"#!/bin/bash\n# %s\nexec %s /shared/scratch/hostile.py report %s\n" % (
        EVIL.replace(b"\n", b" ").replace(b"\x00", b""),
        PYTHON.encode(),
        sys.argv[3].encode(),
    )
    texts = {
        "name": [b"--job-name=" + EVIL],
        "comment": [b"--comment=" + EVIL + FORGED, b"--extra=" + EVIL + FORGED],
        "place": [b"--chdir=" + place, b"--output=" + place + b"/%x;$(touch /tmp/pwned)\n.log"],
        "long": [b"--job-name=" + 1000 * b"\xc3\xa9"[:1] + b"x", b"--comment=" + 1000 * b"%"],
        "portable": [b"--job-name=--elastic=1-99", b"--comment=elastic:1-4\nselastic_1 " + EVIL],
    }
    environment = os.environb | {
        b"EVIL": EVIL,
        b"LONG": 100_000 * b"x",
        b"BASH_FUNC_x%%": b"() { :; }; touch /tmp/pwned",
        b"SLURM_ELASTIC_RUN_ID": EVIL,
    }
    jobs = {}
    for node, (kind, words) in zip(NODES, texts.items(), strict=True):
        options = [b"-w" + node.encode(), *words]
        if kind != "portable":
            options.append(b"--elastic=1-4")
        if kind != "place":
            options.append(b"--output=/dev/null")
        if kind == "long":
            script += b"#" + 200_000 * b"\x1b[31m"
        done = subprocess.run(
            [b"sbatch", b"--parsable", b"--export=ALL", *options],
            input=script,
            env=environment,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, (kind, done.stderr)
        jobs[kind] = int(done.stdout)
    print(json.dumps(jobs))


def report(address: str) -> None:
    """Report as esrun would, with hostile texts: some are refused, the job is resized even so."""
    job, run = int(os.environ["SLURM_JOB_ID"]), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    told = {"job_id": job, "run": run, "phase": "training", "proven": True}
    odd = [TOUCH.decode(), "JobId=1 State=DONE", "\x1b[31m", "a\nb", "\udcff", "%s" * 99, "\u202e"]
    while True:
        for word in (odd[int(time.time() * 2) % len(odd)], ""):
            request = {"v": 1, "op": "report", "report": told | {"application": word}}
            with contextlib.suppress(frames.ChannelError):
                orders = frames.call(address, request, timeout_s=5)["orders"]
                if orders["action"] == "notice":
                    told |= {"phase": "saved", "notice": orders["notice"]}
                elif told["phase"] == "saved":
                    told["phase"] = "training"
        time.sleep(0.3)


def attack(address: str, job: int) -> None:
    """Send every request that bob can make about alice's job."""
    told = {"job_id": job, "run": 0, "phase": "saved", "proven": True, "notice": 1}
    requests = [
        {"op": "report", "report": told},
        {"op": "report", "report": told | {"phase": "ended", "exit_code": 0}},
        {"op": "orders", "job_id": job, "run": 0, "seq": 0, "wait_s": 0},
        {"op": "hold", "jobs": [job]},
        {"op": "release", "jobs": [job]},
        {"op": "update", "jobs": [job], "directive": "1-1"},
        {"op": "retire"},
        {"op": "reconfigure"},
        {"op": "scontrol\nupdate", "jobs": [job]},
    ]
    answers = {}
    for number, request in enumerate(requests):
        try:
            answer = frames.call(address, {"v": 1, "uid": 0} | request, timeout_s=10)
        except frames.ChannelError as error:
            answer = {"refused": str(error)}
        answers[f"{number} {request['op']}"] = answer
    print(json.dumps(answers))


def pose(port: int) -> None:
    """Run a controller of bob's that orders a job to save and to wait."""
    with socket.create_server(("0.0.0.0", port)) as server:
        print("ready", flush=True)
        sock, _ = server.accept()
        with sock:
            frame = frames.read_frame(sock.recv, limit=protocol.MAX_REQUEST)
            asked = frames.decode(frame, purpose="request")
            reply = {"v": 1, "orders": {"seq": 9, "action": "notice", "notice": 1}}
            sock.sendall(
                frames.encode(reply, purpose="reply", nonce=asked.nonce, limit=65536, uid=asked.uid)
            )


def ask(address: str) -> None:
    """Let alice's job call the wrong address."""
    try:
        print(frames.call(address, {"v": 1, "op": "ping"}, timeout_s=10))
    except frames.ChannelError as error:
        print(type(error).__name__, error)


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "submit":
        submit(words[0])
    elif what == "attack":
        attack(words[0], int(words[1]))
    elif what == "pose":
        pose(int(words[0]))
    else:
        {"report": report, "ask": ask}[what](words[0])
