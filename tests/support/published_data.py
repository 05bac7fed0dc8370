"""Folder of the published data that tests and benchmarks read (docs/data.md).

It holds a folder for each set of contrib/published-data.toml: `sia/`, `dally/`, `pipedream/`,
`helios/`, `ones/`, `colocation/` and `rubick/`. Named by `--data DIR` (an option of pytest
and of the benchmarks), else by SELASTIC_DATA; without either each set is looked for in
`../shared/data` beside the checkout, then in `data` in it, where contrib/fetch-data puts it.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "SELASTIC_DATA"
_CHECKOUT = Path(__file__).resolve().parents[2]
_TABLE = _CHECKOUT / "contrib" / "published-data.toml"
_FETCHED = _CHECKOUT / "data"
_BESIDE = _CHECKOUT.parent / "shared" / "data"


class MissingDataError(Exception):
    """Published data that are not here; the text is one line with their source."""


def locate(name: str, *paths: str, data: Path | None = None) -> Path:
    """Return the folder of one set.

    Args:
        name: of the set, as in contrib/published-data.toml.
        paths: files or folders of the set that are needed; none: all that is published.
        data: value of the option --data.

    Raises:
        MissingDataError: one of them is not there.
    """
    folder = _folder(name, data)
    entry = tomllib.loads(_TABLE.read_text(encoding="utf-8"))[name]
    for path in paths or entry["files"]:
        for file in _files(path, entry["files"]):
            if not (folder / file).exists():
                source = _source(file, entry, folder)
                raise MissingDataError(f"{_shown(folder / file)} is missing: {source}")
    return folder


def _folder(name: str, data: Path | None) -> Path:
    if data is None and os.environ.get(VARIABLE):
        data = Path(os.environ[VARIABLE])
    if data is None:
        data = _BESIDE if (_BESIDE / name).is_dir() else _FETCHED
    return data / name


def _files(path: str, published: dict[str, dict[str, str]]) -> Iterator[str]:
    """The published files at or below a path; the path itself if none is published."""
    below = [file for file in published if file == path or file.startswith(f"{path}/")]
    yield from below or [path]


def _source(file: str, entry: dict[str, dict[str, str]], folder: Path) -> str:
    if file not in entry["files"]:
        made = next(m for p, m in entry["unpublished"].items() if f"{file}/".startswith(f"{p}/"))
        return f"it is not published ({made}; docs/data.md)"
    into = "" if folder.parent == _FETCHED else f" --into {_shown(folder.parent)}"
    return (
        f"{entry['title']}, https://github.com/{entry['repository']};"
        f" fetch: contrib/fetch-data --only {folder.name}{into}"
    )


def _shown(path: Path) -> str:
    return min(str(path), os.path.relpath(path), key=len)


def digests(folder: Path, *files: str) -> tuple[str, ...]:
    """Return the first 12 digits of the SHA-256 of each file's contents, gzip undone.

    Figures of other implementations belong to certain contents, and `--data` may name others.
    """
    found = []
    for file in files:
        contents = (folder / file).read_bytes()
        if file.endswith(".gz"):
            contents = gzip.decompress(contents)
        found.append(hashlib.sha256(contents).hexdigest()[:12])
    return tuple(found)


@contextlib.contextmanager
def malformed_exits(parser: argparse.ArgumentParser, folder: Path) -> Iterator[None]:
    """End a benchmark with one line where a file of a set cannot be read as the published one."""
    try:
        yield
    except (OSError, UnicodeDecodeError, KeyError, ValueError, IndexError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        parser.exit(
            2,
            f"{parser.prog}: {_shown(folder)} is invalid: {reason}; expected files as in"
            " docs/data.md\n",
        )


def require(name: str, *paths: str) -> Path:
    """Return the folder of one set, or skip the test or module: see `locate`."""
    import pytest  # noqa: PLC0415 - benchmarks run without it

    try:
        return locate(name, *paths)
    except MissingDataError as error:
        pytest.skip(str(error), allow_module_level=True)


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add `--data DIR` to a benchmark."""
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help=f"folder of the published data; default: {VARIABLE}, ../shared/data or data",
    )


def locate_or_exit(
    parser: argparse.ArgumentParser, options: argparse.Namespace, name: str, *paths: str
) -> Path:
    """Return the folder of one set, or end the benchmark with one line: see `locate`."""
    try:
        return locate(name, *paths, data=options.data)
    except MissingDataError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def locate_optional(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    name: str,
    *paths: str,
    without: str,
) -> Path | None:
    """Return the folder of one set; None after one line on what the benchmark does without."""
    try:
        return locate(name, *paths, data=options.data)
    except MissingDataError as error:
        print(f"{parser.prog}: {error}; {without}", file=sys.stderr)
        return None
