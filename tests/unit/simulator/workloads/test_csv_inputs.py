"""CSV and JSON files as spreadsheets and editors write them, and those that are damaged."""

import json
import re

import pytest

from slurm_elastic.config import schema
from slurm_elastic.models.pipedream import profile_reader
from slurm_elastic.models.spatial import network_file
from slurm_elastic.simulator.gangs import gang_files
from slurm_elastic.simulator.truth import neighbour_slowdown, rack_network, restart_costs
from slurm_elastic.simulator.truth.neighbour_slowdown import NeighbourSlowdownError
from slurm_elastic.simulator.truth.restart_costs import RestartCostError
from slurm_elastic.simulator.workloads import (
    application_profiles,
    builtin_profiles,
    curve_jobs,
    scaling_curves,
    workload,
)
from slurm_elastic.simulator.workloads.application_profiles import ApplicationProfileError
from slurm_elastic.simulator.workloads.scaling_curves import ScalingError
from slurm_elastic.simulator.workloads.workload import WorkloadError

JOBS = "name,time,application,num_replicas,batch_size\na-0,3,a,1,16\nb-1,7,b,4,64\n"
CURVES = (
    "name,time,application,num_replicas,batch_size,work_h,scaling,gpu_type\n"
    "a-0,3,a,1,16,2.5,linear,a100\nb-1,7,b,4,64,1,none,\n"
)
SCALING = "match,scaling\ngpt*,amdahl:0.9\n*,none\n"
PAIRS = "application,other,speed\nbert,vgg,0.5\nvgg,bert,0.9\n"
RESTARTS = "application,checkpoint_s,slurm_s,start_s\nbert,1,3,4\n,2,3,4\n"
SENT = "application,bytes\nbert,1e9\nvgg,5e8\n"
GANGS = (
    "job_id,arrival_time,model,total_iterations,time_per_iteration,max_parallelism\n"
    "1,0,vgg,100,0.5,4\n2,3.5,vgg,10,0.25,8\n"
)


def scaling_rules(path):
    return scaling_curves.rules(str(path))


READERS = [
    (workload.read, JOBS, WorkloadError),
    (curve_jobs.read, CURVES, WorkloadError),
    (scaling_rules, SCALING, ScalingError),
    (neighbour_slowdown.read, PAIRS, NeighbourSlowdownError),
    (restart_costs.read, RESTARTS, RestartCostError),
    (rack_network.read_gradients, SENT, WorkloadError),
    (gang_files.read_workload, GANGS, WorkloadError),
]
NAMES = ["jobs", "curves", "scaling", "pairs", "restarts", "sent", "gangs"]


@pytest.mark.parametrize(("read", "text", "refuses"), READERS, ids=NAMES)
def test_a_byte_order_mark_blank_lines_spaces_and_line_ends(tmp_path, read, text, refuses):
    del refuses
    path = tmp_path / "file.csv"
    path.write_text(text)
    expected = read(path)
    spaced = text.replace(",", " , ").replace("\n", "\n\n") + "\n"
    for changed in (text, text.replace("\n", "\r\n"), spaced):
        path.write_bytes(b"\xef\xbb\xbf" + changed.encode())
        assert _without_lines(read(path)) == _without_lines(expected)


def _without_lines(value):
    return re.sub(r"file\.csv:\d+", "", str(value))


@pytest.mark.parametrize(("read", "text", "refuses"), READERS, ids=NAMES)
def test_an_open_quotation_mark_is_refused(tmp_path, read, text, refuses):
    """Of a long file the csv module takes no such cell."""
    path = tmp_path / "file.csv"
    head, first, *others = text.splitlines()
    path.write_text("\n".join([head, f'"{first}', *others * 20_000]))
    with pytest.raises(refuses, match=r"^file\.csv:\d+: ") as error:
        read(path)
    assert "\n" not in str(error.value)


def test_a_name_over_two_lines_is_refused(tmp_path):
    path = tmp_path / "file.csv"
    path.write_text(CURVES.replace("a-0", '"a\n0"'))
    with pytest.raises(WorkloadError, match=r"file.csv:2: name 'a\\n0' is invalid"):
        curve_jobs.read(path)


def test_curves_are_seen_under_quoted_titles(tmp_path):
    path = tmp_path / "file.csv"
    head, _, rows = CURVES.partition("\n")
    path.write_text(",".join(f'"{c}"' for c in head.split(",")) + "\n" + rows)
    assert curve_jobs.has_curves(path)
    assert [job.gpu_type for job in curve_jobs.read(path)[1]] == ["a100", ""]


def test_a_spreadsheet_of_another_locale(tmp_path):
    path = tmp_path / "file.csv"
    path.write_text(JOBS.replace(",", ";"))
    with pytest.raises(WorkloadError, match=r"separated by commas, not by ';'$"):
        workload.read(path)


def test_a_column_that_stands_twice(tmp_path):
    path = tmp_path / "file.csv"
    path.write_text("name,time,application,num_replicas,batch_size,time\na-0,3,a,1,16,9\n")
    with pytest.raises(WorkloadError, match=r"file.csv:1: duplicate column time; keep one"):
        workload.read(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("application,speed\n", r"file.csv:1: column other is missing; the first line must be"),
        ("application,other,speed\na,b\n", r"file.csv:2: 2 cells under 3 columns"),
        ("application,other,speed\na,b,2\n", r"file.csv:2: speed '2' is invalid"),
        ("application,other,speed\n,b,1\n", r"file.csv:2: application is empty"),
        (
            "application,other,speed\na,b,1\n\na,b,0.5\n",
            r"file.csv:4: a beside b has another speed",
        ),
        ("application,other,speed\n", r"file.csv: has no row"),
    ],
)
def test_pairs_that_are_invalid(tmp_path, text, words):
    path = tmp_path / "file.csv"
    path.write_text(text)
    with pytest.raises(NeighbourSlowdownError, match=words):
        neighbour_slowdown.read(path)


def test_an_open_quotation_mark_in_a_table_of_profiles(tmp_path):
    builtin_profiles.write(tmp_path)
    path = tmp_path / "resnet18" / "placements-a100.csv"
    path.write_text(path.read_text().replace("\n1,", '\n"1,', 1) + "x" * 200_000)
    with pytest.raises(ApplicationProfileError, match=r"placements-a100\.csv:\d+: "):
        application_profiles.read(tmp_path, ["resnet18"], ["a100"])


def test_json_and_toml_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "file"
    layer = {"name": "a", "forward_s": 1, "backward_s": 2, "activation_bytes": 3}
    path.write_text("\ufeff" + json.dumps({"layers": [layer | {"parameter_bytes": 4}]}), "utf-8")
    assert [one.name for one in profile_reader.read(path).layers] == ["a"]
    path.write_text('\ufeff[controller]\npolicy = "fair"\n', "utf-8")
    assert schema.load(path).controller.policy == "fair"
    path.write_text('\ufeff{"volume_layers": 3}', "utf-8")
    with pytest.raises(network_file.VolumeNetworkError, match="no list of entries"):
        network_file.read_network(path)
