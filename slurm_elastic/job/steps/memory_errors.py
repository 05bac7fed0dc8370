"""Lines of the error output of ranks, and of Slurm, that name a lack of memory.

These are the last line of a Python traceback with such an error, and the lines of srun and
slurmstepd when the kernel has killed a process of a step for its memory. A line of a script that
only mentions memory does not count.
"""

from __future__ import annotations

import re

#: Exceptions of Python, numpy and torch (2.5 and newer; 2.4 and older) for a lack of memory.
_EXCEPTIONS = (
    rb"MemoryError",
    rb"numpy(\.\w+)*\._ArrayMemoryError",
    rb"torch\.OutOfMemoryError",
    rb"torch\.cuda\.OutOfMemoryError",
)
#: Texts of a `RuntimeError` of torch: of the CPU, and of errors that CUDA and HIP report late.
_MESSAGES = (
    rb"DefaultCPUAllocator: (can't allocate|not enough) memory",
    rb"(CUDA|HIP) (error: )?out of memory",
    rb"CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
)
_LINE = re.compile(
    # srun passes ranks' lines on with their number in front under --label.
    rb"(\s*\d+: )?(%(exceptions)s)(:|\s*$)"
    rb"|(\s*\d+: )?(RuntimeError|slurm-elastic): .*(%(messages)s)"
    rb"|srun: error: .*: tasks? [\d,-]+: Out Of Memory"
    rb"|slurmstepd: error: Detected \d+ oom[_-]kill event"
    % {b"exceptions": b"|".join(_EXCEPTIONS), b"messages": b"|".join(_MESSAGES)}
)


def is_lack_of_memory(line: bytes) -> bool:
    """Return whether a line of error output names a lack of memory.

    >>> is_lack_of_memory(b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    True
    >>> is_lack_of_memory(b"srun: error: g01: task 1: Out Of Memory")
    True
    >>> is_lack_of_memory(b"epoch 3: freed memory after MemoryError")
    False
    """
    return _LINE.match(line) is not None
