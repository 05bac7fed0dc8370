"""Standard input that each start of a program reads from its beginning."""

import os

import pytest

from slurm_elastic.job.environment.standard_input import StandardInput
from slurm_elastic.job.esrun_options import parse
from slurm_elastic.job.launch import RankLaunch, SrunProcess


def started(stdin, output):
    """Start a program that copies its standard input to a file; return what it has written."""
    child = SrunProcess(["sh", "-c", 'cat > "$0"', str(output)], dict(os.environ), "", stdin)
    assert child.ends_within(10)
    os.waitpid(child.pid, 0)
    os.close(child.errors)
    return output.read_text()


def pipe(text):
    read_end, write_end = os.pipe()
    os.write(write_end, text)
    return read_end, write_end


def test_each_start_reads_all_of_a_here_document(tmp_path):
    read_end, write_end = pipe(b"import train\n")
    os.close(write_end)  # bash writes all of it, and closes the pipe
    stdin = StandardInput(read_end)
    assert stdin.is_repeatable
    assert stdin.start() == b"import train\n"
    for name in ("first", "second"):
        assert started(stdin, tmp_path / name) == "import train\n"


def test_each_start_reads_the_rest_of_a_file_and_moves_nobody_elses_position(tmp_path):
    source = tmp_path / "list"
    source.write_text("first\nsecond\n")
    with source.open() as file:
        os.lseek(file.fileno(), 6, os.SEEK_SET)  # a loop of the batch script reads the list, too
        stdin = StandardInput(file.fileno())
        for name in ("a", "b"):
            assert started(stdin, tmp_path / name) == "second\n"
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 6


def test_a_pipe_that_is_still_open_cannot_be_repeated():
    read_end, write_end = pipe(b"some")
    try:
        stdin = StandardInput(read_end)
        assert not stdin.is_repeatable
        assert stdin.open() is None
        assert os.read(read_end, 9) == b"some", "nothing was taken from the program"
    finally:
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize("closed", [False, True])
def test_without_any_the_program_inherits_that_of_esrun(closed):
    descriptor = os.open("/dev/null", os.O_RDONLY)
    if closed:
        os.close(descriptor)
    stdin = StandardInput(descriptor)
    assert stdin.is_repeatable
    assert stdin.open() is None
    assert stdin.start() == b""
    if not closed:
        os.close(descriptor)


def test_each_start_of_a_step_gets_it(tmp_path, monkeypatch):
    srun = tmp_path / "srun"
    srun.write_text(f'#!/bin/sh\ncat > "{tmp_path}/$SLURM_ELASTIC_STEP"\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "g01", "SLURM_GPUS_ON_NODE": "1"}
    env = {**job, "SLURM_SUBMIT_DIR": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    read_end, write_end = pipe(b"import train\n")
    os.close(write_end)
    step = RankLaunch(parse(["python", "-"]), env)
    step.stdin = StandardInput(read_end)
    step.tasks = (1,)
    for _ in range(2):
        child = step.start()
        assert child.ends_within(10)
        os.waitpid(child.pid, 0)
        os.close(child.errors)
        assert (tmp_path / step.mark).read_text() == "import train\n"
    step.listener.close()
