"""Runs the commands of standard input, several at a time; inside the cluster, as some user.

In: one JSON list of {"argv": [hex …], "env": {hex: hex}, "stdin": hex}. Out: one JSON list of
[exit code, standard error as hex, standard output as hex]; -99 stands for a command that hung.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

HUNG = -99


def run(case: dict) -> list:
    environment = os.environb | {
        bytes.fromhex(name): bytes.fromhex(value) for name, value in case["env"].items()
    }
    command = [bytes.fromhex(word) for word in case["argv"]]
    try:
        done = subprocess.run(
            command,
            input=bytes.fromhex(case["stdin"]),
            env=environment,
            capture_output=True,
            cwd="/tmp",
            check=False,
            timeout=60,
        )
    except subprocess.TimeoutExpired:
        return [HUNG, "", ""]
    return [done.returncode, done.stderr[:20000].hex(), done.stdout[:2000].hex()]


with ThreadPoolExecutor(4) as pool:
    print(json.dumps(list(pool.map(run, json.load(sys.stdin)))))
