"""Wake-ups by other threads, and by signals that interrupt the waiting thread."""

import subprocess
import sys
import threading
import time

import pytest

from slurm_elastic.controller.wake_up import WakeUp
from tests.support.patience import PATIENCE_S

#: As selasticd does, with a signal at any moment of a wait; a thread of the same process sends it.
INTERRUPTED = """
import os, signal, threading, time
from slurm_elastic.controller.wake_up import WakeUp

wake_up, count = WakeUp(), 0

def handle(*_):
    global count
    count += 1
    wake_up.set()

def send():
    while True:
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(1e-4)

signal.signal(signal.SIGHUP, handle)
threading.Thread(target=send, daemon=True).start()
while count < 200:
    for _ in range(20):
        wake_up.set()
        wake_up.wait(0.0)
"""


def test_signals_at_any_moment_of_a_wait_do_not_block_the_thread() -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    assert subprocess.run(command, timeout=PATIENCE_S, check=False).returncode == 0


def test_wake_ups_before_a_wait_end_one_wait_at_once() -> None:
    wake_up = WakeUp()
    wake_up.set()
    wake_up.set()
    begun = time.monotonic()
    wake_up.wait(PATIENCE_S)
    assert time.monotonic() - begun < PATIENCE_S
    begun = time.monotonic()
    wake_up.wait(0.05)
    assert time.monotonic() - begun >= 0.05


@pytest.mark.timeout(4 * PATIENCE_S)
def test_another_thread_ends_a_wait() -> None:
    wake_up = WakeUp()
    threading.Timer(0.05, wake_up.set).start()
    begun = time.monotonic()
    wake_up.wait(3 * PATIENCE_S)
    assert time.monotonic() - begun < 3 * PATIENCE_S
