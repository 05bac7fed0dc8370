"""Time without changes after which a save counts as over, learned from earlier saves."""

from __future__ import annotations

import os
import re

from slurm_elastic.job.unmodified.checkpoints.checkpoint_formats import Evidence

#: Seconds while nothing is known of the script. Twice the longest pause expected of a script that
#: gathers its state between two files (30 s), and the longest time for which an NFS client shows
#: old attributes (`acregmax` of nfs(5): 60 s).
FIRST_S = 60.0
#: Least seconds after that (our choice): a write that waits for a busy file server pauses as long.
LEAST_S = 10.0
#: Least seconds if ranks of several hosts write through NFS: files of another host may appear
#: `acregmax` later.
LEAST_NFS_S = 65.0
#: Seconds if the last file of a known format is missing, at least.
LACKING_S = 180.0
#: Times the longest pause inside a save (our choice).
_FACTOR = 3.0
#: A longer pause is one between two saves.
LONGEST_PAUSE_S = 60.0


#: File systems of which a client shows attributes late.
_CACHED = ("nfs", "nfs3", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "fuse.glusterfs", "afs")


def least_settle_s(pattern: str, hosts: int) -> float:
    """Return the least settle time of checkpoints that match a pattern.

    Args:
        pattern: glob, relative to the current directory.
        hosts: number of hosts that write them.
    """
    if hosts < 2:
        return LEAST_S
    fixed = os.path.abspath(re.split(r"[*?\[]", pattern)[0])  # noqa: PTH100 - slow to load
    return LEAST_NFS_S if _file_system(fixed) in _CACHED else LEAST_S


def _file_system(path: str) -> str:
    """Return the type of the file system of a path by /proc/self/mountinfo; "" if unknown."""
    best, found = "", ""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:  # noqa: PTH123
            lines = mounts.readlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or not kind:
            continue
        point = fields[4].replace("\\040", " ").rstrip("/")
        if f"{path}/".startswith(f"{point}/") and len(point) >= len(best):
            best, found = point, kind[0]
    return found


class SettleTime:
    """Settle time of one script.

    Args:
        pause_s: longest pause inside one of its saves in earlier runs; None: not known.
        least_s: never less.
    """

    def __init__(self, pause_s: float | None = None, *, least_s: float = LEAST_S) -> None:
        self.pause_s = pause_s
        self.least_s = least_s

    def learn(self, pause_s: float) -> None:
        """Take into account the longest pause inside a save that is over."""
        self.pause_s = max(self.pause_s or 0.0, min(pause_s, LONGEST_PAUSE_S))

    def seconds(self, evidence: Evidence = Evidence.UNKNOWN) -> float:
        """Return the seconds without change after which a save with this evidence is over."""
        if self.pause_s is None:
            settle_s = max(FIRST_S, self.least_s)
        else:
            settle_s = max(self.least_s, _FACTOR * self.pause_s)
        return max(settle_s, LACKING_S) if evidence is Evidence.LACKING else settle_s
