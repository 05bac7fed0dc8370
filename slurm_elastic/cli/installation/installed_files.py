"""Writing and removing files of a site, with a record of what was written.

The record, `installed-files.json` in the data folder, holds the hash of each file. A file that
differs from it has another owner: it is neither replaced nor removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_elastic.cli.installation.site_files import SiteFile
from slurm_elastic.core.errors import SlurmElasticError

RECORD = "installed-files.json"
_FORMAT = 1


@dataclass(frozen=True)
class Change:
    """One file of a plan: what happens to it."""

    action: str  # "write", "link", "keep" or "remove"
    target: Path
    file: SiteFile | None = None


class InstallationError(SlurmElasticError):
    """A file that is in the way, or a record that cannot be used."""


class Site:
    """The files of one prefix.

    Args:
        data: the folder for data of slurm-elastic below the prefix.
        root: folder that stands for `/`; packages are built in one.
    """

    def __init__(self, data: Path, root: Path) -> None:
        self._root = root
        self._record = data / RECORD

    def plan(self, files: Iterable[SiteFile]) -> list[Change]:
        """Return the steps of an installation of these files.

        Raises:
            InstallationError: a file of another owner is where one has to be written.
        """
        wanted = list(files)
        present = self._read()
        changes = [self._change(file, present) for file in wanted]
        # Files of an earlier release that this one does not have.
        gone = present.keys() - {str(file.target) for file in wanted}
        return changes + [c for c in self._removals(present) if str(c.target) in gone]

    def plan_removal(self) -> list[Change]:
        """Return the steps of the removal of all recorded files.

        Raises:
            InstallationError: nothing is recorded.
        """
        present = self._read()
        if not present:
            raise InstallationError(
                f"{self._record}: no such record: nothing was installed with this --prefix"
            )
        return list(self._removals(present))

    def carry_out(self, changes: Iterable[Change]) -> None:
        """Make the changes, and record them.

        Raises:
            OSError: a file cannot be written or removed.
        """
        present = self._read()
        for change in changes:
            path = self._at(change.target)
            if change.action == "remove":
                path.unlink(missing_ok=True)
                self._remove_empty(path.parent)
                present.pop(str(change.target), None)
            elif change.file is not None and change.action != "keep":
                _put(path, change.file)
                if not change.file.is_configuration:
                    present[str(change.target)] = _digest_of(change.file)
            elif change.file is None:  # changed by the site: no longer ours
                present.pop(str(change.target), None)
            # After each file, so that nothing stays unrecorded if the next cannot be written.
            self._write(present)

    def _change(self, file: SiteFile, present: dict[str, str]) -> Change:
        path = self._at(file.target)
        exists = path.exists() or path.is_symlink()
        if exists and file.is_configuration:
            return Change("keep", file.target, file)
        recorded = present.get(str(file.target))
        if exists and _digest_at(path) not in (recorded, _digest_of(file)):
            state = "was changed since" if recorded else "is not of slurm-elastic"
            raise InstallationError(
                f"{file.target}: {state}: move it away, or use another --prefix"
            )
        return Change("link" if file.link else "write", file.target, file)

    def _removals(self, present: dict[str, str]) -> Iterator[Change]:
        for name, digest in sorted(present.items()):
            path = self._at(Path(name))
            is_ours = not (path.exists() or path.is_symlink()) or _digest_at(path) == digest
            yield Change("remove" if is_ours else "keep", Path(name))

    def _at(self, target: Path) -> Path:
        return self._root / target.relative_to("/")

    def _read(self) -> dict[str, str]:
        path = self._at(self._record)
        try:
            record = json.loads(path.read_text("utf-8"))
            if record["format"] != _FORMAT:
                raise InstallationError(
                    f"{self._record}: written by a newer release: use its selastic"
                )
            return {str(name): str(digest) for name, digest in record["files"].items()}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InstallationError(
                f"{self._record}: is damaged: remove it and the files of slurm-elastic by hand"
            ) from None

    def _write(self, present: dict[str, str]) -> None:
        path = self._at(self._record)
        if not present:
            path.unlink(missing_ok=True)
            self._remove_empty(path.parent)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": _FORMAT, "files": present}, indent=1, sort_keys=True)
        new = path.with_suffix(".new")
        new.write_text(text + "\n", "utf-8")
        new.replace(path)

    def _remove_empty(self, folder: Path) -> None:
        """Remove folders of slurm-elastic that are empty now; those of the system stay."""
        while "slurm-elastic" in folder.parts:
            with contextlib.suppress(OSError):
                folder.rmdir()
            folder = folder.parent


def describe(changes: Iterable[Change], say: Callable[[str], object]) -> None:
    """Return one line for each change."""
    for change in changes:
        if change.file is not None and change.file.link:
            say(f"{change.action:<6} {change.target} -> {change.file.link}")
        elif change.action == "keep":
            reason = "configuration" if change.file else "changed since it was installed"
            say(f"keep   {change.target} ({reason})")
        else:
            say(f"{change.action:<6} {change.target}")


def _put(path: Path, file: SiteFile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    if file.content is None:
        new.symlink_to(file.link)
    else:
        new.write_bytes(file.content)
        new.chmod(0o644)
    new.replace(path)


def _digest_of(file: SiteFile) -> str:
    return f"-> {file.link}" if file.content is None else _digest(file.content)


def _digest_at(path: Path) -> str:
    if path.is_symlink():
        return f"-> {path.readlink()}"
    return _digest(path.read_bytes()) if path.is_file() else "not a file"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
