"""Profiles from tables, and errors of invalid tables."""

import pytest

from slurm_elastic.simulator.truth import restart_costs
from slurm_elastic.simulator.truth.restart_costs import RestartCostError
from slurm_elastic.simulator.workloads import application_profiles
from slurm_elastic.simulator.workloads.application_profiles import ApplicationProfileError

PLACEMENTS = "placement,local_bsz,step_time,sync_time\n1,8,0.1,0\n1,16,0.2,0\n21,8,0.15,0.05\n"
RUN = "progress,grad_sqr,grad_var\n100,1,10\n200,1,20\n"
SCALABILITY = "num_nodes,num_replicas,local_bsz,step_time,sync_time\n2,4,8,0.2,0.1\n"


@pytest.fixture
def folder(tmp_path):
    at = tmp_path / "net"
    at.mkdir()
    (at / "placements-t4.csv").write_text(PLACEMENTS)
    (at / "scalability-t4.csv").write_text(SCALABILITY)
    (at / "validation-8.csv").write_text(RUN)
    (at / "validation-16.csv").write_text(RUN)
    return at


def read(folder, types=("t4", "a100")):
    return application_profiles.read(folder.parent, ("net",), types)["net"]


def test_what_is_read(folder):
    profile = read(folder)
    assert profile.batches == (8, 16)
    assert profile.epochs == 2
    assert profile.progress == ((100.0, 200.0),) * 2
    table = profile.types["t4"]
    assert set(profile.types) == {"t4"}
    assert set(table.curves) == {(1,), (1, 2)}
    assert table.curves[1,].step_s == (0.1, 0.2)
    assert (table.least, table.most, table.unit) == (8, 16, 1)
    assert table.scalability == ((2.0, 4.0, 8.0, 0.2, 0.1),)
    assert (profile.calibration, profile.restart_s) == (1.0, 30.0)


def test_the_artifacts_constants_are_known(folder):
    named = folder.rename(folder.parent / "imagenet")
    profile = application_profiles.read(named.parent, ("imagenet",), ("t4",))["imagenet"]
    assert (profile.calibration, profile.restart_s) == (1 / 1.2, 250.0)


def test_a_folder_states_constants_of_its_application(folder):
    (folder / "application.toml").write_text(
        "calibration = 0.5\nrestart_s = 12\nmicro_batches = 4\n[units]\nt4 = 1\n"
    )
    profile = read(folder)
    assert (profile.calibration, profile.restart_s, profile.micro_batches) == (0.5, 12.0, 4)
    for text, message in (
        ("speed = 1\n", "net/application.toml: speed is unknown; known: calibration"),
        ("restart_s = -1\n", "restart_s must be a number of at least 0"),
        ("restart_s = nan\n", "restart_s must be a number"),
        ("[units]\nt4 = 0\n", r"\[units\] must hold whole numbers from 1 on"),
        ("x", "net/application.toml: "),
    ):
        (folder / "application.toml").write_text(text)
        with pytest.raises(ApplicationProfileError, match=message):
            read(folder)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("placements-t4.csv", "0.15", "", r"net/placements-t4.csv:4: step_time is empty; measure"),
        ("placements-t4.csv", "0.15", "nan", r"placements-t4.csv:4: step_time nan is invalid"),
        ("placements-t4.csv", "0.15", "-1", r"placements-t4.csv:4: step_time -1 is invalid"),
        ("placements-t4.csv", "0.15", "0", r"placements-t4.csv:4: step_time must be more than 0"),
        ("placements-t4.csv", "0.05", "0.5", r"placements-t4.csv:4: sync_time 0.5 s is not less"),
        ("placements-t4.csv", "21,8", "2x,8", r"placements-t4.csv:4: placement '2x' is invalid"),
        ("placements-t4.csv", "21,8", "21,8.5", r"placements-t4.csv:4: local_bsz 8.5 is not a w"),
        ("placements-t4.csv", "1,16", "1,8", r"placements-t4.csv:3: duplicate placement 1 at"),
        ("placements-t4.csv", "1,8,0.1,0\n1,16,0.2,0\n", "", r"no row for placement 1; measure"),
        ("placements-t4.csv", "sync_time", "sync", r"placements-t4.csv:1: column sync_time is mi"),
        ("placements-t4.csv", ",0.05", "", r"placements-t4.csv:4: 3 cells under 4 columns"),
        ("scalability-t4.csv", "0.2", "inf", r"net/scalability-t4.csv:2: step_time inf is invalid"),
        ("scalability-t4.csv", "2,4", "0,4", r"scalability-t4.csv:2: num_nodes 0 is invalid"),
        ("validation-8.csv", "200,", "50,", r"net/validation-8.csv:3: progress falls from 100"),
        ("validation-8.csv", "1,20", "0,0", r"validation-8.csv:3: grad_sqr and grad_var are bo"),
        ("validation-8.csv", "200,1,20\n", "", r"validation-16.csv:3: 2 epochs, but validation-8"),
        ("validation-8.csv", "100,1,10\n200,1,20\n", "0,1,1\n", r"validation-8.csv: makes no pro"),
    ],
)
def test_bad_tables_name_their_line(folder, name, old, new, message):
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))
    with pytest.raises(ApplicationProfileError, match=message) as error:
        read(folder)
    assert "\n" not in str(error.value)


def test_absent_folders_types_and_runs(folder):
    with pytest.raises(ApplicationProfileError, match="application gpt has no profile; known: net"):
        application_profiles.read(folder.parent, ("gpt",), ("t4",))
    with pytest.raises(
        ApplicationProfileError, match="no table for any of the cluster's types a100; there"
    ):
        read(folder, types=("a100",))
    (folder / "validation-x.csv").write_text(RUN)
    with pytest.raises(ApplicationProfileError, match=r"its name must be validation-BATCH\.csv"):
        read(folder)
    for path in folder.glob("validation-*.csv"):
        path.unlink()
    with pytest.raises(ApplicationProfileError, match=r"no validation-BATCH\.csv"):
        read(folder)
    with pytest.raises(
        ApplicationProfileError, match="nowhere: No such file or directory; name a folder"
    ):
        application_profiles.applications(folder / "nowhere")
    with pytest.raises(
        ApplicationProfileError, match="no application; it needs a folder per application"
    ):
        application_profiles.applications(folder)


# --- what restarts cost ---------------------------------------------------------------------


def test_measured_restarts_by_application(tmp_path):
    path = tmp_path / "live.csv"
    path.write_text("application,checkpoint_s,slurm_s,start_s\nnet,1,3,6\nnet,2,3,7\n,0,2,2\n")
    costs = restart_costs.read(path)
    assert costs.of("net", 99.0) == 11.0
    assert costs.of("other", 99.0) == pytest.approx(26 / 3)
    assert restart_costs.RestartCosts().of("net", 99.0) == 99.0


def test_measured_restarts_as_json(tmp_path):
    path = tmp_path / "live.json"
    path.write_text('{"transitions": [{"checkpoint_s": 1, "slurm_s": 2.5, "start_s": 4}]}')
    assert restart_costs.read(path).of("net", 99.0) == 7.5


def test_restarts_as_the_benchmark_of_resizes_prints_them(tmp_path):
    rows = (
        '{"kind": "resize", "checkpoint": 1, "slurm": 2, "startup": 3, "restore": 0.5},'
        '{"kind": "requeue", "checkpoint": 9, "slurm": 9, "startup": 9, "restore": 9}'
    )
    path = tmp_path / "resize.json"
    path.write_text(f'{{"ratio": 1.0, "rows": [{rows}]}}')
    assert restart_costs.read(path).of("net", 99.0) == 6.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("checkpoint_s,slurm_s\n1,2\n", "live:1: column start_s is missing"),
        ("checkpoint_s,slurm_s,start_s\n1,2,-3\n", "live:2: start_s '-3' is invalid: expected sec"),
        ("checkpoint_s,slurm_s,start_s\n", "live: has no transition"),
        ('[{"checkpoint_s": 1, "slurm_s": 2}]', "live: entry 1: start_s None is invalid"),
        ("[1]", "live: must be a list of objects"),
        ("[", "live: is not JSON"),
    ],
)
def test_bad_restarts(tmp_path, text, message):
    path = tmp_path / "live"
    path.write_text(text)
    with pytest.raises(RestartCostError, match=message):
        restart_costs.read(path)
    with pytest.raises(RestartCostError, match="No such file"):
        restart_costs.read(tmp_path / "absent")
