"""Each of several controllers finds itself."""

import socket

import pytest

from slurm_elastic.config.schema import ConfigError, parse
from slurm_elastic.controller.leader.controller_addresses import own_address

HERE = socket.gethostname()


def own(controller, listen="0.0.0.0:7321"):
    return own_address(parse(f'[api]\ncontroller = "{controller}"\nlisten = "{listen}"'))


def test_one_address_is_no_matter_of_standing_by():
    assert own("anywhere.invalid:7321") == ""


def test_by_host_name_by_local_address_and_by_port():
    assert own(f"far.invalid:7321, {HERE}:7321") == f"{HERE}:7321"
    assert own("127.0.0.1:7321,203.0.113.1:7321") == "127.0.0.1:7321"
    assert own("127.0.0.1:7321,127.0.0.1:7322", "0.0.0.0:7322") == "127.0.0.1:7322"


@pytest.mark.parametrize(
    ("controller", "said"),
    [
        ("203.0.113.1:7321,203.0.113.2:7321", "none of these is this daemon"),
        ("127.0.0.1:7322,203.0.113.2:7321", "none of these is this daemon"),
        ("127.0.0.1:7321,127.0.0.1", "more than one of these is this daemon"),
        ("127.0.0.1:x,203.0.113.2:7321", "write HOST:PORT"),
    ],
)
def test_what_cannot_be_is_one_line(controller, said):
    with pytest.raises(ConfigError, match=said):
        own(controller)
