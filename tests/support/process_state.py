"""State of processes that a test has not started itself."""

from pathlib import Path


def is_alive(pid: int) -> bool:
    """Return whether a process runs: in a container without init what has ended stays a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
