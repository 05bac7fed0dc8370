"""Loading of policies: capabilities are checked, errors name policy, culprit and remedy."""

import doctest
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from slurm_elastic.cli import main as cli
from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.controller import daemon
from slurm_elastic.core.plan import Alternative
from slurm_elastic.core.reason import Reason
from slurm_elastic.policies import policy_protocol
from slurm_elastic.policies.policy_protocol import (
    Capabilities,
    Policy,
    PolicyError,
    capabilities_of,
    known,
    load,
)


class Plain:
    """Policy without capabilities."""

    def __init__(self, config): ...

    def decide(self, question, state):
        return (), state


def settings(name="site"):
    return Config(controller=ControllerSettings(policy=name))


@pytest.fixture
def install(monkeypatch):
    """Install a policy as `site`; given as a class, or as a function that returns one."""

    def installed(policy=None, *, load=None):
        entry = SimpleNamespace(
            name="site", value="mysite.policy:Mine", load=load or (lambda: policy)
        )
        monkeypatch.setattr(policy_protocol, "entry_points", lambda group: [entry])
        return settings()

    return installed


def refused(config):
    with pytest.raises(PolicyError) as caught:
        load(config)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("policy site (mysite.policy:Mine): ")
    return text.removeprefix("policy site (mysite.policy:Mine): ")


def test_the_example_of_the_documentation_runs():
    tried = doctest.testmod(policy_protocol)
    assert (tried.failed, tried.attempted > 3) == (0, True)


def test_what_sites_may_rely_on_can_be_imported():
    assert all(hasattr(policy_protocol, name) for name in policy_protocol.__all__)


@pytest.mark.parametrize("name", known())
def test_every_installed_policy_is_accepted(name):
    assert type(capabilities_of(load(settings(name)))) is Capabilities


def test_a_policy_that_states_nothing_has_the_defaults(install):
    assert capabilities_of(load(install(Plain))) == Capabilities()


def test_so_has_one_that_only_subclasses_the_protocol(install):
    class Mine(Policy):
        def decide(self, question, state):
            return (), state

    assert capabilities_of(load(install(Mine))) == Capabilities()


def test_capabilities_may_depend_on_the_configuration(install):
    class Mine(Plain):
        def __init__(self, config):
            self.capabilities = Capabilities(binding_proposals=config.controller.policy == "site")

    assert capabilities_of(load(install(Mine))).binding_proposals


@pytest.mark.parametrize("binding", [False, True])
def test_measured_speeds_are_simulated_for_policies_that_do_not_bind_placement(binding):
    assert Capabilities(binding_proposals=binding).simulates_measured_speeds is not binding
    for stated in (False, True):
        both = Capabilities(binding_proposals=binding, measured_speeds=stated)
        assert both.simulates_measured_speeds is stated


def test_a_misspelt_capability_is_named_with_the_nearest_one(install):
    def module():
        class Mine(Plain):
            capabilities = Capabilities(binding_propsals=True)

        return Mine

    assert refused(install(load=module)) == (
        "the capability 'binding_propsals' is unknown; did you mean 'binding_proposals'?"
    )


def test_an_unknown_capability_is_named_with_all_that_there_are(install):
    class Mine(Plain):
        def __init__(self, config):
            self.capabilities = Capabilities(colour="blue")

    text = refused(install(Mine))
    assert text.startswith("the capability 'colour' is unknown; known: binding_proposals, ")


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"binding_proposals": 1}, "True, False"),
        ({"binding_proposals": None}, "True, False"),
        ({"batch_chosen_by": "users"}, "'controller', 'policy', 'user'"),
        ({"batch_chosen_by": True}, "'controller', 'policy', 'user'"),
        ({"measured_speeds": "yes"}, "True, False, None"),
    ],
)
def test_a_value_of_another_type_is_named(install, stated, expected):
    class Mine(Plain):
        def __init__(self, config):
            self.capabilities = Capabilities(**stated)

    ((name, value),) = stated.items()
    assert refused(install(Mine)) == (
        f"capability {name}: {value!r} is invalid: expected one of {expected}"
    )


def test_capabilities_are_no_mapping(install):
    class Mine(Plain):
        capabilities = {"binding_proposals": True, "batch_choosen_by": "user"}  # noqa: RUF012

    assert refused(install(Mine)) == (
        "capabilities: dict is invalid: expected Capabilities(...);"
        " the capability 'batch_choosen_by' is unknown; did you mean 'batch_chosen_by'?"
    )


@pytest.mark.parametrize("value", [Capabilities(), {"binding_proposals": True}])
@pytest.mark.parametrize("name", ["capabilites", "CAPABILITIES", "capability"])
def test_a_misspelt_attribute_is_named(install, name, value):
    mine = type("Mine", (Plain,), {name: value})
    assert refused(install(mine)) == (
        f"the attribute {name!r} is unknown; did you mean 'capabilities'?"
    )


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("decisive", True, "write capabilities = Capabilities(binding_proposals=True)"),
        ("decisive", False, "remove it"),
        ("tunes", False, 'write capabilities = Capabilities(batch_chosen_by="user")'),
        ("batches", True, 'write capabilities = Capabilities(batch_chosen_by="policy")'),
        ("moves", False, "write capabilities = Capabilities(allows_repacking=False)"),
        ("measures", True, "write capabilities = Capabilities(measured_speeds=True)"),
        ("measures", False, "write capabilities = Capabilities(measured_speeds=False)"),
        ("analysed", True, "write capabilities = Capabilities(initial_measurements=True)"),
        ("freezes", True, "write capabilities = Capabilities(predicts_frozen_layers=True)"),
    ],
)
def test_the_form_of_release_0_1_is_refused_with_its_successor(install, name, value, remedy):
    of_class = type("Mine", (Plain,), {name: value})
    of_object = type("Mine", (Plain,), {"__init__": lambda self, _: setattr(self, name, value)})
    for mine in (of_class, of_object):
        assert refused(install(mine)) == (
            f"the attribute {name} = {value} of release 0.1 is unknown; {remedy}"
        )


def test_attributes_of_its_own_are_a_policys_own_matter(install):
    class Mine(Plain):
        batches = (64, 128)

        def moves(self):
            return ()

    load(install(Mine))


def test_a_policy_without_decide_is_refused(install):
    assert refused(install(type("Mine", (), {"__init__": lambda *_: None}))) == (
        "it has no method decide; expected decide(question, state)"
    )


def test_one_that_cannot_be_imported_is_one_line(install):
    def module():
        raise ModuleNotFoundError("No module named 'mysite'")

    assert refused(install(load=module)) == (
        "cannot be imported: No module named 'mysite'; install it again"
    )


def test_other_errors_of_its_code_are_shown_as_they_are(install):
    class Mine(Plain):
        def __init__(self):  # does not take the configuration
            pass

    with pytest.raises(TypeError, match="takes 1 positional argument"):
        load(install(Mine))


def test_one_that_is_not_installed_is_named():
    with pytest.raises(PolicyError, match="'fare' is invalid: expected one of dally, "):
        load(settings("fare"))


@pytest.fixture
def unusable(install):
    install(type("Mine", (Plain,), {"decisive": True}))
    return (
        "policy site (mysite.policy:Mine): the attribute decisive = True of release 0.1 is unknown;"
        " write capabilities = Capabilities(binding_proposals=True)\n"
    )


def test_selasticd_does_not_start_with_an_unusable_policy(unusable, tmp_path):
    path = tmp_path / "elastic.toml"
    path.write_text('[controller]\npolicy = "site"\n')
    result = CliRunner().invoke(daemon.main, ["--config", str(path)])
    assert result.exit_code == 1
    assert result.stderr == f"selasticd: {unusable}"


def test_a_simulation_with_an_unusable_policy_is_one_line(unusable, capsys):
    assert cli.run(["simulate", "--policy", "site", "--jobs", "1"]) == 2
    assert capsys.readouterr().err.endswith(f"selastic: {unusable}")


def test_a_sentence_of_a_policy_for_0_1_0_is_a_reason():
    """Such policies state a text, or "" for none."""
    told, silent = (
        Alternative(gpu_type="", gpus=1, value=1.0, reason=text) for text in ("it is Monday", "")
    )
    assert told.reason == Reason("text", text="it is Monday")
    assert silent.reason is None
