"""Commands in the nodes of the container cluster, through processes that stay.

A `docker exec` costs some tenth of a second of a core. Tests run several commands a second, so
each node has a `command_server`, started by one `docker exec`, which runs them. Commands that run
at the same time have one server each.
"""

import atexit
import contextlib
import json
import queue
import subprocess
import threading
from pathlib import Path
from typing import Any

SERVER = (Path(__file__).parent / "command_server.py").read_text("utf-8")
#: Exit code of `docker exec` when its container is killed.
KILLED = 137


class _EndedError(Exception):
    """The server ended before it answered: its container is down, or was killed."""


class _Session:
    """One server in one node.

    Args:
        command: `docker exec` as root in the node, without a command.
    """

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            [*command, "python3", "-u", "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout
        with self._process.stdout as answers:  # closed when the server has ended
            for line in answers:
                self._answers.put(line)
        self._answers.put("")

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            _EndedError: there is none; its text is the output of Docker.
            queue.Empty: not in time.
        """
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._answers.get(timeout=timeout_s)
        if not line:
            assert self._process.stderr
            raise _EndedError(self._process.stderr.read())
        answer: dict[str, Any] = json.loads(line)
        return answer

    @property
    def running(self) -> bool:
        """Whether the server has not ended."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the server; a command that it runs goes on."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stderr):
            with contextlib.suppress(OSError):  # an unsent request
                pipe.close()  # type: ignore[union-attr]


class NodeSessions:
    """Servers in one node, as many as commands ran at once.

    Args:
        command: `docker exec` as root in the node, without a command.
    """

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._idle: list[_Session] = []
        self._lock = threading.Lock()
        atexit.register(self.close)

    def run(
        self, words: list[str], *, user: str, home: str, stdin: str, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end.

        A command whose container is killed meanwhile ends with the exit code of `docker exec`.

        Raises:
            subprocess.TimeoutExpired: it is not over after so many seconds; it goes on.
        """
        request = {"words": words, "user": user, "home": home, "stdin": stdin}
        session = self._session()
        try:
            answer = session.ask(request, timeout_s)
        except queue.Empty:
            session.close()
            raise subprocess.TimeoutExpired(words, timeout_s) from None
        except _EndedError as error:
            session.close()
            return subprocess.CompletedProcess(words, KILLED, "", str(error))
        except BaseException:  # the time limit of the test: the answer may still come
            session.close()
            raise
        with self._lock:
            self._idle.append(session)
        return subprocess.CompletedProcess(
            words, answer["code"], answer["stdout"], answer["stderr"]
        )

    def _session(self) -> _Session:
        """Return an idle server, or a new one; those whose container was killed are left out."""
        with self._lock:
            while self._idle:
                session = self._idle.pop()
                if session.running:
                    return session
                session.close()
        return _Session(self._command)

    def close(self) -> None:
        """End all servers."""
        with self._lock:
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()
