"""Detection of ranks that train side by side, each as if it were the only one.

A program that was written for one process runs under esrun once for each GPU, and all of them write
the same checkpoints. Ranks that train together have a socket that listens on the host of rank 0
(torch.distributed, NCCL, gloo, gRPC), those on one host are connected, and they do not each write
the whole checkpoint. Only a program that shows none of it on that host is taken for one of this
kind. The sockets may be between processes that each rank has started for itself, one for each GPU
(`torch.multiprocessing.spawn`): then these train together, and beside those of the other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import Path

from slurm_elastic.job.launchers.nested_launch import RankProcess
from slurm_elastic.job.launchers.rendezvous_watch import connections, listening_sockets

#: Smallest checkpoint of which it can be told which ranks have written it: all ranks write to their
#: logs, too.
_LEAST_BYTES = 64 * 1024
_PROC = Path("/proc")


def trains_alone(
    processes: Mapping[int, RankProcess], saved_bytes: int, proc: Path = _PROC
) -> bool | None:
    """Return whether each of several ranks trains alone; False where it cannot be told.

    None: they are not connected, but not each has written so much yet.

    Args:
        processes: of the step on this host, which is that of rank 0; others may have ranks, too.
        saved_bytes: size of a checkpoint that they have written.
        proc: where the kernel shows processes.
    """
    tasks = [pid for pid, process in processes.items() if process.parent not in processes]
    if not tasks or saved_bytes < _LEAST_BYTES:
        return False
    try:
        written = {pid: _bytes_written(pid, proc) for pid in processes}
        trees = [_tree(processes, task) for task in tasks]
        each_saves = all(sum(written[pid] for pid in tree) >= saved_bytes for tree in trees)
        meet = _listens(processes, proc) and (len(trees) == 1 or _are_connected(trees, proc))
    except (OSError, ValueError):
        return False
    return False if meet else each_saves or None


def _tree(processes: Mapping[int, RankProcess], task: int) -> set[int]:
    """Return a process and all below it."""
    tree, new = {task}, {task}
    while new:
        new = {pid for pid, process in processes.items() if process.parent in new} - tree
        tree |= new
    return tree


def _bytes_written(pid: int, proc: Path) -> int:
    for line in (proc / str(pid) / "io").read_text("ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "wchar":
            return int(value)
    raise ValueError("the kernel does not count what processes write")


def _listens(pids: Iterable[int], proc: Path) -> bool:
    """Return whether one of these processes has a socket that listens."""
    return any(
        not _sockets(pid, proc).isdisjoint(listening_sockets(proc / str(pid) / "net"))
        for pid in pids
    )


def _are_connected(trees: Iterable[set[int]], proc: Path) -> bool:
    """Return whether a process of one tree has a TCP connection with one of another tree."""
    ends = [{end for pid in tree for end in _connections(pid, proc)} for tree in trees]
    return any((there, here) in b for a, b in combinations(ends, 2) for here, there in a)


def _connections(pid: int, proc: Path) -> Iterator[tuple[str, str]]:
    """Yield both ends of each TCP connection of a process, its own one first."""
    sockets = _sockets(pid, proc)
    for inode, ends in connections(proc / str(pid) / "net").items():
        if inode in sockets:
            yield ends


def _sockets(pid: int, proc: Path) -> set[str]:
    """Return the inodes of a process's sockets."""
    inodes = set()
    for link in (proc / str(pid) / "fd").iterdir():
        try:
            kind, _, inode = str(link.readlink()).partition(":")
        except OSError:
            continue  # closed meanwhile
        if kind == "socket":
            inodes.add(inode.strip("[]"))
    return inodes
