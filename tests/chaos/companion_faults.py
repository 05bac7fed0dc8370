"""Faults of changes in place: of companions, of jobs that have some, of selasticd meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.chaos.invariants import base_of
from tests.chaos.schedule import Event

if TYPE_CHECKING:
    from tests.chaos.faults import Faults

#: States that only changes in place have.
_STATES = ("ASK", "PIN", "START", "JOIN", "LEAVE", "FREE")
#: Seconds in which a companion, or a state, is waited for.
_PATIENCE_S = 25.0


class CompanionFaults:
    """Faults by kind, as in `Faults`.

    Args:
        faults: the others.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults, self._site, self._exec = faults, faults.site, faults.exec
        self.kinds: dict[str, Callable[[Event], str]] = {
            "companion-rank": lambda e: self._process(e, "^python3 .*(train.py|layouts.py|light)"),
            "companion-script": lambda e: self._process(e, "companion_script"),
            "companion-cancel": self._cancel,
            "companion-node": lambda e: self._node(e, faults.kill_node),
            "companion-cut": lambda e: self._node(e, faults.cut),
            "companion-late": self._late,
            "companion-refused": self._refused,
            "base-cancel": self._cancel_base,
            "base-esrun": self._kill_esrun,
            "selasticd-in-place": self._selasticd,
        }

    def _companion(
        self, event: Event, *, state: str = "RUNNING"
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return a companion in a state and its base; wait for one, None if there is none."""
        end = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end:
            bases = {(j["id"], j["restarts"]): j for j in self._site.jobs()}
            found = [
                (companion, bases[base])
                for companion in self._site.companions()
                if companion["state"] == state and (base := base_of(companion)) in bases and base
            ]
            if found:
                return found[int(event.pick * len(found))]
            time.sleep(0.5)
        return None

    def _user(self, base: dict[str, Any]) -> str:
        return self._faults.load.jobs[base["name"]].user

    def _process(self, event: Event, pattern: str) -> str:
        found = self._companion(event)
        if found is None:
            return ""
        companion, base = found
        return self._faults.kill_process(event, companion, pattern, base["name"])

    def _cancel(self, event: Event) -> str:
        found = self._companion(event)
        if found is None:
            return ""
        companion, base = found
        self._exec(["scancel", str(companion["id"])], user=self._user(base), check=False)
        return f"{companion['name']} {companion['id']}"

    def _node(self, event: Event, act: Callable[[Event, str], str]) -> str:
        """Hit the node of a companion that is not that of its base, if there is one."""
        found = self._companion(event)
        if found is None:
            return ""
        companion, base = found
        others = sorted(companion["held"].keys() - base["held"].keys())
        return act(event, (others or sorted(companion["held"]))[0])

    def _late(self, event: Event) -> str:
        found = self._companion(event, state="PENDING")
        if found is None:
            return ""
        companion, base = found
        words = ["scontrol", "update", f"jobid={companion['id']}", "StartTime=now+3600"]
        self._exec(words, user=self._user(base), check=False)
        return f"{companion['name']} {companion['id']}"

    def _refused(self, event: Event) -> str:
        update = "scontrol update PartitionName=gpu AllocNodes="
        with self._site.lock("partition"):
            try:
                self._exec(f"{update}ctld", check=False)
                time.sleep(event.outage_s)
            finally:
                for _ in range(30):  # slurmctld may be dead
                    if self._exec(f"{update}ALL", check=False).returncode == 0:
                        break
                    time.sleep(2)
        return "partition gpu"

    def _cancel_base(self, event: Event) -> str:
        found = self._companion(event)
        if found is None:
            return ""
        _, base = found
        self._site.cancelled.add(base["name"])
        self._exec(["scancel", str(base["id"])], user=self._user(base), check=False)
        return str(base["name"])

    def _kill_esrun(self, event: Event) -> str:
        found = self._companion(event)
        if found is None:
            return ""
        _, base = found
        whom = self._faults.kill_process(event, base, "bin/esrun", base["name"])
        self._faults.failed[event] = [base["name"]] if whom else []
        return whom

    def _selasticd(self, event: Event) -> str:
        """Kill selasticd as soon as a change in place enters a state."""
        state = _STATES[int(event.pick * len(_STATES))]
        log = self._site.log_path
        with self._site.lock("selasticd"):
            # One process reads the log continuously: a state may last for a third of a second.
            lines = f"timeout {_PATIENCE_S} tail -n 0 -s 0.01 -f {log} </dev/null 2>/dev/null"
            wait = f"grep -q -m1 ' State={state} Action=' < <({lines})"
            seen = self._exec(f"{wait} && kill -9 {self._site.pid}", check=False)
            if seen.returncode:
                return ""
            self._site.kill_daemon()
            time.sleep(event.outage_s)
            self._site.start_daemon()
        return f"selasticd in {state}"
