"""CPUs that ranks keep busy, and what they read from storage."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm_elastic.job.launchers.rank_use import RankUseMeter

TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def use(tmp_path):
    return Use(tmp_path)


class Use:
    """Two GPUs, and processes whose CPU seconds a test sets."""

    def __init__(self, proc):
        self.proc, self.now, self.seconds = proc, 0.0, {}
        self.measured = RankUseMeter(
            lambda: [7, 8, 9], lambda: 2, clock=lambda: self.now, proc=proc
        )

    def after(self, seconds, **used_s):
        self.now += seconds
        for pid, used in used_s.items():
            folder = self.proc / pid[1:]
            folder.mkdir(exist_ok=True)
            ticks = int(used * TICKS / 2)
            fields = ["S", *["0"] * 10, str(ticks), str(ticks), *["0"] * 20]
            (folder / "stat").write_text(f"{pid[1:]} (a) b) {' '.join(fields)}")
        return self.measured.measure().busy_cpus


def test_the_busy_cpus_of_all_processes_are_divided_by_the_gpus(use):
    assert use.after(0, p7=100, p8=50) is None
    assert use.after(10, p7=130, p8=60, p9=20) == pytest.approx((30 + 10 + 20) / 10 / 2)


def test_two_looks_close_together_are_none(use):
    use.after(0, p7=100)
    assert use.after(3, p7=103) is None
    assert use.after(7, p7=110) == pytest.approx(0.5)


def test_a_program_that_has_started_anew_begins_a_measurement(use):
    use.after(0, p7=100)
    (use.proc / "7" / "stat").unlink()
    assert use.after(10, p8=100) is None
    assert use.after(10, p8=120) == pytest.approx(1.0)


def test_a_busy_process_is_seen():
    now = iter((0.0, 10.0))
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        use = RankUseMeter(lambda: [process.pid], lambda: 1, clock=lambda: next(now))
        try:
            assert use.measure().busy_cpus is None
            deadline = time.monotonic() + 60
            stat = Path(f"/proc/{process.pid}/stat")
            while time.monotonic() < deadline:
                if int(stat.read_text().rpartition(")")[2].split()[11]) > 10:
                    break
                time.sleep(0.05)
            assert use.measure().busy_cpus > 0
        finally:
            process.kill()


def test_the_bytes_read_from_storage_are_divided_by_the_gpus(tmp_path):
    now = iter((0.0, 3.0, 10.0, 20.0))
    reads = RankUseMeter(lambda: [7, 8], lambda: 2, clock=lambda: next(now), proc=tmp_path)

    def read(pid, count):
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        text = f"rchar: 99999\nwchar: 1\nread_bytes: {count}\nwrite_bytes: 5\n"
        (tmp_path / str(pid) / "io").write_text(text)

    read(7, 1000)
    assert reads.measure().read_bytes_s is None
    assert reads.measure().read_bytes_s is None
    read(7, 3000)
    read(8, 4000)
    assert reads.measure().read_bytes_s == (2000 + 4000) / 10 / 2
    (tmp_path / "7" / "io").write_text("damaged")
    (tmp_path / "8" / "io").unlink()
    assert reads.measure().read_bytes_s is None


_READER = """
import os, sys
with open(sys.argv[1], "wb") as file:
    file.write(os.urandom(1 << 20))
    file.flush()
    os.fsync(file.fileno())
file = os.open(sys.argv[1], os.O_RDONLY)
print(flush=True)
sys.stdin.readline()
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
os.pread(file, 1 << 20, 0)
print(flush=True)
sys.stdin.readline()
"""


def test_what_a_process_reads_from_storage_is_seen(tmp_path):
    now = iter((0.0, 10.0))
    command = [sys.executable, "-c", _READER, str(tmp_path / "file")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        reads = RankUseMeter(lambda: [process.pid], lambda: 1, clock=lambda: next(now))
        process.stdout.readline()
        assert reads.measure().read_bytes_s is None
        print(file=process.stdin, flush=True)
        process.stdout.readline()
        seen = reads.measure().read_bytes_s
        print(file=process.stdin, flush=True)
    if not seen:
        pytest.skip("this file system counts no bytes that are read")
    assert 0.9 * 2**20 < seen * 10 < 2 * 2**20


class Counter:
    """Counts 1 GB a look for process 7."""

    looks = 0

    def counts(self, pids):
        self.looks += 1
        return {pid: self.looks * 1e9 for pid in pids if pid == 7}


def test_the_bytes_moved_in_memory_are_divided_by_the_gpus(tmp_path):
    now = iter((0.0, 10.0))
    use = RankUseMeter(
        lambda: [7, 8], lambda: 2, clock=lambda: next(now), proc=tmp_path, traffic=Counter()
    )
    assert use.measure().memory_bytes_s is None
    assert use.measure().memory_bytes_s == 1e9 / 10 / 2
