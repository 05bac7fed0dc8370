"""Bytes that processes move, by counters of the kernel.

These machines may have no counter of cache misses: page faults are counted in the same way.
"""

import subprocess
import sys
import threading

import pytest

from slurm_elastic.job.launchers.memory_traffic import MemoryTraffic

PAGE_FAULTS = (1, 2)
#: Touches 300 new pages in each of its steps: itself, in a thread and in a child process that it
#: began before, and in a new child.
_PROGRAM = """
import mmap, os, sys, threading
def touch():
    area = mmap.mmap(-1, 300 * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, len(area), mmap.PAGESIZE):
        area[at] = 1
step, done = threading.Event(), threading.Event()
def thread():
    step.wait()
    touch()
    done.set()
threading.Thread(target=thread).start()
here, there = os.pipe()
back, answer = os.pipe()
child = os.fork()
if not child:
    os.read(here, 1)
    touch()
    os.write(answer, b"1")
    os.read(here, 1)
    os._exit(0)
print(child, flush=True)
sys.stdin.readline()
touch()
step.set()
done.wait()
os.write(there, b"1")
os.read(back, 1)
new = os.fork()
if not new:
    touch()
    os.write(answer, b"1")
    os.read(here, 1)
    os._exit(0)
os.read(back, 1)
print(new, flush=True)
sys.stdin.readline()
os.write(there, b"11")
"""


@pytest.fixture
def counted():
    traffic = MemoryTraffic(event=PAGE_FAULTS, line_bytes=1000)
    if not traffic.counts([threading.get_native_id()]):
        pytest.skip("this kernel lets no process count its events")
    return traffic


def test_threads_and_processes_of_before_and_after_the_first_look_count_once(counted):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", _PROGRAM], **pipes) as process:
        child = int(process.stdout.readline())
        before = counted.counts([process.pid, child])
        assert before.keys() == {process.pid, child}
        print(file=process.stdin, flush=True)
        new = int(process.stdout.readline())
        after = counted.counts([process.pid, child, new])
        assert after.keys() == {process.pid, child}
        pages = {pid: (after[pid] - before[pid]) / 1000 for pid in after}
        print(file=process.stdin, flush=True)
    assert 900 <= pages[process.pid] < 1500
    assert 300 <= pages[child] < 550
    assert counted.counts([]) == {}


def test_where_nothing_is_counted_there_is_no_value():
    unknown = MemoryTraffic(event=(0, 2**60))
    assert unknown.counts([threading.get_native_id()]) == {}
    assert unknown.counts([threading.get_native_id()]) == {}


def test_a_program_with_more_threads_than_may_be_counted_has_no_value(counted):
    program = """
import sys, threading
end = threading.Event()
for _ in range(300):
    threading.Thread(target=end.wait).start()
print(flush=True)
sys.stdin.readline()
end.set()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:
        process.stdout.readline()
        assert counted.counts([process.pid]) == {}
        assert counted.counts([threading.get_native_id()]) == {}
        print(file=process.stdin, flush=True)
