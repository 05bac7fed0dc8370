"""One esrun at a time in a job.

Two at once would answer the same notice, and the job would be requeued when the first of them has
saved: what the other one has trained since its last save would be lost, and a save of it cut off.

Part of each start: imports only modules that Python has loaded already.
"""

from __future__ import annotations

import _socket
import os
import sys

from slurm_elastic.core.errors import SlurmElasticError

#: Connections that may wait: each esrun that is refused leaves one.
_BACKLOG = 4096
#: Bytes of a job's name that are used; the kernel allows 107 for all.
_NAME_BYTES = 64
#: Process id, user and group of the other end of a socket, as three C integers.
_CREDENTIAL_BYTES = 12


class SecondEsrunError(SlurmElasticError):
    """Another esrun of the job runs; the message is one line."""


def lock_job(run_id: str, directory: str) -> _socket.socket | None:
    """Lock a job for this esrun; return the socket that holds the lock as long as it is open.

    The lock is an address of a socket on this host, on which each esrun of a batch script runs.
    None: another user has that address, so that there is no lock.

    Args:
        run_id: of the job.
        directory: of its submission: jobs of several clusters may have one name on this host.

    Raises:
        SecondEsrunError: an esrun of this user holds the lock.
    """
    try:
        place = os.stat(directory).st_ino  # noqa: PTH116 - pathlib is slow to load
    except OSError:
        place = 0
    name = f"\0esrun-{run_id[-_NAME_BYTES:]}-{place}"
    own = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        own.bind(name)
        own.listen(_BACKLOG)
    except OSError:
        own.close()
    else:
        return own
    holder = _holder(name)
    if holder is not None:
        raise SecondEsrunError(
            f"the job runs another esrun already (process {holder}): expected one at a time; start"
            " this one when that one has ended, or submit a job for each program (sbatch --array)"
        )
    return None


def _holder(name: str) -> int | None:
    """Return the process of this user that has an address; None: it is another user's, or gone."""
    probe = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    probe.setblocking(False)  # another user may let it wait
    try:
        probe.connect(name)
        data = probe.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _CREDENTIAL_BYTES)
    except OSError:
        return None
    finally:
        probe.close()
    pid, user = (int.from_bytes(data[at : at + 4], sys.byteorder) for at in (0, 4))
    return pid if user == os.geteuid() else None
