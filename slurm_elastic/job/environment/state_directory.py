"""Directories in which a job keeps its state over its restarts.

`.slurm-elastic` below the directory of submission or, where that cannot be written (another user's
directory, a read-only file system), below the home directory. Files are looked for in both: an
attempt on another node may have been able to write to the other one only.

State decides which files are put back and deleted, so only directories and files of the user
count, and links do not.

Part of each start: imports only modules that Python has loaded already.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping, Sequence

#: Name of each of these directories.
STATE_NAME = ".slurm-elastic"
#: Key of the number that rises with each version of a file of JSON; the first in the file.
REVISION = "revision"

_MAX_BYTES = 64 * 1024 * 1024
_MAX_DIGITS = 18


def state_directories(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the directories for the state of a job, the preferred one first.

    Args:
        env: of the batch script.
    """
    parents = [os.path.abspath(env.get("SLURM_SUBMIT_DIR") or "."), _home(env)]  # noqa: PTH100
    named = [f"{parent.rstrip('/')}/{STATE_NAME}" for parent in parents if parent]
    return tuple(dict.fromkeys(named))


def _home(env: Mapping[str, str]) -> str:
    """Return the home directory; "" without one."""
    home = env.get("HOME", "")
    if not home.startswith("/"):
        import pwd  # noqa: PLC0415 - rarely needed

        try:
            home = pwd.getpwuid(os.geteuid()).pw_dir
        except KeyError:
            home = ""
    return home if home.startswith("/") else ""


def claim(directory: str) -> None:
    """Create a directory for state, readable for its user only; or check one that exists.

    Raises:
        OSError: it cannot be used; `strerror` says why.
    """
    try:
        os.mkdir(directory, 0o700)  # noqa: PTH102 - pathlib is slow to load
    except FileExistsError:
        status = os.lstat(directory)
        if not stat.S_ISDIR(status.st_mode):
            text = "it is a link or a file, not a directory"
            raise NotADirectoryError(errno.ENOTDIR, text, directory) from None
        if not is_own(status):
            raise PermissionError(errno.EPERM, "it belongs to another user", directory) from None
        if status.st_mode & 0o022 and status.st_uid == os.geteuid():
            os.chmod(directory, stat.S_IMODE(status.st_mode) & ~0o022)  # noqa: PTH101
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "it cannot be written", directory)


def writable(directories: Sequence[str]) -> str | None:
    """Return the first of these directories that can be written, created; None if none can."""
    for directory in directories:
        try:
            claim(directory)
        except OSError:
            continue
        return directory
    return None


def forget_older(directories: Sequence[str], run_id: str, start: float) -> None:
    """Delete the state of an earlier job of the same number, at the first start of a job.

    Slurm counts jobs from 1 again when it has lost its state or is installed anew.

    Args:
        directories: those of `state_directories`.
        run_id: of the job.
        start: epoch seconds at which the job started; its own files are newer.
    """
    for directory in directories:
        try:
            if not is_own(os.lstat(directory)):
                continue
            for name in os.listdir(directory):  # noqa: PTH208
                path = f"{directory}/{name}"
                if name.startswith(f"{run_id}.") and os.lstat(path).st_mtime < start:
                    os.unlink(path)  # noqa: PTH108
        except OSError:  # it does not exist, or cannot be written: nothing of it is used then
            continue


def read_own(path: str) -> str | None:
    """Return the text of a file in a state directory; None if there is none of the user."""
    try:
        folder = os.lstat(os.path.dirname(path))  # noqa: PTH120
        if not stat.S_ISDIR(folder.st_mode) or not is_own(folder):
            return None
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not is_own(status):
            return None
        data = b""
        while len(data) <= _MAX_BYTES and (part := os.read(descriptor, 1 << 20)):
            data += part
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return data.decode("utf-8", "replace")


def write_own(path: str, text: str, *, durable: bool = False) -> None:
    """Write a file in a state directory in one step: readers see the old or the new text.

    Args:
        path: of the file; its directory is created.
        text: of the file.
        durable: wait until it is on disk.

    Raises:
        OSError: it is not written.
    """
    temporary = f"{path}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = _create(temporary, flags)
    except FileNotFoundError:  # another job has just removed the empty directory
        descriptor = _create(temporary, flags)
    try:
        data = memoryview(text.encode("utf-8", "surrogateescape"))
        while data:
            data = data[os.write(descriptor, data) :]
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)  # noqa: PTH105


def _create(path: str, flags: int) -> int:
    claim(os.path.dirname(path))  # noqa: PTH120
    if os.path.lexists(path):
        os.unlink(path)  # noqa: PTH108
    return os.open(path, flags, 0o600)


def versions(directories: Sequence[str], name: str) -> list[tuple[str, str]]:
    """Return directory and text of each file of this name, the newest version first."""
    rows = [(directory, read_own(f"{directory}/{name}")) for directory in directories]
    existing = [(directory, text) for directory, text in rows if text is not None]
    return sorted(existing, key=lambda row: revision(row[1]), reverse=True)


def revision(text: str) -> int:
    """Return the number of a version; 0 if the text has none."""
    start = f'{{"{REVISION}": '
    return (number_after(text, start) or 0) if text.startswith(start) else 0


def number_after(text: str, key: str) -> int | None:
    """Return the whole number that follows the first `key` in a text; None if there is none.

    `json.dumps` has written the text; importing json would delay each start by some milliseconds.

    >>> number_after('{"count": 3, "jump": ""}', '"count":')
    3
    """
    digits = text.partition(key)[2].lstrip()[: _MAX_DIGITS + 1]
    end = next((at for at, char in enumerate(digits) if char not in "0123456789"), len(digits))
    return int(digits[:end]) if 0 < end <= _MAX_DIGITS else None


def is_own(status: os.stat_result) -> bool:
    """Return whether a file or directory belongs to the user, or to root."""
    return status.st_uid in (os.geteuid(), 0)
