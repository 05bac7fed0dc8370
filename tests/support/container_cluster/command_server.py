"""Runs commands in a node of the container cluster, one after the other, for `node_sessions`.

Started inside the node as root. Each line of standard input is a request, each line of standard
output its answer, both JSON:

    {"words": ["squeue"], "user": "alice", "home": "/shared/home/alice", "stdin": ""}
    {"code": 0, "stdout": "...", "stderr": ""}
"""

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

#: Exit codes of `docker exec`: the command cannot be run; there is no such command.
CANNOT_RUN, NOT_FOUND = 126, 127


def first_environment() -> dict[str, str]:
    """Return the environment in which the process was started: Python itself adds LC_CTYPE."""
    text = Path("/proc/self/environ").read_text("utf-8", "surrogateescape")
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run a command to its end, as `docker exec` would; return its exit code and output."""
    user, home = request["user"], request["home"]
    environment = first_environment() | {"HOME": home, "USER": user, "LOGNAME": user}
    try:
        entry = pwd.getpwnam(user)
        done = subprocess.run(
            request["words"],
            input=request["stdin"].encode("utf-8", "surrogateescape"),
            capture_output=True,
            cwd=home,
            env=environment,
            user=entry.pw_uid,
            group=entry.pw_gid,
            extra_groups=os.getgrouplist(user, entry.pw_gid),
            start_new_session=True,
            check=False,
        )
    except (OSError, KeyError, ValueError) as error:
        code = NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_RUN
        return {"code": code, "stdout": "", "stderr": str(error)}
    # A shell's number for a signal.
    code = 128 - done.returncode if done.returncode < 0 else done.returncode
    return {
        "code": code,
        "stdout": done.stdout.decode("utf-8", "surrogateescape"),
        "stderr": done.stderr.decode("utf-8", "surrogateescape"),
    }


def serve() -> None:
    """Answer requests until standard input ends."""
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve()
