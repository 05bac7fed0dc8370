"""Log of the controller on a full disk."""

import os

from slurm_elastic.controller.log_stream import LogStream


def test_lines_that_cannot_be_written_are_counted_and_the_next_one_says_so(tmp_path):
    path = tmp_path / "log"
    log, full = os.open(path, os.O_CREAT | os.O_WRONLY), os.open("/dev/full", os.O_WRONLY)
    kept = os.dup(log)
    try:
        stream = LogStream(log)
        print("one", file=stream, flush=True)
        os.dup2(full, log)
        print("two", file=stream, flush=True)
        print("three", file=stream, flush=True)
        os.dup2(kept, log)
        print("four", file=stream, flush=True)
        print("five", file=stream, flush=True)
    finally:
        for descriptor in (log, full, kept):
            os.close(descriptor)
    missing = "warning: lines of this log are missing: 2 (No space left on device)"
    assert path.read_text().splitlines() == ["one", missing, "four", "five"]


def test_a_line_that_was_cut_short_is_ended_before_the_next_one(monkeypatch):
    written, room = [], [6, OSError(28, "No space left on device"), 99]

    def write(_, data):
        if isinstance(bytes_left := room.pop(0), OSError):
            raise bytes_left
        written.append(bytes(data[:bytes_left]))
        return len(written[-1])

    monkeypatch.setattr("slurm_elastic.controller.log_stream.os.write", write)
    stream = LogStream(2)
    print("a long line", file=stream, flush=True)
    print("next", file=stream, flush=True)
    assert b"".join(written).decode().splitlines()[0] == "a long"
    assert b"".join(written).endswith(b"missing: 1 (No space left on device)\nnext\n")
