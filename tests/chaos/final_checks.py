"""Checks after a campaign: the jobs' own logs, sacct, selasticd's log."""

from __future__ import annotations

import itertools
import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from slurm_elastic.core.nodelist import expand
from tests.chaos.chaos_site import UNGUARDED, ChaosSite, live_at
from tests.chaos.histories import faults
from tests.chaos.invariants import AHEAD_S, LEASE, OURS, Rules, is_off, overlaps
from tests.chaos.light_histories import light_reference, uneven_steps
from tests.chaos.load import LIGHT_SIZE, Load
from tests.chaos.script_histories import (
    lost_steps,
    requeued_after_notice,
    saver_faults,
    without_hindered,
)

_LINE = re.compile(r"JobId=(\S+) Transition=(\d+) State=(DONE|UNDONE|ENDED)\b")
_STATE = re.compile(r"JobId=(\S+) Transition=(\d+) State=([A-Z]+) Action")
#: States that only changes in place have.
_IN_PLACE = ("ASK", "PIN", "START", "JOIN", "LEAVE", "FREE", "CANCEL")
#: Nothing is left to put right: a reservation goes within a few looks.
_TIDY_S = 30.0


#: Counts of the record on unmodified scripts.
SCRIPT_COUNTS = (
    "starts",
    "answers",
    "proven",
    "refuted",
    "torn",
    "cut_at_end",
    "put_back",
    "twice",
)
#: Seconds after a fault until esrun can start steps again.
_UNGUARDED_S = 60.0


def final(
    site: ChaosSite, load: Load, rules: Rules, hits: Sequence[Any], abandoned: bool
) -> dict[str, Any]:
    """Record breaches found at the end; return figures for the record.

    Args:
        site: the cluster.
        load: the jobs.
        rules: where breaches are recorded.
        hits: faults, of `campaign.FaultRecord`.
        abandoned: whether the controller was killed for good.
    """
    _reservations(site, rules, AHEAD_S + 30 if abandoned else _TIDY_S)
    done, states = load.done(), _last(site.samples, "state")
    reasons = _last(site.samples, "reason")
    present = {j["name"] for j in site.samples[-1]["jobs"] or ()}
    now = time.time()
    lost = cancelled = forgotten = 0
    started = load.beats()
    times_given = Counter(number for number, _ in load.accepted.values())
    for name, (number, _) in load.accepted.items():
        state = states.get(name, "unknown")
        lasted = name in done or name in started
        if (
            state == "FAILED"
            and not lasted
            and (
                # The end of a job that slurmctld has forgotten is taken for that of this one.
                times_given[number] > 1
                # Slurm starts it again at once, and the node refuses that.
                or site.start_forgotten(number)
            )
        ):
            forgotten += 1
        elif name in site.lost and name not in present and state != "FAILED":
            forgotten += name not in done  # else its processes came to their end all the same
        elif name in site.cancelled and state == "CANCELLED":
            cancelled += 1
        elif name not in done:
            lost += 1
            text = f"{state} ({reasons.get(name)}); its log ends: {_tail(load.log(name))}"
            rules.add(now, "lost", name, text)
        elif state not in ("COMPLETED", "unknown"):
            rules.add(now, "lost", name, f"{state}, though it says that it was through")
    for companion in site.companions():
        text = f"{companion['state']} when all is over"
        rules.add(now, "companion", f"{companion['name']} {companion['id']}", text)
    twice = _twice(site, load, rules)
    trainings, computed_again = _trainings(load, rules, done)
    lights, light_again = _lights(load, rules, done)
    log = site.log()

    def hindered(at: float) -> bool:
        return any(
            hit.kind in UNGUARDED and hit.begun <= at <= (hit.healed or at) + _UNGUARDED_S
            for hit in hits
        )

    scripts = _scripts(load, rules, done, log, hindered)
    for word in ("Traceback", "internal error"):
        for line in [x for x in log.splitlines() if word in x][:3]:
            rules.add(now, "log", word, line)
    ended = _LINE.findall(log)
    return {
        "transitions": {
            state: sum(1 for *_, s in ended if s == state) for state in ("DONE", "UNDONE", "ENDED")
        },
        "lost": lost,
        "cancelled": cancelled,
        "forgotten_by_slurm": forgotten,
        "twice_by_slurm": twice,
        "in_place": in_place_transitions(log),
        "trainings": trainings,
        "lights": lights,
        "lost_steps": computed_again + light_again,
        "scripts": scripts,
    }


def _tail(log: str) -> str:
    return " | ".join(log.splitlines()[-3:])[-300:]


def _last(samples: Sequence[Mapping[str, Any]], key: str) -> dict[str, str]:
    """Return the last state or reason of each job."""
    last: dict[str, str] = {}
    for sample in samples:
        for job in sample["jobs"] or ():
            last[job["name"]] = job[key]
    return last


def _reservations(site: ChaosSite, rules: Rules, seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        last = site.samples[-1]
        left = [
            n for n in last["reservations"] or () if n.startswith(OURS) and not n.startswith(LEASE)
        ]
        if not left or time.monotonic() > end:
            break
        time.sleep(1)
    for name in left:
        rules.add(last["at"], "reservation", name, "still there when all is over")


def _twice(site: ChaosSite, load: Load, rules: Rules) -> int:
    """Record overlapping attempts; Slurm itself causes those on nodes that it cannot reach.

    Returns:
        How many of that sort.
    """
    slurms = 0
    for name, runs in load.beats().items():
        for earlier, later, host, seconds in overlaps(runs):
            if host in site.unreachable:
                slurms += 1
                continue
            text = f"attempts {earlier} (on {host}) and {later} for {seconds:.1f} s"
            rules.add(time.time(), "run twice", name, text)
    for name, rows in load.accounted().items():
        rows.sort(key=lambda r: r[1])
        for (_, _, end), (_, start, _) in itertools.pairwise(rows):
            # One whose end slurmctld forgot is written down as ended when it is found out.
            forgot = any(start - 60 < at < end for at in site.crashes)
            if start < end - 1 and name not in site.lost and not forgot:
                text = f"sacct: an attempt began {end - start:.0f} s before another ended"
                rules.add(time.time(), "run twice", name, text)
    return slurms


def _trainings(load: Load, rules: Rules, done: set[str]) -> tuple[int, int]:
    """Compare trainings with the undisturbed one; return their number and repeated steps."""
    names = [n for n, j in load.jobs.items() if j.kind == "train" and n in load.accepted]
    layouts = {load.jobs[name].manner for name in names}
    references = {layout: load.history(load.reference(layout)) for layout in layouts}
    lost_steps = 0
    for name in names:
        mine, reference = load.history(name), references[load.jobs[name].manner]
        lost_steps += mine.lost_steps()
        for text in faults(mine, reference, ended=name in done)[:3]:
            rules.add(time.time(), "training", name, text)
    return len(names), lost_steps


def _lights(load: Load, rules: Rules, done: set[str]) -> tuple[int, int]:
    """Compare light trainings with an undisturbed one; return their number and repeated steps."""
    names = [n for n, j in load.jobs.items() if j.kind == "light" and n in load.accepted]
    reference, repeated_steps = light_reference(*LIGHT_SIZE), 0
    for name in names:
        mine = load.history(name)
        repeated_steps += mine.lost_steps()
        wrong = faults(mine, reference, ended=name in done) + uneven_steps(mine)
        for text in wrong[:3]:
            rules.add(time.time(), "training", name, text)
    return len(names), repeated_steps


def in_place_transitions(log: str) -> dict[str, int]:
    """Return the number of changes in place for each end of transitions, by selasticd's log."""
    known: set[tuple[str, str]] = set()
    ends: Counter[str] = Counter()
    for job, number, state in _STATE.findall(log):
        if state in _IN_PLACE:
            known.add((job, number))
        elif state in ("DONE", "UNDONE", "ENDED") and (job, number) in known:
            known.remove((job, number))
            ends[state] += 1
    return dict(ends)


def sleep_figures(log: str, samples: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return how often nodes were switched off and on, and whether some were off throughout.

    Args:
        log: of selasticd.
        samples: of drivers/observer.py.

    Returns:
        off: by selasticd; on: by selasticd, and up again; by_slurm: up again for a job, by Slurm;
        lost: left to the administrator; share: part of the samples in which a node was off;
        longest_awake_s: longest time in which none was.
    """
    seen = [s for s in samples if s["nodes"]]
    asleep = [any(map(is_off, s["nodes"].values())) for s in seen]
    awake_since, longest = None, 0.0
    for sample, some in zip(seen, asleep, strict=True):
        awake_since = None if some else awake_since or float(sample["at"])
        longest = max(longest, float(sample["at"]) - awake_since if awake_since else 0.0)
    off = re.findall(r"\bSleep=act\b.* ToSleep=([a-z]\S*)", log)
    return {
        "off": sum(len(expand(names)) for names in off),
        "on": len(re.findall(r"\bPower=on\b", log)),
        "by_slurm": len(re.findall(r"\bPower=up By=slurm\b", log)),
        "lost": len(re.findall(r"\bPower=lost\b", log)),
        "share": round(sum(asleep) / max(1, len(asleep)), 3),
        "longest_awake_s": round(longest, 1),
    }


def _scripts(
    load: Load, rules: Rules, done: set[str], log: str, hindered: Callable[[float], bool]
) -> dict[str, Any]:
    """Check the logs of unmodified scripts; return figures.

    Returns:
        Number of scripts of each manner, starts, answered notices, scripts shown to resume and not
        to resume, torn checkpoints that were found, saves that were begun while Slurm ended a
        changed job and cut by that, checkpoints that esrun has put back, scripts of which two ran
        at once (not checked further), and the steps of each restart that were computed again, after
        changes and after faults.
    """
    requeued = requeued_after_notice(log)
    figures: dict[str, Any] = {
        "manners": Counter(),
        **dict.fromkeys(SCRIPT_COUNTS, 0),
        "again_after_changes": [],
        "again_after_faults": [],
    }
    times_given = Counter(number for number, _ in load.accepted.values())
    for name, job in load.jobs.items():
        if job.kind != "script" or name not in load.accepted:
            continue
        history = without_hindered(load.saver_history(name), hindered)
        figures["manners"][job.manner] += 1
        figures["starts"] += len(history.attempts)
        figures["answers"] += len(history.answers)
        figures["proven"] += history.proven
        figures["refuted"] += history.refuted
        if history.interleaved:  # `run twice` judges that
            figures["twice"] += 1
            continue
        figures["torn"] += sum(len(attempt.torn) for attempt in history.attempts)
        figures["put_back"] += sum(attempt.put_back is not None for attempt in history.attempts)
        figures["cut_at_end"] += sum(attempt.cut_at_end for attempt in history.attempts)
        broken = saver_faults(history, job.manner, last=job.work, ended=name in done)
        lost = lost_steps(history)
        if job.manner != "anew":
            figures["again_after_changes"] += lost.by_changes
            figures["again_after_faults"] += lost.by_faults
        number = load.accepted[name][0]
        unanswered = requeued.get(str(number), set()) - history.answers
        if times_given[number] > 1:
            unanswered = set()  # the log does not tell of which job
        for rule, text in broken[:3]:
            rules.add(time.time(), f"script {rule}", name, text)
        if unanswered:
            numbers = ", ".join(map(str, sorted(unanswered)))
            text = f"requeued by a change after notice {numbers}, which it had not answered"
            rules.add(time.time(), "script unanswered", name, text)
    return figures


def aftermath(hit: Any, log: str, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the effects of a fault, and the time until they were over.

    Args:
        hit: a `campaign.FaultRecord`.
        log: all of selasticd's.
        samples: all.

    Returns:
        in_flight: states of the transitions that it met; landed, back, ended: what became of
        them; recovery_s: from its end until selasticd and slurmctld both were there and all of
        these had ended, None: never; thrown: jobs that it put back into the queue; rerun_s: until
        the last of them ran again or had ended.
    """
    live = live_at(log[: hit.log])
    became: dict[tuple[str, int], tuple[str, int]] = {}
    for found in _LINE.finditer(log, hit.log):
        became.setdefault((found[1], int(found[2])), (found[3], found.start()))
    # A sample without selasticd may not know the size.
    sizes = list(itertools.accumulate((s["log"] for s in samples), max))
    times = [s["at"] for s in samples]
    ends = [
        times[min(bisect_left(sizes, became[job, n][1]), len(times) - 1)]
        for job, n, _ in live
        if (job, n) in became
    ]
    good = [s["at"] for s in samples if s["jobs"] is not None and s["alive"]]
    up = next((at for at in good if at >= hit.healed), None)
    recovery = None if up is None else max([up, *ends]) - hit.healed
    thrown, rerun = _thrown(hit, samples)
    states = [became[job, n][0] for job, n, _ in live if (job, n) in became]
    return {
        "in_flight": [state for _, _, state in live],
        "landed": states.count("DONE"),
        "back": states.count("UNDONE"),
        "ended": states.count("ENDED"),
        "recovery_s": None if recovery is None else round(recovery, 1),
        "thrown": thrown,
        "rerun_s": None if rerun is None else round(rerun, 1),
    }


def _thrown(hit: Any, samples: Sequence[Mapping[str, Any]]) -> tuple[int, float | None]:
    """Return the number of jobs that a fault requeued, and when the last ran again."""
    known = [s for s in samples if s["jobs"] is not None]
    before = [s for s in known if s["at"] <= hit.begun][-1:]
    soon = [s for s in known if hit.begun < s["at"] <= hit.healed + 25]
    ran = {j["name"]: j["restarts"] for s in before for j in s["jobs"] if j["state"] == "RUNNING"}
    out = {
        j["name"]
        for s in soon
        for j in s["jobs"]
        if j["state"] == "PENDING" and j["restarts"] > ran.get(j["name"], 1 << 30)
    }
    again: dict[str, float] = {}
    for sample in (s for s in known if s["at"] > hit.healed):
        for job in sample["jobs"]:
            if job["name"] in out and (job["state"] == "RUNNING" or job["ended"]):
                again.setdefault(job["name"], sample["at"])
    return len(out), max((at - hit.healed for at in again.values()), default=None)
