"""Use of GPUs by NVML, against a library that answers like NVML."""

import subprocess
import time

import pytest

from slurm_elastic.job.launchers.gpu_use import GpuUse, GpuUseMeter
from tests.support.needs import needs
from tests.support.patience import PATIENCE_S

pytestmark = needs("gcc")

#: Two GPUs, of which the second one has failed; the first one fails after LAST calls.
SOURCE = """
#include <string.h>
static int gpus[2], calls;
int nvmlInit_v2(void) { return DRIVER; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **gpu)
{ if (i > 1) return 2; *gpu = &gpus[i]; return 0; }
int nvmlDeviceGetHandleByUUID(const char *name, void **gpu)
{ if (strcmp(name, "GPU-7a")) return 6; *gpu = &gpus[0]; return 0; }
int nvmlDeviceGetUtilizationRates(void *gpu, unsigned rates[2])
{
    if (gpu == &gpus[1] || ++calls > LAST) return 15;
    rates[0] = calls % 2 ? 100 : 50;
    rates[1] = 20;
    return 0;
}
"""


@pytest.fixture
def library(tmp_path):
    def build(*, driver=0, last=1_000_000):
        source, path = tmp_path / "nvml.c", tmp_path / "libnvidia-ml.so.1"
        source.write_text(SOURCE)
        options = [f"-DDRIVER={driver}", f"-DLAST={last}"]
        subprocess.run(["gcc", "-shared", "-fPIC", *options, "-o", path, source], check=True)
        return str(path)

    return build


def measured(meter):
    """Return the first use that is not nothing."""
    until = time.monotonic() + PATIENCE_S
    while (use := meter.measure()) == GpuUse() and time.monotonic() < until:
        time.sleep(0.05)
    return use


def after_its_end(meter):
    """Return the use once the meter looks no more."""
    first = meter.measure()
    if meter._thread.ident is not None:
        meter._thread.join(PATIENCE_S)
        assert not meter._thread.is_alive()
    return first, meter.measure()


@pytest.mark.parametrize("visible", ["0", "GPU-7a", "0,1", "0,GPU-unknown", "1,0,99"])
def test_the_mean_of_the_gpus_that_answer(library, visible):
    meter = GpuUseMeter(visible, library=library(), every_s=0.01)
    use = measured(meter)
    meter.stop()
    assert 0.5 <= use.gpu_busy <= 1.0
    assert use.gpu_memory_busy == pytest.approx(0.2)


def test_each_call_begins_anew(library):
    meter = GpuUseMeter("0", library=library(), every_s=60.0)
    assert measured(meter).gpu_busy == 1.0
    assert meter.measure() == GpuUse()
    meter.stop()


@pytest.mark.parametrize("visible", ["", "MIG-1234", "NoDevFiles", "1", "7", "-1", "\u0664"])
def test_no_gpu_that_answers(library, visible):
    meter = GpuUseMeter(visible, library=library(), every_s=0.01)
    assert after_its_end(meter) == (GpuUse(), GpuUse())


def test_a_machine_without_a_driver(library, tmp_path):
    for path in (str(tmp_path / "nothing.so"), library(driver=9), "libc.so.6"):
        assert after_its_end(GpuUseMeter("0", library=path)) == (GpuUse(), GpuUse())


def test_a_gpu_that_fails_is_asked_no_more(library):
    uses = after_its_end(GpuUseMeter("0", library=library(last=3), every_s=0.01))
    assert max(use.gpu_memory_busy or 0.0 for use in uses) == pytest.approx(0.2)
