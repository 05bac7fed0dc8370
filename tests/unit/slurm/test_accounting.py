"""Rows of sacct, as each release prints them."""

import textwrap

import pytest

from slurm_elastic.slurm import accounting
from slurm_elastic.slurm.accounting import AccountingError

ADMIN = '{"at":90,"elastic":"1-4","shape":{},"v":1}'
TRES = "cpu=4,gres/gpu:a100=2,gres/gpu=2"
SCRIPT = """\
    #!/bin/sh
    if [ "$1" = --version ]; then echo "slurm {release}"; exit; fi
    [ "$SLURM_TIME_FORMAT" = %s ] || exit 9
    for format; do :; done
    case "{release} $format" in
    23.11.*Restarts*) echo 'sacct: error: Invalid field requested: "Restarts"' >&2; exit 1;;
    *Restarts*) echo '7|7|alice|1|100|110|10|{tres}|{admin}';;
    *) echo '7|7|alice|100|110|10|{tres}|{admin}';;
    esac
    """


@pytest.fixture
def sacct(tmp_path, monkeypatch):
    """Put a sacct that runs a script on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def write(script):
        path = tmp_path / "sacct"
        path.write_text(textwrap.dedent(script))
        path.chmod(0o755)

    return write


@pytest.mark.parametrize(("release", "run"), [("23.11.11", None), ("24.11.5", 1), ("26.05.3", 1)])
def test_a_release_is_asked_for_the_columns_that_it_has(sacct, release, run):
    sacct(SCRIPT.format(release=release, tres=TRES, admin=ADMIN))
    (row,) = accounting.runs(0.0)
    assert (row.run, row.job_id, row.user, row.start, row.end) == (run, 7, "alice", 100, 110)
    assert (row.seconds, row.gpus, row.gpu_type, row.submitted) == (10, 2, "a100", 90)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            '#!/bin/sh\n[ "$1" = --version ] && echo slurm 25.11.7 || { echo away >&2; exit 1; }',
            "sacct: away",
        ),
        ('#!/bin/sh\n[ "$1" = --version ] && echo slurm 25.11.7 || exit 3', "sacct: exit code 3"),
        ("#!/bin/sh\necho slurm 22.05.8", "Slurm 22.05.8 is too old"),
    ],
)
def test_a_failure_is_one_line(sacct, script, message):
    sacct(script)
    with pytest.raises(AccountingError, match=message) as caught:
        accounting.runs(0.0)
    assert "\n" not in str(caught.value)


def test_without_sacct(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AccountingError, match="sacct is not on PATH"):
        accounting.runs(0.0)
