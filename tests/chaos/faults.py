"""Kinds of fault: each is carried out, and undone. Runs in threads of the campaign."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from tests.chaos.chaos_site import UNSAVED_S, ChaosSite
from tests.chaos.companion_faults import CompanionFaults
from tests.chaos.load import Load
from tests.chaos.schedule import Event, Submission
from tests.chaos.standstill_faults import StandstillFaults
from tests.support.container_cluster.slurm_cluster import until

_UPDATES = ("StartTime=now", "Nice=50", "TimeLimit=15", "ExcNodeList=g03", "Comment=mine",
            "ReservationName=", "ReqNodeList=")  # fmt: skip

#: slurmctld gives a node up after so many seconds of silence, less what it needs to notice.
SLURMD_TIMEOUT_S = 12.0

#: A daemon that does not start for so many seconds is an error of the campaign. No part that it
#: needs is dead for longer.
START_S = 120.0

#: Command lines of ranks of the campaign's trainings and scripts.
RANKS = "^python3 .*(chaos/(train|layouts|saver).py|light_training)"
#: Requeues a job that Slurm calls failed. slurmctld may be dead meanwhile, and forgets a requeue of
#: the 5 s before its death: it stays for 8 s.
_REQUEUE_FAILED = """
again=0
for _ in $(seq 90); do
    case $(squeue -h -t all -j {number} -o %T) in
        FAILED) scontrol requeue {number} && again=1;;
        ?*) [ $again = 0 ] || [ $((again += 1)) -lt 9 ] || break;;
    esac
    sleep 1
done
"""


class Faults:
    """Faults by kind; `run` carries one out and undoes it.

    Args:
        site: the cluster.
        load: where jobs are submitted.
    """

    def __init__(self, site: ChaosSite, load: Load) -> None:
        self.site, self.load = site, load
        self.exec = site.cluster.exec
        self._extra = 0
        self._stopped = self._woken = 0.0  # slurmctld, last
        self._released: dict[str, tuple[float, str]] = {}  # job → when, by whom
        self._resumed: dict[str, float] = {}  # node → when
        self.failed: dict[Event, list[str]] = {}  # programs that Slurm may call failed
        self._kinds: dict[str, Callable[[Event], str]] = {
            "selasticd-kill": self._selasticd,
            "slurmctld-kill": self._slurmctld_kill,
            "slurmctld-stop": self._slurmctld_stop,
            "slurmdbd-kill": lambda e: self._daemon(e, "slurmdbd", "ctld"),
            "munged-kill": lambda e: self._daemon(e, "munged", "ctld"),
            "node-munged-kill": lambda e: self._daemon(e, "munged", self.node(e)),
            "slurmd-kill": lambda e: self._daemon(e, "slurmd", self.node(e)),
            "slurmd-lost": lambda e: self._daemon(e, "slurmd", self.node(e)),
            "rank-kill": lambda e: self._process(e, RANKS),
            "esrun-kill": self._esrun,
            "node-kill": self._node_kill,
            "node-cut": lambda e: self.cut(e, self.node(e)),
            "node-cut-lost": lambda e: self.cut(e, self.node(e)),
            "ctld-cut": lambda e: self.cut(e, "ctld"),
            "reports-slow": self._slow,
            "reports-cut": self._slow,
            "ledger-full": lambda e: self._full(e, "/dev/shm/fill"),
            "checkpoints-full": lambda e: self._full(e, "/small/fill"),
            "ledger-truncated": self._truncated,
            "ledger-deleted": self._deleted,
            "clock-step": self._clock,
            "orphan": self._orphan,
            "id-reuse": self._reuse,
            "user-cancel": self._cancel,
            "user-hold": lambda e: self._hold(e, "uhold"),
            "admin-hold": lambda e: self._hold(e, "hold"),
            "user-requeue": self._requeue,
            "admin-requeue": self._requeue,
            "user-update": self._update,
            "drain": self._drain,
        }
        self._kinds |= CompanionFaults(self).kinds | StandstillFaults(self).kinds

    def run(self, event: Event) -> str:
        """Carry out a fault and undo it; return its target, "" if there was none."""
        return self._kinds[event.kind](event)

    # --- choosing ---

    def node(self, event: Event) -> str:
        """Return a node, mostly one on which jobs run."""
        busy = sorted({n for j in self.site.jobs() for n in j["held"]})
        nodes = busy if busy and event.size < 0.8 else self.site.nodes
        return nodes[int(event.pick * len(nodes))]

    def pick_job(self, event: Event, *, rigid: bool = False) -> dict[str, Any] | None:
        """Return an elastic job, or with `rigid` any job, preferably one in transition."""
        jobs = [j for j in self.site.jobs() if rigid or not j["name"].startswith("rigid")]
        if event.size < 0.7:
            moving = self.site.moving()
            jobs = [j for j in jobs if j["name"] in moving] or jobs
        jobs.sort(key=lambda j: j["id"])
        return jobs[int(event.pick * len(jobs))] if jobs else None

    def _user(self, job: dict[str, Any]) -> str:
        return self.load.jobs[job["name"]].user

    def note_hit(self, node: str) -> None:
        """Note that jobs on this node, or just started there, may be restarted."""
        self.site.hit[node] = time.time()
        here = [j["name"] for j in self.site.jobs() if node in j["held"] or not j["held"]]
        self.site.disturb(here)

    # --- daemons ---

    def _selasticd(self, event: Event) -> str:
        with self.site.lock("selasticd"):
            self.site.kill_daemon()
            time.sleep(event.outage_s)
            self.site.start_daemon()
        return "selasticd"

    def _slurmctld_kill(self, event: Event) -> str:
        with self.site.lock("slurmctld"):
            self._forget()
            self.exec("pkill -9 slurmctld", check=False)
            time.sleep(event.outage_s)
            self._start("slurmctld", "ctld")
            self._release_again()
        return "slurmctld"

    def _forget(self) -> None:
        """Note that slurmctld is about to lose the changes of its last seconds."""
        now = time.time()
        since = (self._stopped if self._woken > now - UNSAVED_S else now) - UNSAVED_S
        young = [n for n, (_, at) in self.load.accepted.items() if at > since]
        young += self.load.asking
        self.site.lost.update(young)
        self.site.crashes.append(now)
        self.site.disturb([j["name"] for j in self.site.jobs()] + young)

    def _release_again(self) -> None:
        """Repeat releases, and the ends of drains, that a killed slurmctld has lost."""
        since = time.time() - 60
        for node, at in list(self._resumed.items()):
            if at > since and not self.site.lock(node).locked():
                self._resume(node)  # refused where it is not drained
        for number, (at, user) in list(self._released.items()):
            shown = self.exec(["scontrol", "-o", "show", "job", number], check=False).stdout
            if at > since and " Priority=0 " in shown:  # else it would lose its nice value
                self.exec(["scontrol", "release", number], user=user, check=False)

    def _slurmctld_stop(self, event: Event) -> str:
        with self.site.lock("slurmctld"):
            self.site.disturb([j["name"] for j in self.site.jobs()])
            self._stopped = time.time()
            self.exec("pkill -STOP slurmctld", check=False)
            time.sleep(event.outage_s)
            self.exec("pkill -CONT slurmctld", check=False)
            self._woken = time.time()
            self.site.disturb([*self.load.jobs])  # those that came meanwhile, too
        return "slurmctld"

    def _daemon(self, event: Event, what: str, node: str) -> str:
        with self.site.lock(node if node != "ctld" else what):
            if node != "ctld":
                self.note_hit(node)
            if event.kind == "slurmd-lost":
                self.site.unreachable.add(node)
            self.exec(f"pkill -9 -x {what}", node=node, check=False)
            time.sleep(event.outage_s)
            self._start(what, node)
            if (what, node) == ("munged", "ctld"):  # those that came meanwhile were not launched
                self.site.disturb([*self.load.jobs])
        return f"{what} on {node}"

    def _start(self, what: str, node: str) -> None:
        """Start a daemon as systemd would; repeat while another part of it is dead.

        Raises:
            AssertionError: it does not start; the message has its last words.
        """
        end = time.monotonic() + START_S
        while True:
            done = self.exec(f"cluster-start {what}", node=node, check=False)
            if done.returncode == 0:
                return
            words = (done.stdout + done.stderr).strip()[-300:]
            assert time.monotonic() < end, f"{what} on {node} does not start: {words}"
            time.sleep(2)

    def programs(
        self, kinds: tuple[str, ...] = ("real", "light", "script")
    ) -> list[dict[str, Any]]:
        """Return the running jobs under esrun of these kinds: trainings, unmodified scripts."""
        return [j for j in self.site.jobs() if j["name"].startswith(kinds) and j["held"]]

    def _process(self, event: Event, pattern: str) -> str:
        """Kill one process of a job under esrun."""
        jobs = self.programs()
        if not jobs:
            return ""
        job = jobs[int(event.pick * len(jobs))]
        return self.kill_process(event, job, pattern, job["name"])

    def kill_process(self, event: Event, job: dict[str, Any], pattern: str, name: str) -> str:
        """Kill one process of a job; the arguments are those of `find_process`."""
        found = self.find_process(event, job, pattern, name)
        if found is None:
            return ""
        node, pid = found
        self.site.disturb([name])
        self.exec(f"kill -9 {pid}", node=node, check=False)
        return f"{job['name']} on {node}"

    def find_process(
        self, event: Event, job: dict[str, Any], pattern: str, name: str
    ) -> tuple[str, str] | None:
        """Return node and number of one process of a job; None: there is none.

        Args:
            event: the event whose numbers choose node and process.
            job: of the process.
            pattern: of its command line.
            name: of the job that it belongs to, or whose companion it is.
        """
        nodes = sorted(job["held"])
        node = nodes[int(event.size * len(nodes))]
        own = f"grep -qzx SLURM_JOB_ID={job['id']} /proc/$p/environ && echo $p"
        find = f"for p in $(pgrep -f '{pattern}'); do {own}; done"
        # root of a container may not read the environment of others' processes.
        user = self.load.jobs[name].user
        pids = self.exec(find, user=user, node=node, check=False).stdout.split()
        if not pids:  # not there any more, or the node is dead
            return None
        return node, pids[int(event.size * len(pids))]

    def _esrun(self, event: Event) -> str:
        """Kill the batch process itself: Slurm then calls the job failed."""
        whom = self._process(event, "bin/esrun")
        self.failed[event] = [whom.split(" ")[0]] if whom else []
        return whom

    def afterwards(self, event: Event) -> None:
        """Requeue, as their owners, programs that Slurm calls failed because of this fault."""
        threads = [
            threading.Thread(target=self._requeue_failed, args=(name,))
            for name in self.failed.pop(event, ())
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _requeue_failed(self, name: str) -> None:
        number, user = self.load.accepted[name][0], self.load.jobs[name].user
        loop = _REQUEUE_FAILED.format(number=number)
        self.exec(loop, user=user, check=False, timeout=900)

    # --- nodes and the network ---

    def _docker(self, *words: str) -> None:
        self.site.docker(*words)

    def _node_kill(self, event: Event) -> str:
        return self.kill_node(event, self.node(event))

    def kill_node(self, event: Event, node: str) -> str:
        """Kill a node, and start it again.

        The next fault on it waits until it has started its daemons: a container ends if one of them
        is killed meanwhile, and nobody starts it again.
        """
        with self.site.lock(node):
            self.note_hit(node)
            self._docker("kill", f"{self.site.cluster.name}-{node}")
            time.sleep(event.outage_s)
            self._docker("start", f"{self.site.cluster.name}-{node}")
            until(lambda: self._is_up(node), seconds=START_S, what=f"{node} does not start")
            self.site.after_boot(node)
        return node

    def _is_up(self, node: str) -> bool:
        """Return whether `cluster-start node` has started the daemons; it sleeps then."""
        words = ["pgrep", "-fx", "sleep infinity"]
        return self.exec(words, node=node, check=False).returncode == 0

    def cut(self, event: Event, host: str) -> str:
        """Take a host's network away, and give it back."""
        name = self.site.cluster.name
        with self.site.lock(host):
            self.note_hit(host)
            if event.outage_s > SLURMD_TIMEOUT_S:
                self.site.unreachable.add(host)
            if host == "ctld":
                self.site.disturb([j["name"] for j in self.site.jobs()])
            else:  # ranks meet over the network, also those of one node
                self.failed[event] = [j["name"] for j in self.programs() if host in j["held"]]
            address = self.site.address(host)
            self._docker("network", "disconnect", f"{name}_default", f"{name}-{host}")
            time.sleep(event.outage_s)
            self._docker(
                *("network", "connect", "--ip", address, "--alias", host),
                *(f"{name}_default", f"{name}-{host}"),
            )
            if host == "ctld":  # those that came meanwhile were not launched
                self.site.disturb([*self.load.jobs])
        return host

    def _orphan(self, event: Event) -> str:
        """Lose a node while selasticd does not run."""
        with self.site.lock("selasticd"):
            self.site.kill_daemon()
            node = self._node_kill(event)
            self.site.start_daemon()
        return node

    # --- reports, disks, clock ---

    def _slow(self, event: Event) -> str:
        word = "cut" if event.kind == "reports-cut" else f"{0.5 + 3 * event.size:.1f}"
        with self.site.lock("proxy"):
            self.site.proxy(word)
            time.sleep(event.outage_s)
            self.site.proxy("0")
        return word

    def _full(self, event: Event, path: str) -> str:
        with self.site.lock(path):
            self.exec(f"cat /dev/zero >{path} 2>/dev/null || true")
            time.sleep(event.outage_s)
            self.exec(f"rm -f {path}")
        return path

    def _truncated(self, event: Event) -> str:
        """Truncate the ledger; if selasticd refuses it, move it away and start again."""
        with self.site.lock("selasticd"):
            self.site.kill_daemon()
            ledger = f"{self.site.state}/ledger.sqlite"
            self.exec(f"truncate -s {4096 + int(event.size * 20000)} {ledger}")
            time.sleep(event.outage_s)
            self.site.start_daemon()
            if not self.site.comes_up():
                self.exec(f"mv {ledger} {ledger}.broken; rm -f {ledger}-wal {ledger}-shm")
                self.site.start_daemon()
                return "refused, moved away"
        return "taken"

    def _deleted(self, event: Event) -> str:
        with self.site.lock("selasticd"):
            self.exec(f"rm -f {self.site.state}/ledger.sqlite*")
            time.sleep(event.outage_s)
            self.site.kill_daemon()
            self.site.start_daemon()
        return "ledger"

    def _clock(self, event: Event) -> str:
        seconds = int((event.size - 0.5) * 1200)
        with self.site.lock("clock"):
            self.site.clock(seconds)
            time.sleep(event.outage_s)
            self.site.clock(0)
        return f"{seconds:+d} s"

    # --- people ---

    def _reuse(self, event: Event) -> str:
        with self.site.lock("slurmctld"):
            self._submit(event)
            time.sleep(event.outage_s)
            self._forget()
            self.exec("pkill -9 slurmctld", check=False)
            self._start("slurmctld", "ctld")
            self._release_again()
            self._submit(event)
        return "slurmctld"

    def _submit(self, event: Event) -> None:
        for user, most in (("alice", 4), ("bob", 1)):
            self._extra += 1
            name = f"{'plain' if most > 1 else 'rigid'}-reuse-s{event.at:.0f}n{self._extra}"
            job = Submission(
                at=event.at,
                name=name,
                kind="sleep" if most > 1 else "rigid",
                user=user,
                least=1,
                most=most,
                work=20,
            )
            self.load.submit(job)

    def _cancel(self, event: Event) -> str:
        job = self.pick_job(event, rigid=True)
        if job is None:
            return ""
        self.site.cancelled.add(job["name"])
        self.exec(["scancel", str(job["id"])], user=self._user(job), check=False)
        return job["name"]

    def _hold(self, event: Event, verb: str) -> str:
        job = self.pick_job(event)
        if job is None:
            return ""
        name, user = job["name"], self._user(job) if verb == "uhold" else "root"
        self.site.holding[name] = time.time() + 3600
        self.exec(["scontrol", verb, str(job["id"])], user=user, check=False)
        time.sleep(event.outage_s)
        for _ in range(30):  # a person, too, tries again when slurmctld does not answer
            done = self.exec(["scontrol", "release", str(job["id"])], user=user, check=False)
            if done.returncode == 0 or "Unable to contact" not in done.stderr + done.stdout:
                break
            time.sleep(2)
        self._released[str(job["id"])] = (time.time(), user)
        self.site.holding[name] = time.time() + 30
        return name

    def _requeue(self, event: Event) -> str:
        job = self.pick_job(event, rigid=True)
        if job is None:
            return ""
        user = self._user(job) if event.kind == "user-requeue" else "root"
        self.site.disturb([job["name"]])
        words = ["scontrol", "requeue", "Incomplete", str(job["id"])]
        self.exec(words, user=user, check=False)
        return job["name"]

    def _update(self, event: Event) -> str:
        job = self.pick_job(event)
        if job is None:
            return ""
        field = _UPDATES[int(event.outage_s + event.pick * len(_UPDATES)) % len(_UPDATES)]
        words = ["scontrol", "update", f"jobid={job['id']}", field]
        if field.startswith("Nice"):
            self.site.reniced.add(job["name"])
        self.exec(words, user=self._user(job), check=False)
        return f"{job['name']} {field}"

    def _drain(self, event: Event) -> str:
        node = self.node(event)
        with self.site.lock(node):
            words = f"scontrol update nodename={node} state=drain reason=chaos"
            self.exec(words, check=False)
            time.sleep(event.outage_s)
            for _ in range(20):
                if self._resume(node):
                    break
                time.sleep(2)
            self._resumed[node] = time.time()
        return node

    def _resume(self, node: str) -> bool:
        words = ["scontrol", "update", f"nodename={node}", "state=resume"]
        return self.exec(words, check=False).returncode == 0
