"""Figures of a fault from the log and the samples, and the table of a campaign."""

from typing import Any

from tests.chaos.campaign import FaultRecord
from tests.chaos.chaos_site import live_at
from tests.chaos.final_checks import aftermath, sleep_figures
from tests.chaos.report import lines

LOG = [
    "info: JobId=3 Transition=1 State=NOTIFY Action=grow\n",
    "info: JobId=4 Transition=2 State=COOL Action=move\n",
    "info: JobId=4 Transition=2 State=DONE Action=move\n",
    "info: JobId=5_1 Transition=3 State=VERIFY Action=move\n",
    # here it hits
    "warning: JobId=3 Transition=1 State=UNDONE Action=grow\n",
    "info: JobId=5_1 Transition=3 State=DONE Action=move\n",
]
MET = sum(map(len, LOG[:4]))


def sample(at: float, log: int, *, alive: bool = True, **states: str) -> dict[str, Any]:
    jobs = [
        {"name": n, "state": s, "restarts": int(at > 10), "ended": s == "COMPLETED"}
        for n, s in states.items()
    ]
    return {"at": at, "log": log, "alive": alive, "jobs": jobs if alive else None}


def test_what_a_fault_met_and_until_when() -> None:
    whole = "".join(LOG)
    assert live_at(whole[:MET]) == [("3", 1, "NOTIFY"), ("5_1", 3, "VERIFY")]
    assert live_at(whole) == []
    # said once the job computes again: what it cost, not a state
    assert live_at(f"{whole}info: JobId=3 Transition=1 State=training Seconds=\n") == []
    samples = [
        sample(9, MET, a="RUNNING", b="RUNNING"),
        sample(11, MET, alive=False),
        sample(13, MET, a="PENDING", b="RUNNING"),
        sample(15, len(whole) - len(LOG[5]), a="PENDING", b="RUNNING"),
        sample(21, len(whole), a="RUNNING", b="RUNNING"),
    ]
    found = aftermath(FaultRecord("drain", begun=10.0, healed=12.0, log=MET), whole, samples)
    assert found["in_flight"] == ["NOTIFY", "VERIFY"]
    assert (found["landed"], found["back"], found["ended"]) == (1, 1, 0)
    assert found["recovery_s"] == 9.0
    assert (found["thrown"], found["rerun_s"]) == (1, 9.0)


def test_what_a_lost_ledger_had_is_not_taken_for_live() -> None:
    begun = "info: selasticd 0.1.0 Mode=act\n"
    fresh = "info: JobId=9 Transition=1 State=COOL Action=grow\n"
    old = "".join(LOG[:4])
    assert live_at(old + begun + LOG[3]) == live_at(old)
    assert live_at(old + begun + fresh) == [("9", 1, "COOL")]


def test_what_never_came_back_is_told() -> None:
    found = aftermath(FaultRecord("drain", begun=10.0, healed=12.0, log=0), "", [sample(11, 0)])
    assert found["recovery_s"] is None


def test_faults_and_breaches_are_counted_in_the_table() -> None:
    fault = {"kind": "drain", "whom": "g01", "trouble": "", "in_flight": ["COOL"], "landed": 1}
    fault |= {"back": 0, "ended": 0, "recovery_s": 3.0, "thrown": 0, "rerun_s": None}
    record = {"seed": 4, "minutes": 5, "seconds": 300, "jobs": 9, "faults": [fault, fault]}
    record |= {"transitions": {"DONE": 2, "UNDONE": 1, "ENDED": 0}, "lost": 0, "cancelled": 1}
    record |= {"forgotten_by_slurm": 0, "twice_by_slurm": 0, "trainings": 1, "lost_steps": 4}
    record |= {"breaches": [{"rule": "held"}], "launch_failed": []}
    scripts = {"manners": {"place": 2, "anew": 1}, "starts": 7, "answers": 3, "proven": 2}
    scripts |= {"refuted": 1, "torn": 1, "twice": 0, "again_after_changes": [0, 4]}
    scripts |= {"again_after_faults": [30]}
    text = "\n".join(lines([record, record | {"scripts": scripts, "slurm": "25.11.7"}]))
    assert "Unmodified scripts: 1 `anew`, 2 `place`; 7 starts, 3 notices answered" in text
    assert "2.0, 4.0 after each of 2 changes, 30.0, 30.0 after each of 1 faults" in text
    assert "seeds 4, 4; Slurm 25.11.7." in text
    assert "Unmodified" not in "\n".join(lines([record]))
    assert "; Slurm" not in lines([record])[0]
    assert "| drain | 4 | 4 | 4 | 0 | 0 | 3.0, 3.0 | 0 | - |" in text
    assert "6 transitions: 4 landed, 2 were undone" in text
    assert "Invariants broken: held 2." in text


def test_how_often_nodes_were_off_and_how_long_none_was() -> None:
    log = (
        "info: Sleep=act Asleep=2 Nodes=9 Awake=7 ToSleep=g[02,04]\n"
        "info: Node=g02 Power=on After=2s\n"
    )
    off, on = ["IDLE", "POWERED_DOWN"], ["IDLE"]
    states = [(1, on), (3, off), (4, on), (6, on), (7.5, on), (9, off)]
    samples: list[dict[str, Any]] = [{"at": at, "nodes": {"g01": on, "g02": s}} for at, s in states]
    samples.insert(2, {"at": 3.5, "nodes": None})  # slurmctld does not answer
    assert sleep_figures(log, samples) == {
        "off": 2, "on": 1, "by_slurm": 0, "lost": 0, "share": 0.333, "longest_awake_s": 3.5,
    }  # fmt: skip
