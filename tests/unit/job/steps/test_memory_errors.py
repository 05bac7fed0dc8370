"""Lines of error output that show a lack of memory."""

import doctest
import os
import sys
import traceback

import pytest

from slurm_elastic.job.launch import SrunProcess
from slurm_elastic.job.steps import memory_errors, step
from slurm_elastic.job.steps.memory_errors import is_lack_of_memory
from slurm_elastic.job.steps.step import Step


def test_examples():
    assert doctest.testmod(memory_errors).failed == 0


@pytest.mark.parametrize(
    "line",
    [
        b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has",
        b"torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
        b"RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 7.79 GiB total",
        b"RuntimeError: CUDA error: out of memory",
        b"RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        b"RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory:",
        b"MemoryError",
        b"numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.28 TiB for an array",
        b"3: MemoryError",
        b"slurm-elastic: [enforce fail] DefaultCPUAllocator: can't allocate memory:",
        b"srun: error: g01: tasks 0-1: Out Of Memory",
        b"slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have",
    ],
)
def test_lines_that_name_a_lack_of_memory(line):
    assert is_lack_of_memory(line)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"INFO caught CUDA out of memory, retrying with half the batch",
        b"    raise MemoryError",
        b"RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
        b"srun: error: g01: task 0: Segmentation fault",
        b"ValueError: MemoryError",
    ],
)
def test_lines_that_only_mention_memory_do_not_count(line):
    assert not is_lack_of_memory(line)


def ended(command):
    started = Step(SrunProcess(command, dict(os.environ), "mark"))
    return started.wait(), started.lacked_memory


def test_a_step_has_lacked_memory_if_its_error_output_says_so(monkeypatch):
    out_of_memory = [sys.executable, "-c", "bytearray(1 << 62)"]
    assert ended(out_of_memory) == (1, True)
    assert ended([sys.executable, "-c", "1 / 0"]) == (1, False)
    # Long before the end: the program has caught it.
    monkeypatch.setattr(step, "_MEMORY_S", 0.0)
    assert ended(out_of_memory) == (1, False)


def test_the_error_of_the_installed_torch():
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    printed = "".join(traceback.format_exception_only(caught.value))
    assert is_lack_of_memory(printed.splitlines()[-1].encode()), printed
