"""Prints where the snapshots of both readers differ; runs in ctld as the operator account.

compare_readers.py           one JSON list of [kind, name, field, pyslurm's value, JSON's value]
compare_readers.py --time N  seconds of wall clock and CPU of N reads of all jobs by each, and of
                             three jobs by JSON
"""

import dataclasses
import json
import os
import sys
import time

from slurm_elastic.core.cluster import JobState
from slurm_elastic.slurm.readers.cluster_reader import ClusterReader
from slurm_elastic.slurm.readers.json_source import JsonSource
from slurm_elastic.slurm.readers.pyslurm_source import PyslurmSource
from slurm_elastic.slurm.slurm_command import installed_release

#: Words that only one of the two ways uses for a state of a node.
WORDS = {"MAINTENANCE": "MAINT", "NO_RESPOND": "NOT_RESPONDING"}

#: Id of a job that slurmctld does not know.
FORGOTTEN = 900_000


def differences(left, right):
    for kind in ("nodes", "jobs", "partitions", "reservations"):
        one, two = ({_name(r): r for r in getattr(s, kind)} for s in (left, right))
        for name in one.keys() ^ two.keys():
            yield kind, name, "", name in one, name in two
        for name in one.keys() & two.keys():
            for field in dataclasses.fields(one[name]):
                values = [getattr(r[name], field.name) for r in (one, two)]
                if kind == "nodes" and field.name == "state":
                    values = [{WORDS.get(w, w) for w in v.split("+")} for v in values]
                # pyslurm takes 128 off an exit code of 128 and more.
                if field.name == "exit_code" and values[1] - values[0] == 128:
                    continue
                if values[0] != values[1]:
                    yield kind, name, field.name, repr(values[0]), repr(values[1])


def fields_that_differ(one, other):
    """Return the fields in which two records differ, each with both values."""
    names = [field.name for field in dataclasses.fields(one)]
    pairs = [(name, getattr(one, name), getattr(other, name)) for name in names]
    return [(name, repr(left), repr(right)) for name, left, right in pairs if left != right]


def _name(row):
    return getattr(row, "job_id", None) or row.name


def differing_alone(reader):
    """Return in what running and pending jobs differ when they are read by themselves, by id."""
    jobs = reader.jobs()
    kept = sorted(i for i, j in jobs.items() if j.state in (JobState.RUNNING, JobState.PENDING))
    if not kept:
        return []
    few = [reader.some_jobs(ids) for ids in ([FORGOTTEN], [FORGOTTEN, kept[0]])]
    assert FORGOTTEN not in few[0] | few[1]
    assert few[1][kept[0]] == jobs[kept[0]]
    found = [(i, fields_that_differ(jobs[i], reader.some_jobs([i])[i])) for i in kept]
    return [(i, fields) for i, fields in found if fields]


def settled(differing):
    """Return the differences; repeated, as the cluster may change between two reads."""
    found = []
    for _ in range(5):
        found = differing()
        if not found:
            break
        time.sleep(0.5)
    return found


def timed(read, times):
    read()
    began, cpu = time.monotonic(), sum(os.times()[:4])
    for _ in range(times):
        read()
    spent, cpu = time.monotonic() - began, sum(os.times()[:4]) - cpu
    return {"seconds": spent / times, "cpu": cpu / times}


def main() -> None:
    readers = [
        ClusterReader(source, reservation_prefix="selastic_")
        for source in (PyslurmSource(), JsonSource(installed_release()))
    ]
    if "--time" in sys.argv:
        times = int(sys.argv[-1])
        three = sorted(readers[0].jobs())[:3]
        reads = {
            "pyslurm": readers[0].jobs,
            "json": readers[1].jobs,
            "json_three": lambda: readers[1].some_jobs(three),
        }
        print(json.dumps({name: timed(read, times) for name, read in reads.items()}))
        return
    found = {
        "jobs": len(readers[1].jobs()),
        "differences": settled(
            lambda: list(differences(*(reader.snapshot() for reader in readers)))
        ),
        "some": [settled(lambda r=reader: differing_alone(r)) for reader in readers],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
