"""A stand-in for the controller, for tests of esrun on the container cluster."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.container_cluster.slurm_cluster import SlurmCluster

ADDRESS = "ctld:7391"

#: Answers as the controller does: orders from a file, reports into a file. Runs as `selastic`.
STAND_IN = """
import json, pathlib, socketserver, sys, time
from slurm_elastic.rpc import frames, protocol
here = pathlib.Path("DIRECTORY/stand-in")

def orders(job):
    try:
        return json.loads((here / f"orders-{job}").read_text())
    except (OSError, ValueError):
        return {"seq": 0, "report_every_s": 2.0, "in_place": True}

class Handler(socketserver.BaseRequestHandler):
    def handle(self):
        try:
            frame = frames.read_frame(self.request.recv, limit=protocol.MAX_REQUEST)
        except EOFError:
            return
        message = frames.decode(frame, purpose="request")
        request = message.content
        if request["op"] == "report":
            job = request["report"]["job_id"]
            with open(here / f"reports-{job}", "a") as file:
                file.write(json.dumps({**request["report"], "uid": message.uid}) + "\\n")
        else:
            job, end = request["job_id"], time.monotonic() + request["wait_s"]
            while orders(job)["seq"] == request["seen"] and time.monotonic() < end:
                time.sleep(0.02)
        reply = {"orders": orders(job)}
        self.request.sendall(frames.encode(
            reply, purpose="reply", nonce=message.nonce, limit=protocol.MAX_REPLY, uid=message.uid))

class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
Server(("0.0.0.0", 7391), Handler).serve_forever()
"""


class StandIn:
    """Stand-in for the controller.

    Args:
        cluster: cluster on which it runs.
        directory: for its files.
    """

    def __init__(self, cluster: SlurmCluster, directory: str) -> None:
        self.cluster = cluster
        self._files = f"{directory}/stand-in"
        self.seq = 0

    def reports(self, job: int) -> list[dict[str, Any]]:
        text = self.cluster.exec(f"cat {self._files}/reports-{job} 2>/dev/null || true")
        return [json.loads(line) for line in text.stdout.splitlines()]

    def order(self, job: int, action: str, **fields: Any) -> None:
        self.seq += 1
        defaults = {"report_every_s": 2.0, "in_place": True}
        orders = {"seq": self.seq, "action": action, **defaults, **fields}
        path = f"{self._files}/orders-{job}"
        self.cluster.exec(
            f"cat >{path}.new; mv {path}.new {path}", user="selastic", stdin=json.dumps(orders)
        )

    def wait_for(self, job: int, timeout: float = 60, **fields: Any) -> dict[str, Any]:
        """Wait for a report in which all these fields have these values, and return it."""
        end = time.monotonic() + timeout
        while True:
            reports = self.reports(job)
            for report in reports:
                if all(report.get(name) == value for name, value in fields.items()):
                    return report
            assert time.monotonic() < end, f"no report with {fields}; the last: {reports[-1:]}"
            time.sleep(0.2)


@contextmanager
def running_stand_in(cluster: SlurmCluster, directory: str) -> Iterator[StandIn]:
    """Run a stand-in, which keeps its files in a directory of alice that all nodes share."""
    cluster.exec(f"install -d -o selastic -g selastic {directory}/stand-in")
    text = STAND_IN.replace("DIRECTORY", directory)
    cluster.exec(f"cat >{directory}/stand_in.py", stdin=text, user="alice")
    start = f"python3 {directory}/stand_in.py </dev/null >/tmp/stand-in.log 2>&1 & echo $!"
    pid = cluster.exec(start, user="selastic").stdout.strip()
    cluster.exec("until (: </dev/tcp/ctld/7391) 2>/dev/null; do sleep 0.1; done", timeout=20)
    yield StandIn(cluster, directory)
    cluster.cancel()
    cluster.exec(f"kill {pid}")
