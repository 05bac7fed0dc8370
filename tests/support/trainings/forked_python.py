"""A command in place of `python`, whose processes are forked from one that has imported torch.

`python -m torch.distributed.run` and each of its ranks import torch for more than a second of CPU.
Where the start and the end of Python are not what is tested, a fork runs the same code.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.trainings.training_runs import PROCESSES

#: Sends what it is to run, and ends with the exit code that it gets.
CLIENT = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server, server.makefile() as answers:
    server.connect({address!r})
    request = {{"words": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}}
    socket.send_fds(server, [json.dumps(request).encode() + b"\\n"], [1, 2])
    code = answers.readline()
sys.exit(int(code) if code else "the process ended without an exit code")
"""


@contextmanager
def forked_python(folder: Path, *preload: str) -> Iterator[Path]:
    """Yield the path of the command, which is in a folder.

    It has the options -m and -u. Started by what it runs, `sys.executable` is the same command.

    Args:
        folder: without other files of these names; its path is short, as those of sockets are.
        preload: modules that it has imported, besides those of `PROCESSES`.
    """
    command, address = folder / "python3", folder / "forks"
    command.write_text(CLIENT.format(python=sys.executable, address=str(address)))
    command.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(64)
        server = PROCESSES.Process(target=_serve, args=(listener, command, preload))
        server.start()
    try:
        yield command
    finally:
        server.terminate()
        server.join()


def _serve(listener: socket.socket, command: Path, preload: tuple[str, ...]) -> None:
    """Fork a process for each request."""
    for name in preload:
        __import__(name)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _answer(connection, command)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _answer(connection: socket.socket, command: Path) -> None:
    """Run what one request names, in this process, and end it."""
    text, files = b"", []
    while not text.endswith(b"\n"):
        part, more, *_ = socket.recv_fds(connection, 1 << 16, 2)
        text, files = text + part, files + more
    for number, file in zip((1, 2), files, strict=True):
        os.dup2(file, number)
    request = json.loads(text)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.executable = str(command)
    code = 1
    try:
        _run(request["words"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does at the end of a script
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        connection.sendall(b"%d\n" % code)
        os._exit(code)


def _run(words: list[str]) -> None:
    """Run a script, or after -m a module, as the main module of this process."""
    words = words[words[0] == "-u" :]
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
