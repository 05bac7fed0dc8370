"""Exact output of `selastic topology` for answers of the example round."""

import json
from dataclasses import replace

import pytest

from slurm_elastic.cli.tables import TableLayout
from slurm_elastic.cli.topology import topology_command
from slurm_elastic.config.placement_settings import TopologySettings
from slurm_elastic.controller.queries import dispatch
from slurm_elastic.controller.queries.dispatch import Viewer
from slurm_elastic.controller.queries.topology_answer import network_problems
from slurm_elastic.core.cluster import Allocation, Switch
from slurm_elastic.core.plan import JobRecord, Measurement
from tests.support.decisions import example_round as example
from tests.support.needs import require

SETTINGS = TopologySettings(
    speeds={"domain": 4800.0, "rack": 200.0, "spine": 100.0},
    uplinks={"g03": 40.0},
    domains={"a100": 2},
)
#: 4711 and 4713 lie over both racks and meet on g01.
SPREAD = {
    4711: (Allocation.of("a100", {"g01": 2, "g04": 4}), (("g01", "0-1"), ("g04", "0-3"))),
    4713: (Allocation.of("v100", {"g01": 2, "g02": 4, "g06": 2}), (("g01", "2-3"),)),
    4720: (Allocation.of("a100", {"g03": 2}), (("g03", "2-3"),)),
    4700: (Allocation.of("v100", {"g05": 4}), (("g05", "broken"),)),
}
BOBS = Viewer(uid=example.BOB, operator=False, private=True)


def view(spread=SPREAD, settings=SETTINGS, **changes):
    jobs = [
        replace(j, allocation=spread[j.job_id][0], devices=spread[j.job_id][1])
        if j.job_id in spread
        else j
        for j in example.JOBS
    ]
    snapshot = replace(example.SNAPSHOT, **{"jobs": tuple(jobs), **changes})
    return replace(example.VIEW, snapshot=snapshot, topology=settings)


def ask(viewer=Viewer(), **changes):  # noqa: B008 - frozen
    body = dispatch.answer("topology", view(**changes), viewer, {})
    return json.loads(json.dumps(body))  # what a script gets


def shown(answer, layout=TableLayout(), **options):  # noqa: B008 - frozen
    return "\n".join(topology_command.lines(answer, layout, **options)) + "\n"


def test_the_network_and_its_jobs():
    assert shown(ask()) == (
        "LINKS   inside a GPU domain 4800 Gbit/s   inside a rack 200 Gbit/s   between racks 100 Gbit/s\n"  # noqa: E501
        "spine\n"
        "  rack1   up 100 Gbit/s   crossed by 4711 and 4713\n"
        "    g01  4 a100 in 2 domains of 2   4711: 2, 4713: 2\n"
        "    g02  4 a100 in 2 domains of 2   4713: 4\n"
        "    g03  4 a100 in 2 domains of 2   up 40 Gbit/s   4720: 2   3 idle\n"
        "  rack2   up 100 Gbit/s   crossed by 4711 and 4713\n"
        "    g04  4 v100   4711: 4\n"
        "    g05  4 v100   4700: 4\n"
        "    g06  4 v100   4713: 2, others: 2\n"
        "\n"
        "JOBID  NAME       USER   GPUS  TYPE  TIER    NODES  RACKS  WHERE                     SHARES\n"  # noqa: E501
        " 4711  gpt-small  alice     6  a100  spine       2      2  rack1:g01,rack2:g04       g01 with 4713 (100 Gbit/s each), rack[1-2] with 4713 (50 Gbit/s each)\n"  # noqa: E501
        " 4713  resnet     alice     8  v100  spine       3      2  rack1:g[01-02],rack2:g06  g01 with 4711 (100 Gbit/s each), rack[1-2] with 4711 (50 Gbit/s each)\n"  # noqa: E501
        " 4720  vit        alice     2  a100  domain      1      1  rack1:g03\n"
    )


def test_a_site_that_configures_nothing_sees_the_tree():
    bare = ask(settings=TopologySettings(), spread={})
    assert shown(bare).startswith(
        "spine\n  rack1\n    g[01-02]  4 a100   4711: 4\n    g03       4 a100   4720: 1   3 idle\n"
    )
    assert {j["display_id"]: j["tier"] for j in bare["jobs"]} == {
        "4700": "rack", "4711": "rack", "4713": "node", "4720": "node",
    }  # fmt: skip
    assert [s["gbit_s"] for s in bare["switches"]] == [None, None, None]


def test_links_without_configuration_are_shown_as_measured():
    def records(*ids):
        measurement = Measurement(
            gpu_type="a100", gpus=8, nodes=2, racks=2, samples_per_s=9.0, steps=90,
            compute_s=0.4, sync_s=0.4, reports=3,
        )  # fmt: skip
        return {
            i: replace(
                example.VIEW.records.get(i) or JobRecord(job_id=i),
                gradient_bytes=500e6, measurements=(measurement,),
            )
            for i in ids
        }  # fmt: skip

    def seen(*ids, **speeds):
        changed = replace(
            example.VIEW,
            records=records(*ids),
            topology=TopologySettings(speeds=speeds),
        )
        answer = json.loads(json.dumps(dispatch.answer("topology", changed, Viewer(), {})))
        return shown(answer).splitlines()[0], answer["measured"]

    line, measured = seen(4711)
    assert line == (
        "LINKS   between racks 10 Gbit/s (measured by 1 job of 1 user; counts for their own jobs"
        " only)"
    )
    assert measured["spine"]["counts"] == "own"
    line, _ = seen(4711, 4713, rack=200.0)
    assert line.startswith("LINKS   inside a rack 200 Gbit/s   between racks 10 Gbit/s (measured")
    assert seen(4711, spine=50.0) == ("LINKS   between racks 50 Gbit/s", {})
    assert not seen()[0].startswith("LINKS")


def test_slurms_own_link_speed_is_shown_where_no_other_is_known():
    switches = [
        replace(s, link_speed=4) if s.name == "rack2" else s for s in example.SNAPSHOT.switches
    ]
    text = shown(ask(settings=TopologySettings(), switches=tuple(switches)))
    assert "  rack2   LinkSpeed 4   crossed by" in text


def test_without_switches_all_nodes_are_listed_as_one_rack():
    text = shown(ask(spread={}, switches=()))
    assert "no switches: all nodes count as one rack\n  g[01-02]  4 a100 in 2" in text
    assert ask(switches=())["jobs"][1]["tier"] == "rack"


def test_nodes_below_no_switch_and_nodes_that_are_down_are_marked():
    nodes = [
        replace(n, available=False, state="IDLE+DRAIN") if n.name == "g03" else n
        for n in example.SNAPSHOT.nodes
    ]
    text = shown(ask(switches=(Switch("rack1", 0, ("g01", "g02")),), nodes=tuple(nodes)))
    assert "(below no switch)\n" in text
    assert "unavailable (IDLE+DRAIN)" in text


def test_rigid_jobs_are_in_the_table_when_asked_for():
    assert " 4700  rigid " not in shown(ask())
    assert " 4700  rigid " in shown(ask(), all_jobs=True)


def test_only_the_table_for_scripts():
    text = shown(ask(), TableLayout(columns="jobid,tier,nodes", header=False, parsable=True))
    assert text == "4711|spine|2\n4713|spine|3\n4720|domain|1\n"


def test_private_data_hides_jobs_but_not_that_gpus_and_links_are_used():
    answer = ask(BOBS)
    text = shown(answer)
    assert "  rack1   up 100 Gbit/s   crossed by 2 others\n" in text
    assert "others: 4\n" in text
    assert "4700: 4\n" in text
    assert text.endswith("\nno elastic jobs hold GPUs\n")
    for hidden in ("4711", "4713", "4720", "alice", "gpt"):
        assert hidden not in json.dumps(answer)


def test_links_shared_with_jobs_that_are_not_shown_are_counted():
    spread = SPREAD | {4700: (Allocation.of("v100", {"g03": 1, "g05": 4}), ())}
    answer = ask(BOBS, spread=spread)
    (row,) = answer["jobs"]
    assert row["shared"] == ["switch:rack1", "switch:rack2"]
    (rack1,) = [s for s in answer["switches"] if s["name"] == "rack1"]
    assert (rack1["users"], rack1["others"]) == (["4700"], 2)
    table = shown(answer, TableLayout(columns="shares", header=False), all_jobs=True)
    assert table == "rack[1-2] with 2 others (33 Gbit/s each)\n"


def test_gpus_of_a_job_are_shown_if_slurm_reports_them():
    held = {n["name"]: n["holders"] for n in ask()["nodes"]}
    assert [h["devices"] for h in held["g01"]] == [[0, 1], [2, 3]]
    assert [h["devices"] for h in held["g02"]] == [None]
    assert [h["devices"] for h in held["g05"]] == [None]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"settings": TopologySettings(uplinks={"leaf7": 9.0})},
            "note: [topology] uplinks: leaf7 is neither a node nor a switch; correct or remove it",
        ),
        (
            {"switches": (Switch("a", 0, ("g01",)), Switch("b", 0, ("g01",)))},
            "note: node g01 is in two racks, a and b; name it in one of them",
        ),
        (
            {"switches": (Switch("a", 1, ("g01",), ("b",)), Switch("b", 1, ("g01",), ("a",)))},
            "note: switches a > b > a form a loop; remove one from Switches=",
        ),
    ],
)
def test_faults_are_one_line_each_and_in_check(changes, line):
    answer = ask(**changes)
    assert shown(answer).splitlines()[0] == line
    assert network_problems(view(**changes)) == answer["notes"]


def test_no_fault_before_the_first_round():
    empty = view(nodes=(), jobs=(), settings=TopologySettings(uplinks={"g01": 1.0}))
    assert network_problems(empty) == []
    assert "no nodes with GPUs are known (yet)" in shown(
        dispatch.answer("topology", empty, Viewer(), {})
    )


def test_a_job_whose_node_is_gone_is_left_out():
    nodes = tuple(n for n in example.SNAPSHOT.nodes if n.name != "g06")
    assert "4713" not in {j["display_id"] for j in ask(nodes=nodes)["jobs"]}


def test_of_many_shared_links_the_first_are_written_out():
    links = {
        f"n{i}": {"link": f"n{i}", "gbit_s": None, "users": ["1", str(10 + i)], "others": 0}
        for i in range(7)
    }
    text = topology_command.shares({"display_id": "1", "shared": [*links, "nowhere"]}, links)
    assert text.startswith("n0 with 10, n1 with 11,")
    assert text.endswith("n3 with 13, and 3 more")


# --- the picture ---

ENDINGS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


def _draw(answer, path):
    require("python/matplotlib")
    from slurm_elastic.cli.topology import topology_plot  # noqa: PLC0415 - needs matplotlib

    topology_plot.draw(answer, path)
    return path.read_bytes()


@pytest.mark.parametrize("ending", sorted(ENDINGS))
def test_a_plot_in_every_format(ending, tmp_path):
    assert _draw(ask(), tmp_path / f"net{ending}").startswith(ENDINGS[ending])


@pytest.mark.parametrize(
    "changes",
    [
        {"switches": ()},
        {"nodes": (), "jobs": (), "switches": ()},
        {"switches": (Switch("a", 1, ("g01",), ("b",)), Switch("b", 1, ("g01",), ("a",)))},
        {"switches": (Switch("rack1", 0, ("g01", "g02")),)},
    ],
)
def test_every_network_can_be_drawn(changes, tmp_path):
    assert _draw(ask(**changes), tmp_path / "net.svg")


def test_the_plot_names_switches_nodes_links_and_visible_jobs_only(tmp_path):
    require("python/matplotlib")
    import matplotlib as mpl  # noqa: PLC0415

    with mpl.rc_context({"svg.fonttype": "none"}):
        plot = _draw(ask(), tmp_path / "all.svg").decode()
        for words in ("rack2", "g06", "100 Gbit/s, 2 jobs", "4711 gpt-small, 6 a100", "24 GPUs"):
            assert words in plot
        hidden = _draw(ask(BOBS), tmp_path / "bob.svg").decode()
    assert "4700 rigid, 4 v100 (rigid)" in hidden
    assert "others" in hidden
    assert "4711" not in hidden


def test_gpus_go_to_jobs_by_slurms_indexes_else_from_the_left():
    require("python/matplotlib")
    from slurm_elastic.cli.topology import topology_plot  # noqa: PLC0415 - needs matplotlib

    held = {n["name"]: topology_plot._holders(n) for n in ask()["nodes"]}
    assert held["g01"] == [4711, 4711, 4713, 4713]
    assert held["g03"] == [None, None, 4720, 4720]
    assert held["g06"] == [4713, 4713, -1, -1]
