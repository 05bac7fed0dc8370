"""Parts of the time in which a job's GPUs on this node compute and access memory, by NVML.

NVML is the driver's library. It is asked in a thread of its own, as a call may hang on a GPU that
has failed: then nothing is measured, and all else goes on. Standard library only.
"""

from __future__ import annotations

import os
import threading
from typing import Any, NamedTuple

_LIBRARY = "libnvidia-ml.so.1"
#: Between two looks, s. Each shows the last second or less.
_EVERY_S = 2.0
#: Looks without any answer after which no more is asked.
_MOST_FAILURES = 5


class GpuUse(NamedTuple):
    """Mean over the job's GPUs since the last call, 0 to 1; None: not measured.

    Attributes:
        gpu_busy: part of the time in which they compute.
        gpu_memory_busy: part of the time in which their memory is read or written.
    """

    gpu_busy: float | None = None
    gpu_memory_busy: float | None = None


class GpuUseMeter:
    """Measurement from one call to the next.

    Args:
        visible: value of CUDA_VISIBLE_DEVICES: indexes or UUIDs. Slices of GPUs (MIG) have no
            use of their own in NVML and are left out.
        library: file of NVML.
        every_s: seconds between two looks.
    """

    def __init__(self, visible: str, *, library: str = _LIBRARY, every_s: float = _EVERY_S) -> None:
        self._names = [name for name in visible.split(",") if _is_gpu(name)]
        self._library, self._every_s = library, every_s
        self._adding = threading.Lock()
        self._sums, self._looks = [0.0, 0.0], 0
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    def measure(self) -> GpuUse:
        """Return the use since the last call; never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="gpu-use", daemon=True)
            if self._names:
                self._thread.start()
        with self._adding:
            (busy, memory), looks = self._sums, self._looks
            self._sums, self._looks = [0.0, 0.0], 0
        return GpuUse(busy / looks, memory / looks) if looks else GpuUse()

    def stop(self) -> None:
        """End the looks."""
        self._ends.set()

    def _look(self) -> None:
        """Look until `stop`, or until NVML does not answer."""
        try:
            nvml = _Nvml(self._library)
            gpus = [gpu for name in self._names if (gpu := nvml.gpu(name)) is not None]
        except (OSError, AttributeError):  # no driver, or another library
            return
        failures = 0
        while gpus and failures < _MOST_FAILURES:
            rates = [rate for gpu in gpus if (rate := nvml.rates(gpu)) is not None]
            failures = 0 if rates else failures + 1
            with self._adding:
                for busy, memory in rates:
                    self._sums[0] += busy / len(rates)
                    self._sums[1] += memory / len(rates)
                self._looks += bool(rates)
            if self._ends.wait(self._every_s):
                return


class _Nvml:
    """Functions of NVML; each returns 0 if it has succeeded.

    Raises:
        OSError: there is no such library, or it finds no driver.
        AttributeError: it lacks a function.
    """

    def __init__(self, library: str) -> None:
        import ctypes  # noqa: PLC0415 - esrun starts without it

        self._ctypes = ctypes
        self._rates_type: Any = ctypes.c_uint * 2  # of the GPU and of its memory, percent
        nvml = ctypes.CDLL(library)
        self._by_index = nvml.nvmlDeviceGetHandleByIndex_v2
        self._by_uuid = nvml.nvmlDeviceGetHandleByUUID
        self._get_rates = nvml.nvmlDeviceGetUtilizationRates
        if nvml.nvmlInit_v2():
            raise OSError(f"{library}: no driver")

    def gpu(self, name: str) -> Any:
        """Return the handle of a GPU; None: it is not known, or not accessible."""
        handle = self._ctypes.c_void_p()
        by_index = name.isdecimal()
        argument: Any = self._ctypes.c_uint(int(name)) if by_index else name.encode()
        get = self._by_index if by_index else self._by_uuid
        return None if get(argument, self._ctypes.byref(handle)) else handle

    def rates(self, gpu: Any) -> tuple[float, float] | None:
        """Return the parts of the time in which a GPU computes, and accesses memory; or None."""
        percent = self._rates_type()
        if self._get_rates(gpu, self._ctypes.byref(percent)) or max(percent) > 100:
            return None
        return percent[0] / 100, percent[1] / 100


def _is_gpu(name: str) -> bool:
    if name.isascii() and name.isdecimal():
        return len(name) < 6
    return name.startswith("GPU-")


def visible_gpus() -> str:
    """Return the value of CUDA_VISIBLE_DEVICES, as Slurm sets it for a job with GPUs."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")
