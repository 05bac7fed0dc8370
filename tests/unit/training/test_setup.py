"""The start of a process up to its first step, and its measurement."""

import subprocess
import sys
import time

import pytest

from slurm_elastic.training.measure.step_times import StepDurations, StepTimer, process_age
from tests.support.trainings.forked_scripts import run_forked

SCRIPT = """
from slurm_elastic.training import init
import sys, torch, torch.distributed as dist
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters())
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, use_libuv=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
replica(torch.ones(1, 3)).sum().backward()
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
mesh = init_device_mesh("cpu", (1,))
sharded = torch.nn.Parameter(DTensor.from_local(torch.ones(4, 2), mesh, [Shard(0)]))
(sharded * 2).sum().backward()
unwanted = [m for m in ("torch._dynamo.eval_frame", "torch.distributed.checkpoint")
            if m in sys.modules]
print("loaded too early:", unwanted)
import torch._dynamo.config as part
part.optimize_ddp = False
print("setting:", part.optimize_ddp, torch._dynamo.config.optimize_ddp)
print("mode:", torch._dynamo.utils.get_optimize_ddp_mode())
compiled = torch.compile(model, backend="eager")
print("compiled:", torch.equal(compiled(torch.ones(1, 3)), model(torch.ones(1, 3))))
print("real:", hasattr(torch._dynamo, "optimize") and "torch._dynamo.eval_frame" in sys.modules)
optimizer.zero_grad()
compiled(torch.ones(1, 3)).sum().backward()
optimizer.step()
dist.destroy_process_group()
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False
    )


def test_the_compiler_is_imported_only_for_torch_compile() -> None:
    done = run(SCRIPT)
    assert done.stdout.splitlines() == [
        "loaded too early: []",
        "setting: False False",
        "mode: no_optimization",
        "compiled: True",
        "real: True",
    ], done.stderr


SETTINGS = """
import sys, torch
import torch._dynamo.config as settings
from torch._dynamo.config import verbose
print(verbose, settings.suppress_errors, "torch._dynamo.eval_frame" in sys.modules)
with settings.patch(suppress_errors=True):
    print(sys.modules["torch._dynamo.config"].suppress_errors)
print(settings.suppress_errors, torch._dynamo.config is sys.modules["torch._dynamo.config"])
"""
EXTERNAL = """
import sys, torch
from torch._dynamo.external_utils import is_compiling
print(is_compiling(), "torch._dynamo.eval_frame" in sys.modules)
seen = []
torch.compile(lambda x: seen.append(is_compiling()) or x + 1, backend="eager")(torch.ones(1))
print(seen, is_compiling())
from torch._dynamo.external_utils import wrap_inline
print(sys.modules["torch._dynamo.external_utils"].wrap_inline is wrap_inline)
"""


def test_settings_of_the_compiler_are_read_without_it_and_changed_in_it() -> None:
    done = run_forked(SETTINGS)
    expected = ["False False False", "True", "False True"]
    assert done.stdout.splitlines() == expected, done.stderr


def test_whether_the_compiler_is_at_work_is_known_without_it() -> None:
    done = run_forked(EXTERNAL)
    assert done.stdout.splitlines() == ["False False", "[True] False", "True"], done.stderr


CHECKPOINTS = """
import sys
from slurm_elastic.training import init
import torch.distributed.checkpoint as dcp
print("imported:", "torch.distributed.fsdp" in sys.modules)
try:
    dcp.load_sharded_optimizer_state_dict()
except TypeError as error:
    print(error)
print("imported:", "torch.distributed.fsdp" in sys.modules)
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
print(dcp.optimizer is sys.modules[dcp.optimizer.__name__], dcp.optimizer.__file__ is not None)
print(load_sharded_optimizer_state_dict.__module__)
"""


def test_checkpoints_import_fsdp_only_for_its_optimizers() -> None:
    done = run(CHECKPOINTS)
    lines = done.stdout.splitlines()
    assert lines[0] == "imported: False", done.stderr
    assert "load_sharded_optimizer_state_dict() missing 3 required" in lines[1]
    assert lines[2:] == ["imported: True", "True True", "torch.distributed.checkpoint.optimizer"]


def test_process_age_counts_from_the_start_of_the_process() -> None:
    before = time.monotonic()
    done = run_forked(
        "import time; time.sleep(0.3);"
        "from slurm_elastic.training.measure.step_times import process_age; print(process_age())"
    )
    assert 0.3 <= float(done.stdout) <= time.monotonic() - before + 0.02
    assert process_age() > 0


def test_steps_are_timed_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    timer = StepTimer()
    assert timer.take() is None
    for duration in (50.0, 9.0, 2.0, 3.0, 4.0):  # the first two are not measured
        now += duration
        timer.end()
    assert timer.take() == StepDurations(3.0, 3, None)
    assert timer.take() is None
    timer.pause()
    now += 1000.0
    timer.end()  # the step after a save
    for duration in (5.0, 7.0):
        now += duration
        timer.end()
        assert timer.take() is None  # too few, which are kept: later reports have them
    now += 6.0
    timer.end()
    assert timer.take() == StepDurations(6.0, 3, None)
