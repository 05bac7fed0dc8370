"""`selastic` from command line to exit code, with a fake controller behind the socket."""

import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import pytest

from slurm_elastic.cli import main
from slurm_elastic.cli.exit_codes import SILENT
from slurm_elastic.cli.formatting import clock
from slurm_elastic.config import schema
from slurm_elastic.controller.queries import dispatch
from slurm_elastic.controller.queries.dispatch import Particulars, Viewer
from slurm_elastic.controller.server.request_dispatcher import Role
from slurm_elastic.controller.server.socket_server import Server
from slurm_elastic.controller.state.reported.layer_profiles import StoredProfile
from slurm_elastic.policies.milp.assignment_milp import AssignmentProgram
from slurm_elastic.policies.milp.round_program import RoundProgram
from tests.support.controller.fake_controller import FakeBackend, FakeLog
from tests.support.decisions import example_round as example
from tests.support.munge_daemon import environment, munged
from tests.support.needs import require

ME = os.getuid()


class ExampleBackend(FakeBackend):
    """Backend that answers from the example round."""

    profile = None

    def __init__(self):
        super().__init__({j.job_id: j.uid for j in example.JOBS})

    def find(self, name):
        return dispatch.find(example.VIEW, name)

    def question(self, uid, op, args):
        if op == "check":
            return {"version": "0.1.0", "mode": "act", "account": "selastic"}
        return dispatch.answer(
            op,
            example.VIEW,
            Viewer(uid=uid),
            args,
            history=example.HISTORY,
            segments=example.SEGMENTS,
            particulars=Particulars(profile=self.profile),
        )

    def command(self, uid, op, args):
        self.asked.append((uid, op, args))
        if op == "retire":
            return {"text": "would finish 1 change" if args["dry_run"] else "finished 1 change"}
        ids = args.get("job_ids", ())
        return {"results": [{"job_id": i, "ok": i != 4720, "text": f"{op} done"} for i in ids]}


@pytest.fixture(scope="module")
def munge_socket():
    with munged() as daemon, environment(daemon.socket):
        yield daemon.socket


@pytest.fixture
def backend():
    return ExampleBackend()


@pytest.fixture
def controller(backend, munge_socket, monkeypatch):
    server = Server(schema.ApiSettings(listen="127.0.0.1:0"), backend, FakeLog())
    server.start()
    address = "{}:{}".format(*server.address)
    monkeypatch.setenv("SLURM_ELASTIC_CONTROLLER", address)
    yield address
    server.stop()


@pytest.fixture
def selastic(capsys):
    def run(*words):
        code = main.run(words)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@contextmanager
def dead_end():
    """Yield an address without a listener."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{sock.getsockname()[1]}"


# --- questions ---


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        (("status",), "PARTITION gpu   24 GPUs (12 a100, 12 v100)"),
        (("status", "--all", "-h", "-o", "jobid"), "4700\n4711\n"),
        (("explain", "4711"), "4711 gpt-small holds 8 a100 on g01, g02 (rack1)"),
        (("show", "job", "4711"), "JobId=4711 JobName=gpt-small\n"),
        (("show", "4711"), "JobId=4711 JobName=gpt-small\n"),
        (("plan",), "2 changes would be made now, nothing was done:\n"),
        (("history",), "TIME "),
        (("history", "4711", "-P", "-h"), "2026-11-20T14:02:01|4711|grow|4|8|done|9.1 s|idle GPUs"),
        (("usage", "-S", "2026-11-20T14:00", "-E", "2026-11-20T14:05"), "JOBID "),
        (("usage", "--by-user", "-P", "-S", "2026-11-20"), "USER|GPUHOURS|TYPES\nalice|"),
        (("topology",), "spine\n  rack1\n    g[01-02]  4 a100   4711: 4\n"),
        (("topology", "-h", "-a", "-o", "jobid,tier"), "4700  rack\n4711  rack\n"),
        (("ping",), "selasticd 0.1.0 at 127.0.0.1:"),
    ],
)  # fmt: skip
def test_output_of_each_question(selastic, controller, words, begins, monkeypatch):
    code, out, err = selastic(*words)
    assert (code, err) == (0, "")
    assert out.removeprefix(" ").startswith(begins.replace("2026-11-20T14:02:01", _when()))


def _when():
    return clock(example.HISTORY[0]["time"], example.NOW)


@pytest.mark.parametrize(
    "words",
    [("status",), ("explain", "4711"), ("show", "4711"), ("plan",), ("history",), ("usage",),
     ("topology",), ("ping",), ("hold", "4711"), ("retire", "--yes")],
)  # fmt: skip
def test_json_everywhere(selastic, controller, words):
    code, out, _ = selastic(*words, "--json")
    assert code == 0
    assert isinstance(json.loads(out), dict)
    assert out.isascii()


def test_topology_plots_and_prints(selastic, controller, tmp_path):
    require("python/matplotlib")
    path = tmp_path / "net.png"
    code, out, err = selastic("topology", "--plot", str(path))
    assert (code, err) == (0, "")
    assert out.startswith("spine")
    assert path.read_bytes().startswith(b"\x89PNG")
    code, out, err = selastic("topology", "--plot", str(tmp_path / "net.gif"))
    assert (code, out) == (2, "")
    assert err.startswith("selastic: ")
    assert err.endswith('no format ".gif"; end the name in .png, .svg, .pdf\n')


def test_a_plot_without_matplotlib_names_the_package(selastic, controller, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = selastic("topology", "--plot", str(tmp_path / "net.png"))
    assert (code, out) == (2, "")
    assert (
        err == "selastic: --plot needs matplotlib: python3 -m pip install 'slurm-elastic[plot]'\n"
    )
    assert selastic("topology")[0] == 0


def test_partition_reads_the_profile_of_show(selastic, backend, controller, tmp_path):
    code, out, err = selastic("show", "4711", "--profile")
    assert (code, out) == (1, "")
    assert err.startswith("selastic: job 4711 has no layer profile (yet): it is measured in the")
    rows = [("conv", 0.02, 0.04, 8_000_000, 1_000_000), ("fc", 0.01, 0.02, 4000, 400_000_000)]
    backend.profile = StoredProfile(tuple(rows), 64)
    code, out, _ = selastic("show", "4711", "--profile")
    assert (code, json.loads(out)["batch"]) == (0, 64)
    path = tmp_path / "net.json"
    path.write_text(out)
    code, out, _ = selastic(
        "partition", str(path), "--machines", "4", "--bandwidth", "1e9", "--json"
    )
    assert code == 0
    assert [s["layers"] for s in json.loads(out)["stages"]] in (
        [["conv"], ["fc"]],
        [["conv", "fc"]],
    )
    answer = json.loads(selastic("show", "job", "4711", "--profile", "--json")[1])
    assert answer["profile"]["layers"][1]["after"] == ["conv"]
    plain = json.loads(selastic("show", "4711", "--json")[1])
    assert (plain["profile"], plain["profile_layers"], plain["profile_batch"]) == (None, 2, 64)


def test_a_watch_that_is_not_on_a_terminal_prints_plain_lines(controller):
    with subprocess.Popen(
        [sys.executable, "-c", "from slurm_elastic.cli.main import main; main()",
         "status", "--watch=0.5"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as watch:  # fmt: skip
        lines = [watch.stdout.readline() for _ in range(8)]
        watch.stdout.close()  # as `| head` does
        assert watch.wait(10) == 1
        assert watch.stderr.read() == ""
    assert lines[0].startswith("PARTITION")
    assert lines[6] == "\n"
    assert lines[7] == lines[0]


# --- commands ---


def test_commands_print_their_results(selastic, backend, controller):
    assert selastic("hold", "4711", "4713") == (0, "4711: hold done\n4713: hold done\n", "")
    assert backend.asked == [(ME, "hold", {"job_ids": (4711, 4713), "dry_run": False})]


def test_failed_results_go_to_stderr_and_set_the_exit_code(selastic, controller):
    assert selastic("release", "4711", "4720") == (
        1,
        "4711: release done\n",
        "4720: release done\n",
    )


def test_dry_runs_are_passed_on(selastic, backend, controller):
    selastic("release", "-n", "4711")
    selastic("update", "4711", "--elastic=2-4", "--dry-run")
    assert [a["dry_run"] for _, _, a in backend.asked] == [True, True]
    assert selastic("hold", "-n", "4711")[1] == "4711: not done, would be: hold done\n"
    assert backend.asked[1][2]["elastic"] == "2-4"


def test_a_wrong_directive_is_refused_without_a_request(selastic, backend, controller):
    code, out, err = selastic("update", "4711", "--elastic=16-2")
    assert (code, out) == (2, "")
    assert err == "selastic: --elastic=16-2: MIN 16 is larger than MAX 2; write 2-16\n"
    assert backend.asked == []


def test_a_layout_is_ordered_alone_or_with_a_directive(selastic, backend, controller):
    assert selastic("update", "4711", "--layout", "2x2") == (0, "4711: update done\n", "")
    assert "elastic" not in backend.asked[0][2]
    selastic("update", "4711", "--elastic=4,parallel=hybrid", "--layout=2-1-1", "-n")
    selastic("update", "4711", "--layout=auto")
    requests = [(a.get("elastic"), a["layout"], a["dry_run"]) for _, _, a in backend.asked]
    assert requests == [
        (None, "2x2", False),
        ("4,parallel=hybrid", "2-1-1", True),
        (None, "auto", False),
    ]


@pytest.mark.parametrize("layout", ["4", "2x", "0x2", "2x2x2x2", "AUTO", "", "9" * 300, "2\n"])
def test_a_wrong_layout_is_refused_without_a_request(selastic, backend, controller, layout):
    code, out, err = selastic("update", "4711", f"--layout={layout}")
    assert (code, out, backend.asked) == (2, "", [])
    assert err.startswith("selastic: --layout: layout ")
    assert err.count("\n") == 1


def test_an_execution_plan_is_ordered_like_a_layout(selastic, backend, controller):
    assert selastic("update", "4711", "--layout", "2x1+recompute")[0] == 0
    assert backend.asked[0][2]["layout"] == "2x1+recompute"
    code, _, err = selastic("update", "4711", "--layout", "2x1+recomputed")
    assert code == 2
    assert "option 'recomputed' is invalid" in err


def test_retire_asks_for_confirmation(selastic, backend, controller, monkeypatch):
    code, _, err = selastic("retire")
    assert (code, err) == (2, "selastic: retire: stdin is no terminal to confirm on; add --yes\n")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(click, "confirm", _no)
    assert selastic("retire")[0] == 130
    assert backend.asked == []
    assert selastic("retire", "-n")[:2] == (0, "would finish 1 change\n")
    assert selastic("retire", "--yes")[:2] == (0, "finished 1 change\n")


def _no(*_, **__):
    raise click.Abort


# --- when it does not work ---


def test_no_controller_answers(selastic, munge_socket, monkeypatch):
    with dead_end() as address:
        monkeypatch.setenv("SLURM_ELASTIC_CONTROLLER", address)
        for verb in (("status",), ("ping",), ("hold", "1"), ("status", "--watch")):
            code, out, err = selastic(*verb)
            assert (code, out) == (3, "")
            assert err == (
                f"selastic: no controller at {address} (connection refused): is selasticd running"
                " there? systemctl status selasticd\n"
            )


def test_the_host_is_unknown(selastic, munge_socket):
    code, _, err = selastic("--controller", "nowhere.invalid:7321", "status")
    assert code == 3
    assert err.startswith("selastic: no controller at nowhere.invalid:7321 (")
    assert err.count("\n") == 1


def test_munge_does_not_answer(selastic, controller, tmp_path):
    with environment(tmp_path / "nothing"):
        code, _, err = selastic("status")
    assert code == 3
    assert "is munged running?" in err
    assert err.count("\n") == 1


def test_a_refusal_is_one_line(selastic, controller):
    assert selastic("explain", "99") == (
        1, "", "selastic: job 99 is neither running nor waiting: see `selastic history 99`\n",
    )  # fmt: skip
    assert selastic("hold", "99")[2] == "selastic: job 99: Invalid job id specified\n"
    assert selastic("hold", "x")[2] == "selastic: job 'x': an id is written 4711 or 4711_3\n"


@pytest.mark.parametrize(
    "words",
    [(), ("frob",), ("hold",), ("status", "--foo"), ("status", "-o", "nme"), ("show", "node", "1"),
     ("usage", "-S", "yesterday"), ("status", "--watch", "--json"), ("update", "4711"),
     ("status", "--watch=0.1")],
)  # fmt: skip
def test_a_wrong_command_line_is_code_2(selastic, controller, words):
    code, out, err = selastic(*words)
    assert code == 2
    assert "Traceback" not in out + err
    assert not words or (err.startswith("selastic: ") and err.count("\n") == 1)


def test_a_configuration_that_cannot_be_used_names_the_line(selastic, tmp_path):
    path = tmp_path / "elastic.toml"
    path.write_text('[controller]\nmode = "atc"\n')
    code, _, err = selastic("--config", str(path), "status")
    assert code == 2
    assert err.startswith('selastic: elastic.toml:2: mode "atc" is unknown; known: observe')


def test_the_controllers_address_comes_from_the_configuration(selastic, munge_socket, tmp_path):
    path = tmp_path / "elastic.toml"
    with dead_end() as address:
        path.write_text(f'[api]\ncontroller = "{address}"\n')
        assert address in selastic("--config", str(path), "status")[2]


def test_check_works_without_a_controller_and_without_slurm(
    selastic, munge_socket, monkeypatch, tmp_path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    with dead_end() as address:
        monkeypatch.setenv("SLURM_ELASTIC_CONTROLLER", address)
        code, out, err = selastic("check")
        findings = json.loads(selastic("check", "--json")[1])["findings"]
    assert (code, err) == (1, "")
    assert out.startswith("error: slurmctld cannot be asked (scontrol: No such file")
    assert f"selasticd does not answer (no controller at {address} (connection refused))" in out
    assert {f["severity"] for f in findings} == {"error", "warning"}


# --- what it costs to start ---


def test_help_needs_neither_torch_nor_pyslurm_nor_numpy():
    code = (
        "import sys; from slurm_elastic.cli.main import run\n"
        "assert run(['--help']) == 0\n"
        "heavy = ('torch', 'pyslurm', 'numpy', 'networkx', 'rich', 'slurm_elastic.controller')\n"
        "print([m for m in heavy if m in sys.modules])\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stdout.splitlines()[-1] == "[]"
    for verb in main.VERBS:
        assert f"  {verb} " in process.stdout


def test_status_needs_neither_torch_nor_pyslurm(controller):
    code = (
        "import sys; from slurm_elastic.cli.main import run\n"
        "assert run(['status']) == 0\n"
        "print([m for m in ('torch', 'pyslurm', 'numpy', 'networkx') if m in sys.modules])\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("verb", main.VERBS)
def test_every_verb_has_help(selastic, verb):
    code, out, _ = selastic(verb, "--help")
    assert code == 0
    assert out.startswith(f"Usage: selastic {verb}")


@pytest.fixture
def two(backend, controller):
    """Addresses of a controller on standby, and of the active one."""
    standby = Server(
        schema.ApiSettings(listen="127.0.0.1:0"),
        None,
        FakeLog(),
        role=lambda: Role("standby", controller),
    )
    standby.start()
    yield "{}:{}".format(*standby.address), controller
    standby.stop()


def test_of_two_controllers_the_active_one_is_asked(selastic, two):
    standby, active = two
    code, out, _ = selastic("--controller", f"{standby},{active}", "status")
    assert code == 0
    assert f"{standby}: standby, {active}: alone" in out


def test_ping_shows_each_of_several(selastic, two):
    standby, active = two
    code, out, _ = selastic("--controller", f"{standby},{active},127.0.0.1:1", "ping")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].endswith(f"at {standby} is UP (standby)")
    assert lines[1].endswith(f"at {active} is UP (alone)")
    assert lines[2].startswith("selasticd at 127.0.0.1:1 is DOWN (Connection refused")
    code, out, _ = selastic("--controller", f"{standby},127.0.0.1:1", "ping", "--json")
    assert code == SILENT
    assert [c.get("role") for c in json.loads(out)["controllers"]] == ["standby", None]


def test_when_no_controller_is_active_each_is_named(selastic, two):
    standby, _ = two
    code, _, err = selastic("--controller", f"{standby},127.0.0.1:1", "status")
    assert code == SILENT
    assert f"no controller is active ({standby}: stands by; 127.0.0.1:1: Connection refused)" in err


def test_plan_writes_the_integer_program(selastic, controller, monkeypatch, tmp_path):
    path = tmp_path / "round.lp"
    code, out, err = selastic("plan", "--export", str(path))
    assert (code, out) == (1, "")
    assert err == (
        "selastic: policy fair has solved no integer program (yet); sia, icefrog and goodput"
        " solve one\n"
    )
    assert not path.exists()
    program = RoundProgram(
        program=AssignmentProgram(
            cost=np.array([[0.9, 0.5]]),
            valid=np.ones((1, 2), dtype=bool),
            config_type=np.array([0, 0]),
            config_gpus=np.array([1, 2]),
            capacity=np.array([2]),
            not_running=1.1,
            fixed=np.array([-1]),
        ),
        job_ids=(4711,),
        types=("a100",),
        nodes=np.array([1, 1]),
        choice=np.array([1]),
    )
    monkeypatch.setattr(example, "VIEW", replace(example.VIEW, program=program))
    assert selastic("plan", "--export", str(path)) == (0, f"{path}: 1 jobs, 3 variables\n", "")
    text = path.read_text()
    assert text.startswith("\\ slurm-elastic ")
    assert "\n  + 0.5 j4711_a100_n1_g2\n" in text
    assert selastic("plan", "--export", "-") == (0, text, "")
    code, _, err = selastic("plan", "--export", str(tmp_path / "no" / "round.lp"))
    assert (code, err.endswith("No such file or directory\n")) == (2, True)
    code, _, err = selastic("plan", "--export", str(path), "--json")
    assert (code, "leave --all and --json out" in err) == (2, True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [("config",), ("workload", "generate"), ("--help",)])
def test_a_full_disk_under_standard_output_is_one_line(words):
    program = "import sys; from slurm_elastic.cli.main import main; main()"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    assert done.stderr == (
        "selastic: standard output: No space left on device: the answer is not complete\n"
    )
    assert done.returncode == 1
