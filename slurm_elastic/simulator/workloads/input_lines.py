r"""Lines of a text file as users have it: plain or gzip, UTF-8 or UTF-16, with any line ends.

>>> import gzip, tempfile
>>> from pathlib import Path
>>> path = Path(tempfile.mkdtemp()) / "a.txt.gz"
>>> _ = path.write_bytes(gzip.compress("é\r\nb".encode("utf-16")))
>>> with opened(path) as lines:
...     list(lines)
['é', 'b']
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from slurm_elastic.core.errors import InvalidInputError

#: Takes the part of the file that has been read, from 0 to 1.
ReadProgress = Callable[[float], None]

_GZIP = b"\x1f\x8b"
#: First bytes of files that are not read, and the command that unpacks them.
_OTHER_ARCHIVES = (
    (b"\xfd7zXZ", "xz -d"),
    (b"BZh", "bunzip2"),
    (b"PK\x03\x04", "unzip"),
    (b"\x28\xb5\x2f\xfd", "zstd -d"),
)
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_LINES_PER_REPORT = 10_000


class InputFileError(InvalidInputError):
    """A file that cannot be read as text; the message names it and the reason."""


class InputLines(Iterator[str]):
    """Lines of an open file, without their ends."""

    def __init__(self, raw: BinaryIO, text: TextIO, progress: ReadProgress | None) -> None:
        status = os.fstat(raw.fileno())
        self._raw, self._text, self._progress = raw, text, progress
        self._size = status.st_size if stat.S_ISREG(status.st_mode) else 0
        self._count = 0

    def __next__(self) -> str:
        self._count += 1
        if self._progress is not None and self._size and self._count % _LINES_PER_REPORT == 0:
            self._progress(min(1.0, self._raw.tell() / self._size))
        return next(self._text).rstrip("\r\n")

    def rest(self) -> str:
        """Return all that has not been taken, at once."""
        return self._text.read()


@contextlib.contextmanager
def opened(path: Path, progress: ReadProgress | None = None) -> Iterator[InputLines]:
    """Open a file.

    Bytes that are no text are replaced.

    Args:
        path: the file; a pipe is read once.
        progress: called now and then while a regular file is read.

    Raises:
        InputFileError: it cannot be opened or read, also while its lines are taken.
    """
    try:
        with path.open("rb") as raw, _text(raw, path) as text:
            yield InputLines(raw, text, progress)
    except OSError as error:
        reason = error.strerror or f"is damaged ({error}); copy it again"
        raise InputFileError(f"{path}: {reason}") from None
    except (EOFError, zlib.error) as error:
        raise InputFileError(f"{path}: is damaged ({error}); copy it again") from None


def _text(raw: BinaryIO, path: Path) -> io.TextIOWrapper:
    first = cast(io.BufferedReader, raw).peek(8)
    content = cast(io.BufferedReader, raw)
    if first.startswith(_GZIP):
        content = io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=raw)))
    for magic, command in _OTHER_ARCHIVES:
        if first.startswith(magic):
            raise InputFileError(f"{path}: is compressed; unpack it first: {command}")
    encoding = "utf-16" if content.peek(2)[:2] in _UTF_16 else "utf-8-sig"
    # Lines end with a line feed only: names may hold other characters at which splitlines() splits.
    return io.TextIOWrapper(content, encoding=encoding, errors="replace", newline="\n")
