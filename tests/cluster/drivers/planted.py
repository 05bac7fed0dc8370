"""A training with known delays, for the profiler to find.

Environment: PLANTED_COMPUTE, PLANTED_LOADER and PLANTED_COLD are seconds: of both passes with the
update, of each sample, and of each sample that is not in the page cache. PLANTED_FILE is the data
set, PLANTED_WIDTH squared times four the bytes of gradients, PLANTED_OUT the directory for
checkpoints.
"""

from slurm_elastic.training import init  # isort: skip

import ctypes
import mmap
import os
import time

import torch

PAGE = 4096
LATE = 0.05
LIBC = ctypes.CDLL(None, use_errno=True)


def seconds(name: str) -> float:
    return float(os.environ.get(f"PLANTED_{name}", "0"))


class Pages:
    """Data set whose samples are pages of a file."""

    def __init__(self, path: str) -> None:
        self._handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        self._count = os.fstat(self._handle).st_size // PAGE
        self._due = 0.0
        # Never touched: a page that is mapped would stay in the cache.
        self._map = mmap.mmap(self._handle, 0, access=mmap.ACCESS_COPY)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        begun = time.monotonic()
        page = bytearray(PAGE)
        due = seconds("LOADER")
        if not self._cached(index):
            due += seconds("COLD")
        os.preadv(self._handle, [page], index * PAGE)
        # A busy host wakes us late: that is caught up with by the next sample of the batch.
        late = begun - self._due
        self._due = due + (self._due if late < LATE else begun)
        time.sleep(max(0.0, self._due - time.monotonic()))
        return torch.full((WIDTH,), page[0] / 256), torch.tensor(0)

    def _cached(self, index: int) -> bool:
        """Return whether a page is in memory, without reading it."""
        answer = ctypes.c_ubyte(0)
        where = ctypes.c_void_p(self._address + index * PAGE)
        if LIBC.mincore(where, ctypes.c_size_t(PAGE), ctypes.byref(answer)):
            raise OSError(ctypes.get_errno(), "mincore")
        return bool(answer.value & 1)


WIDTH = int(os.environ.get("PLANTED_WIDTH", "64"))


class Slow(torch.nn.Linear):
    """Layer whose forward pass waits until the passes and the update have taken PLANTED_COMPUTE.

    On a virtual machine the backward pass and the update can take 80 ms of a core in place of
    0.3 ms, as its memory is mapped anew after a pause. What they took in one step is left out of
    the next one's wait. Only time on a core counts, so that a wait for the network stays.
    """

    other_passes_s = 0.0  # on a core, of the last backward pass and update

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        begun = time.monotonic()
        out = super().forward(values)
        time.sleep(max(0.0, begun + seconds("COMPUTE") - self.other_passes_s - time.monotonic()))
        self.ended_at = time.thread_time()
        return out


class Updates(torch.optim.SGD):
    def step(self, closure: None = None) -> None:
        super().step(closure)
        model.other_passes_s = time.thread_time() - model.ended_at


torch.set_num_threads(1)
torch.manual_seed(0)
model = Slow(WIDTH, WIDTH)
job = init(
    model,
    torch.nn.CrossEntropyLoss(),
    Updates(model.parameters(), lr=0.01),
    Pages(os.environ["PLANTED_FILE"]),
    global_batch=4,
    epochs=1,
    checkpoint_dir=os.environ["PLANTED_OUT"],
)
for batch in job:
    job.step(batch)
job.finish()
print("trained to the end")
