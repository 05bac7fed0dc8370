"""NCCL process groups that are formed beside a running training, and that may lose members.

A collective of NCCL is a kernel that keeps the GPU busy until all ranks have called it. One that a
lost rank will never call has to be aborted, else nothing that waits for the GPU ends any more.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

#: Set to 1: ranks that NCCL connects may join and leave a running training.
NCCL_VARIABLE = "SLURM_ELASTIC_IN_PLACE_NCCL"
#: Variables of torch with which a process goes on when a collective has failed: torch only aborts
#: the communicator (1, the default, ends the process), and its watchdog does not end the process
#: either (by default 8 minutes later).
_GO_ON = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}
#: Kernels of all streams run one after the other if this is 1, as Megatron-LM sets it.
_ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"
#: Seconds that members may be apart in the first collective of a group (our choice).
_FIRST_S = 120.0
#: Seconds for aborting all communicators of a rank (our choice; it took 0.002 to 0.5 s on an H100).
ABORT_S = 20.0
_POLL_S = 0.002


def may_change() -> bool:
    """Return whether the user has allowed changes of ranks that NCCL connects."""
    return os.environ.get(NCCL_VARIABLE) == "1"


def survive_failures() -> None:
    """Let this process go on when a collective fails; before its first process group is made."""
    if may_change():
        os.environ.update(_GO_ON)


def connect(group: Any, device: torch.device) -> None:
    """Run a first collective of a new group, so that its ranks are connected before they need it.

    All its ranks call this, in a thread beside the training. The collective runs on a stream of its
    own: on the training's it would have to wait for a collective of the training, and in another
    order on another rank.

    Raises:
        RuntimeError: another rank did not call it, or is lost.
    """
    if os.environ.get(_ONE_QUEUE) == "1":
        # The two orders would block each other: only the communicator is made.
        group._get_backend(device).eager_connect_single_device(device)  # noqa: SLF001
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        one = torch.ones(1, device=device)
        work = group.allreduce([one])
        end = time.monotonic() + _FIRST_S
        while not work.is_completed():
            if time.monotonic() > end:
                raise RuntimeError(f"a rank has not connected within {_FIRST_S:.0f} s")
            time.sleep(_POLL_S)
        work.wait()  # a failed one counts as completed, and raises here


def abort(groups: Sequence[Any], device: torch.device, *, within_s: float = ABORT_S) -> None:
    """End all collectives of these groups, which cannot be used any more.

    Their objects are to be kept until the process ends: destroying one that was aborted may wait
    without end (seen with torch 2.11).

    Args:
        groups: process groups.
        device: of this rank.
        within_s: longest wait for the end; 0: do not wait.

    Raises:
        RuntimeError: they did not end within this time.
    """

    def run() -> None:
        torch.cuda.set_device(device)
        for group in groups:
            # Not public; the releases of torch have different names for it.
            backend = group._get_backend(device)  # noqa: SLF001
            (backend.abort if hasattr(backend, "abort") else backend._abort)()  # noqa: SLF001

    thread = threading.Thread(target=run, name="abort", daemon=True)
    thread.start()
    thread.join(within_s)
    if within_s and thread.is_alive():
        raise RuntimeError(f"NCCL has not aborted its collectives within {within_s:.0f} s")
