"""`selastic recommend`: text, JSON and plot; errors are one line."""

import json
import re
import shutil
from pathlib import Path

import pytest

from slurm_elastic.cli import main
from tests.support.needs import require

TOP = Path(__file__).parents[3]

#: type, nodes, GPUs, compute, interconnect, network, prep, fetch
PLACES = [
    ("a100", 1, 1, 0.36, 0.00, 0.00, 0.00, 0.09),
    ("a100", 1, 4, 0.36, 0.04, 0.00, 0.00, 0.09),
    ("a100", 2, 8, 0.36, 0.04, 0.20, 0.00, 0.09),
    ("v100", 1, 4, 0.72, 0.08, 0.00, 0.00, 0.09),
]
#: An hour of steps on one a100.
SAMPLES = 10_000 * 10
WORDS = """\
net, 10 samples per GPU: 10 epochs of 100000 samples; cost is GPU hours
TYPE  NODES  GPUS     FIRST     EPOCH      TIME  COST  SPREAD  STALLED  BASIS     FRONT
a100      2     8  00:14:22  00:12:30  02:06:52  16.9  0.33 %     40 %  measured  yes
a100      1     4  00:20:25  00:16:40  02:50:25  11.4  0.49 %     10 %  measured  yes
v100      1     4  00:37:05  00:33:20  05:37:05  22.5  0.25 %     10 %  measured
a100      1     1  01:15:00  01:00:00  10:15:00  10.2  0.54 %      0 %  measured  yes

"""


def body(model="net", *, layers=50, size=1e8, scale=1.0, **changes):
    names = ("compute", "interconnect", "network", "prep", "fetch")
    rows = []
    for gpu_type, nodes, gpus, *seconds in PLACES:
        timed = [
            {"seconds": s * (scale if name in ("interconnect", "network") else 1), "spread": 0.001}
            for name, s in zip(names, seconds, strict=True)
        ]
        shape = {"gpu_type": gpu_type, "nodes": nodes, "gpus": gpus, "batch": 10, "repeats": 3}
        rows.append(shape | dict(zip(names, timed, strict=True)))
    return {
        "profile": 1, "application": "app", "model": model, "layers": layers,
        "gradient_bytes": size, "samples": SAMPLES, "configurations": rows,
    } | changes  # fmt: skip


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*words):
        code = main.run(["recommend", *map(str, words)])
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


@pytest.fixture
def net(tmp_path):
    (tmp_path / "net.json").write_text(json.dumps(body()))
    return "net.json"


@pytest.fixture
def zoo(tmp_path, net):
    """Profiles of five other models; stalls grow with layers and bytes."""
    paths = []
    for name, layers, size, scale in (
        ("m1", 8, 2.4e8, 2.0), ("m2", 100, 1e7, 0.5), ("m3", 16, 5.5e8, 4.0),
        ("m4", 300, 2.4e8, 3.0), ("m5", 70, 8e7, 0.9),
    ):  # fmt: skip
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(body(name, layers=layers, size=size, scale=scale)))
        paths.append(path.name)
    return paths


def test_the_table_and_the_cheapest_and_fastest_choice(run, net):
    code, out, err = run("--profile", net, "--epochs", 10)
    assert (code, err) == (0, "")
    assert out == WORDS + (
        "Cheapest: 1 a100 on 1 node, 10:15:00, 10.2 GPU h\n"
        "Fastest: 8 a100 on 2 nodes, 02:06:52, 16.9 GPU h\n"
        "note: an hour costs the same on all GPU types; --price sets other prices\n"
    )


def test_deadline_and_budget(run, net):
    arguments = ("--profile", net, "--epochs", 10)
    assert run(*arguments, "--deadline", 3)[1] == WORDS + (
        "Cheapest in 3 h: 4 a100 on 1 node, 02:50:25, 11.4 GPU h\n"
        "note: an hour costs the same on all GPU types; --price sets other prices\n"
    )
    priced = run(*arguments, "--price", "a100=3,v100=0.5", "--budget", 12, "--deadline", 10)[1]
    assert "cost is money, an hour of one GPU at 3 for a100, 0.5 for v100\n" in priced
    assert priced.endswith(
        "Cheapest in 10 h: 4 v100 on 1 node, 05:37:05, 11.2\n"
        "Fastest for 12: 4 v100 on 1 node, 05:37:05, 11.2\n"
    )


def test_first_epochs_are_cold_and_all_are_without_cache(run, net):
    def first(*words):
        (row,) = run(net, *words, "-Pho", "first,epoch,time")[1].splitlines()[-1:]
        return row

    assert first() == "01:15:00|01:00:00|01:15:00"
    assert first("--epochs", 3) == "01:15:00|01:00:00|03:15:00"
    assert first("--epochs", 3, "--uncached") == "01:15:00|01:15:00|03:45:00"
    assert first("--samples", SAMPLES * 2) == "02:30:00|02:00:00|02:30:00"


def test_json(run, net):
    code, out, err = run(net, "--epochs", 10, "--deadline", 3, "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert [c["gpus"] for c in answer["configurations"]] == [8, 4, 4, 1]
    assert answer["cheapest"] == answer["configurations"][1]
    assert answer["cheapest"]["time_s"] == 10225
    assert answer["cheapest"]["cost"] == pytest.approx(4 * 10225 / 3600, rel=1e-5)
    assert (answer["deadline_h"], answer["budget"], answer["prices"]) == (3, None, None)
    assert [c["front"] for c in answer["configurations"]] == [True, True, False, True]


def test_a_rival_within_the_spread_is_named(run, tmp_path):
    """Four GPUs cost 0.3 % more than one, within the spread, and take a quarter of the time."""
    rows = body()["configurations"][:2]
    rows[1]["interconnect"]["seconds"] = 0.001
    (tmp_path / "near.json").write_text(json.dumps(body(configurations=rows)))
    out = run("near.json", "--epochs", 10)[1]
    assert "Cheapest: 1 a100" in out
    assert "  Within its spread this costs no more: 4 a100 on 1 node, 02:34:10" in out


def test_an_answer_close_to_its_limit_is_marked(run, net):
    late = "  It may be late: the deadline is within its spread\n"
    dear = "  It may cost more: the budget is within its spread\n"
    arguments = (net, "--epochs", 10)
    assert late in run(*arguments, "--deadline", 2.12)[1]
    assert late not in run(*arguments, "--deadline", 2.2)[1]
    assert dear in run(*arguments, "--budget", 17)[1]
    assert dear not in run(*arguments, "--budget", 18)[1]


def test_a_model_that_was_not_profiled(run, zoo):
    model = "layers=50,gradient-bytes=1e8,batch=10,compute.a100=0.36"
    code, out, err = run("--profile", *zoo, "--model", model, "--samples", SAMPLES, "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert all(c["estimated"] and c["gpu_type"] == "a100" for c in answer["configurations"])
    four = next(e for e in answer["extrapolated"] if e["gpus"] == 4)
    assert four["models"] == ["m1", "m2", "m3", "m4", "m5"]
    assert four["stall_s"] == pytest.approx(0.04, rel=0.5)
    assert [m["model"] for m in four["held_out"]] == four["models"]
    assert four["error"] > 0
    out = run(*zoo, "--model", model, "--samples", SAMPLES)[1]
    assert "ERROR is that of each profiled model against a fit to the others:" in out
    assert "left out: 4 v100 on 1 node: the computing time of a step on one v100 is unknown" in out
    assert "note: prep, fetch not measured, counted as 0" in out


def test_configurations_of_other_models_are_added(run, zoo, tmp_path):
    small = body(configurations=body()["configurations"][:1])
    (tmp_path / "small.json").write_text(json.dumps(small))
    arguments = ("small.json", *zoo, "--model", "net")
    assert len(run(*arguments, "-Ph")[1].splitlines()) == 1
    rows = run(*arguments, "--extrapolate", "-Pho", "type,gpus,basis")[1].splitlines()
    assert rows == ["a100|8|extrapolated", "a100|4|extrapolated", "a100|1|measured"]


def test_a_plot(run, net, zoo, tmp_path):
    require("python/matplotlib")
    arguments = (net, *zoo, "--model", "net", "--extrapolate", "--epochs", 10)
    limits = ("--deadline", 11, "--budget", 20)
    assert run(*arguments, *limits, "--plot", "picture.svg")[0] == 0
    first = (tmp_path / "picture.svg").read_text()
    assert run(*arguments, *limits, "--plot", "picture.svg")[0] == 0
    assert (tmp_path / "picture.svg").read_text() == first
    assert run(net, "--plot", "no/picture.svg")[2].startswith("selastic: no/picture.svg: no such")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("--deadline", 2),
            (
                "--deadline 2: no configuration is that fast; the fastest, 8 a100 on 2 nodes, takes"
                " 2.12 h: use --deadline 2.12 or more"
            ),
        ),
        (
            ("--budget", 9),
            (
                "--budget 9: no configuration is that cheap; the cheapest, 1 a100 on 1 node, costs"
                " 10.25 GPU h: use --budget 10.25 or more"
            ),
        ),
        (
            ("--deadline", 3, "--budget", 11),
            (
                "no configuration meets both limits; in 3 h the cheapest is 4 a100 on 1 node for"
                " 11.37 GPU h: use --budget 11.37, or a later --deadline"
            ),
        ),
    ],
)
def test_limits_that_no_configuration_meets(run, net, words, expected):
    code, out, err = run(net, "--epochs", 10, *words)
    assert (code, out, err) == (1, "", f"selastic: {expected}\n")
    # The advice suffices.
    options = dict(zip(words[::2], words[1::2], strict=True))
    advice = expected.split("use ")[1].replace(",", "").split()
    enough = run(
        net, "--epochs", 10, *[w for o in (options | {advice[0]: advice[1]}).items() for w in o]
    )
    assert enough[0] == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--price", "a100=3"), "--price: no price for v100: add v100=X"),
        (
            ("--price", "a100=3,v100=1,h100=9"),
            '--price: "h100" is unknown; known: a100, v100',
        ),
        (("--price", "a100"), '--price: "a100" is invalid: expected NAME=NUMBER'),
        (("--deadline", "nan"), '--deadline: "nan" is invalid: expected a number above 0'),
        (("--budget", "-1"), '--budget: "-1" is invalid: expected a number above 0'),
        (("--epochs", "0.5"), '--epochs: "0.5" is invalid: expected a whole number above 0'),
        (("--batch", "7"), "--batch: nothing was measured with 7 samples per GPU; known: 10"),
        (("--global-batch", "7"), "--global-batch: nothing was measured with 7 samples per step"),
        (("--batch", "10", "--global-batch", "40"), "--global-batch cannot be combined with"),
        (("--model", "other"), '--model: "other" is unknown; known: net'),
        (("--model", "layers=5"), "--model: gradient-bytes, batch, compute missing; write"),
        (("--model", "depth=5"), '--model: "depth" is unknown; known: name, layers'),
        (("--model", "layers=5,layers=6"), "--model: duplicate key layers"),
        (
            ("--model", "layers=x,gradient-bytes=1,batch=1,compute=1"),
            '--model: layers: "x" is invalid: expected a whole number above 0',
        ),
        (
            ("--model", "layers=5,gradient-bytes=1,batch=1,compute=1"),
            "--model: compute is ambiguous: expected compute.TYPE, e.g. compute.a100=SECONDS;",
        ),
        (
            ("--model", "layers=5,gradient-bytes=1,batch=1,compute.h100=1"),
            "--model: nothing was profiled on h100; profiled: a100, v100",
        ),
        (
            ("--model", "layers=5,gradient-bytes=1,batch=1,compute.v100=1"),
            (
                "1 a100 on 1 node, 4 a100 on 1 node, 8 a100 on 2 nodes: the computing time of a"
                " step on one a100 is unknown; 4 v100 on 1 node: 1 model profiled, 3 are needed"
            ),
        ),
        (("net.json",), "duplicate profile net.json"),
        (("none.json",), "none.json: No such file or directory"),
        (("--plot", "x.gif"), 'x.gif: no format ".gif"; end the name in .png, .svg, .pdf'),
        (("-o", "nobody"), '--format: "nobody" is unknown; known: type'),
    ],
)  # fmt: skip
def test_wrong_options(run, net, words, expected):
    code, out, err = run(net, *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"selastic: {expected}")
    assert err.count("\n") == 1


def test_wrong_profiles(run, net, tmp_path):
    assert run() == (
        2,
        "",
        "selastic: --profile is missing: name an output file of `selastic profile`\n",
    )
    changed = body()
    changed["configurations"][0]["compute"]["seconds"] = 0.5
    for name, content, expected in (
        (
            "other",
            body("other"),
            "the profiles are of several models: add --model, one of net, other",
        ),
        ("apart", changed, "net.json and bad.json contradict each other: compute of net on 1 a100"),
        (
            "layers",
            body(layers=9),
            "the profiles are of several models: add --model, one of net of",
        ),
        (
            "samples",
            body(samples=9),
            "net.json and bad.json contradict each other: an epoch of net",
        ),
        (
            "version",
            body(profile=9),
            "bad.json: profile: 9 is invalid: expected 1; measure it anew",
        ),
        (
            "empty",
            body(configurations=[]),
            "bad.json: configurations: [] is invalid: expected a list of 1 to 1000",
        ),
    ):
        (tmp_path / "bad.json").write_text(json.dumps(content))
        code, out, err = run(net, "bad.json")
        assert (name, code, out) == (name, 2, "")
        assert err.startswith(f"selastic: {expected}")
        assert err.count("\n") == 1
    single = body(samples=None)
    (tmp_path / "bad.json").write_text(json.dumps(single))
    assert (
        run("bad.json")[2] == "selastic: the samples per epoch of net are unknown: add --samples\n"
    )
    for row in single["configurations"]:
        row["repeats"] = 1
    (tmp_path / "bad.json").write_text(json.dumps(single))
    code, out, err = run("bad.json", "--samples", 9)
    assert (code, out) == (2, "")
    assert "measured once, so its spread is unknown; repeat it, or give --once" in err
    assert run("bad.json", "--samples", 9, "--once")[0] == 0
    (tmp_path / "bad.json").write_text(json.dumps(body(samples=None, model="e\x1b[31m")))
    assert "\x1b" not in run("bad.json")[2]


def test_the_page_shows_real_output(run, monkeypatch, tmp_path):
    """If this fails: update docs/recommend.md."""
    require("python/matplotlib")
    text = (TOP / "docs" / "recommend.md").read_text()
    blocks = re.findall(r"```\n\$ selastic recommend (.*?)\n(.*?)```", text, re.DOTALL)
    assert len(blocks) > 4
    for path in (TOP / "tests" / "data" / "profiles").iterdir():
        shutil.copy(path, tmp_path)
    for line, shown in blocks:
        arguments = [
            sorted(p.name for p in tmp_path.glob(w)) if "*" in w else [w] for w in line.split()
        ]
        code, out, err = run(*[w for part in arguments for w in part])
        assert (line, out + err) == (line, shown)
        assert code == (1 if err else 0)
