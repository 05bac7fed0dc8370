"""Both formats of layer profiles; errors name file and line."""

import json

import pytest

from slurm_elastic.core.layers import Layer, LayerError, LayerProfile, chain
from slurm_elastic.models.pipedream import profile_reader
from slurm_elastic.models.pipedream.profile_reader import LayerProfileError, as_json, read

COSTS = (
    "forward_compute_time=1.5, backward_compute_time=2.500, "
    "activation_size=100.0, parameter_size=8.000"
)
TEXT = f"""\
node1 -- Input0 -- {COSTS}
node2 -- Conv2d(3, 64, kernel_size=(3, 3)) -- {COSTS}
node3 -- LSTM(4) -- {COSTS.replace("100.0", "[100.0; 20.0]")} -- stage_id=2
node4 -- __getitem__(1) -- {COSTS}
node5 -- a -- b -- {COSTS}
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node4
\tnode3 -- node5
\tnode3 -- node5
"""


@pytest.fixture
def write(tmp_path):
    def made(text):
        path = tmp_path / "p.txt"
        path.write_text(text)
        return path

    return made


def test_pipedreams_format(write):
    found = read(write(TEXT))
    assert found.layers == (
        Layer("node2", 0.0015, 0.0025, 100.0, 8.0, "Conv2d(3, 64, kernel_size=(3, 3))"),
        Layer("node3", 0.0015, 0.0025, 120.0, 8.0, "LSTM(4)"),
        Layer("node5", 0.0015, 0.0025, 100.0, 8.0, "a -- b"),
    )
    assert found.edges == (("node2", "node3"), ("node3", "node5"))


def test_our_format_goes_there_and_back(write):
    found = read(write(TEXT))
    assert read(write(json.dumps(as_json(found)))) == found


def test_without_after_a_layer_reads_the_one_before(write):
    rows = [
        {"name": n, "forward_s": 1, "backward_s": 2.5, "activation_bytes": 3, "parameter_bytes": 4}
        for n in "abc"
    ]
    found = read(write(json.dumps({"layers": rows})))
    assert found == chain(Layer(n, 1.0, 2.5, 3.0, 4.0) for n in "abc")
    rows[2]["after"] = ["a", "b"]
    assert read(write(json.dumps({"layers": rows}))).edges == (("a", "b"), ("a", "c"), ("b", "c"))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "\tnode3 -- node4",
            "\tnode5 -- node2",
            ":7: layers form a cycle: node2 -> node3 -> node5",
        ),
        ("backward_compute_time=2.500", "backward_compute_time=-2", ":1: layer node1: backward_s"),
        (
            "parameter_size=8.000",
            "parameter_size=inf",
            ":1: layer node1: parameter_bytes inf is invalid",
        ),
        ("parameter_size=8.000", "parameter_size=big", ":1: parameter_size=big is no number"),
        ("parameter_size=8.000", "", ":1: node1 has no parameter_size"),
        ("\tnode2 -- node3\n", "", ":3: layer node3 is not connected with node2: add the edge"),
        ("\tnode2 -- node3", "\tnode2 -- node9", ":7: no layer is named node9"),
        ("\tnode2 -- node3", "\tnode2", ":7: no edge: write <TAB>nodeA -- nodeB"),
        ("\tnode2 -- node3", "\tnode2 -- node2", ":7: node2 reads itself"),
        ("node2 -- Conv", "node3 -- Conv", ":3: duplicate layer node3, first at line 2"),
        ("node2 -- Conv", "nothing like a layer\nnode2 -- Conv", ":2: no layer: write NAME --"),
    ],
)
def test_text_that_cannot_be(write, old, new, said):
    assert old in TEXT
    path = write(TEXT.replace(old, new))
    with pytest.raises(LayerProfileError) as caught:
        read(path)
    text = str(caught.value)
    assert text.startswith(f"{path}{said}"), text
    assert "\n" not in text


ROW = {"name": "a", "forward_s": 1, "backward_s": 1, "activation_bytes": 1, "parameter_bytes": 1}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("{", ":1: no JSON:"),
        ("[" * 100_000, ": nested too deeply"),
        ([], ': no layer profile: the JSON needs a list "layers"'),
        ({"version": 2, "layers": [ROW]}, ": version 2 is unknown; known: 1"),
        ({"layers": []}, ": the profile has no layers"),
        ({"layers": [1]}, ': layers[0]: a layer is an object with a "name"'),
        ({"layers": [ROW, ROW]}, ": layers[1]: duplicate layer 'a'"),
        ({"layers": [ROW | {"forward_s": "1"}]}, ": layers[0] (a): forward_s must be a number"),
        ({"layers": [ROW | {"forward_s": True}]}, ": layers[0] (a): forward_s must be a number"),
        ({"layers": [ROW | {"forward_s": -1}]}, ": layers[0]: layer a: forward_s -1 is invalid"),
        ({"layers": [ROW | {"forward_s": 10**400}]}, ": layers[0] (a): forward_s is too large"),
        ({"layers": [ROW | {"after": "a"}]}, ': layers[0]: "after" must be a list of names'),
        ({"layers": [ROW | {"after": ["b"]}]}, ": edge b -> a: layer 'b' does not exist"),
        ({"layers": [ROW | {"after": ["a"]}]}, ": layers form a cycle: a -> a"),
    ],
)
def test_json_that_cannot_be(write, data, said):
    path = write(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(LayerProfileError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}{said}"), caught.value


def test_files_that_cannot_be(tmp_path, write):
    for given, said in (
        (tmp_path / "none", "No such file or directory"),
        (tmp_path, "Is a directory"),
        ("", "empty: a layer profile has a line per layer"),
        (TEXT.splitlines()[0], "nothing but inputs"),
    ):
        path = write(given) if isinstance(given, str) else given
        with pytest.raises(LayerProfileError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: {said}")
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LayerProfileError, match="not text"):
        read(path)


def test_a_long_cycle_is_cut_short():
    layers = tuple(Layer(f"n{i}", 1.0, 1.0, 1.0, 1.0) for i in range(50))
    edges = tuple((f"n{i}", f"n{(i + 1) % 50}") for i in range(50))
    with pytest.raises(LayerError, match=r"cycle: n0 -> n1 -> n2 -> \.\.\. -> n48 -> n49 -> n0;"):
        LayerProfile(layers, edges)


def test_topological_order_keeps_the_given_one_where_it_can():
    layers = tuple(Layer(n, 1.0, 1.0, 1.0, 1.0) for n in "dabc")
    found = LayerProfile(layers, (("a", "b"), ("b", "c"), ("c", "d")))
    assert [found.layers[i].name for i in found.topological()] == list("abcd")
    assert profile_reader.as_json(found)["layers"][0]["after"] == ["c"]
