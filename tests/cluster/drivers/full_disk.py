"""Keeps a checkpoint, and puts it back, on a disk that another program fills; prints JSON.

    full_disk.py DIRECTORY  on a small file system

Fields: `problem` of the copy during which the disk fills; `left`, files after it, without the
filler; `kept_again`, once there is room; `free`, octets before the checkpoint is put back;
`restored`, whether the checkpoint is then as it was; `aside`, files that it has replaced.
"""

import json
import os
import sys
from pathlib import Path

from slurm_elastic.job.unmodified import kept_checkpoint

SIZE = 12_000_000
FILES = {"model.pt": b"m", "optimizer.pt": b"o"}


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError as error:
            print(error, file=sys.stderr)


def main() -> None:
    """Keep, fail, keep again, put back."""
    small = Path(sys.argv[1])
    saved, state, filler = small / "ckpt", small / "state", small / "filler"
    saved.mkdir(parents=True)
    for name, octet in FILES.items():
        (saved / name).write_bytes(octet * SIZE)
    originals = [str(saved / name) for name in FILES]
    kept_checkpoint.LEAST_FREE_BYTES = 0

    def fill_meanwhile() -> bool:
        if not filler.exists():
            fill(filler)
        return False

    def keep(**options: object) -> kept_checkpoint.KeptCheckpoint:
        return kept_checkpoint.keep(
            originals,
            run_id="job-7",
            directories=[str(state)],
            **options,
        )

    found: dict[str, object] = {"problem": ""}
    try:
        keep(stopped=fill_meanwhile)
    except kept_checkpoint.KeepError as error:
        found["problem"] = error.problem
    filler.unlink()
    found["left"] = sorted(p.name for p in small.rglob("*") if p.is_file())
    kept = keep()
    found["kept_again"] = kept.size
    (saved / "model.pt").write_bytes(b"n" * SIZE)
    fill(filler)
    room = os.statvfs(small)
    found["free"] = room.f_bavail * room.f_frsize
    aside = kept_checkpoint.put_back(kept)
    found["restored"] = all((saved / n).read_bytes() == o * SIZE for n, o in FILES.items())
    found["aside"] = [Path(path).read_bytes() == b"n" * SIZE for _, path in aside]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
