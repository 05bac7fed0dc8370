"""contrib/ansible: the configuration that the role writes can be read."""

import json
from pathlib import Path

import jinja2
import pytest

from slurm_elastic.config import schema

ROLE = Path(__file__).parents[3] / "contrib" / "ansible" / "slurm_elastic"


@pytest.fixture
def written():
    """Return the contents of elastic.toml that the role writes, by its variables."""
    # As Ansible does: a line that is only a tag leaves none.
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["to_json"] = json.dumps
    template = environment.from_string((ROLE / "templates" / "elastic.toml.j2").read_text("utf-8"))

    def render(mode="observe", partitions=(), api="", configuration=""):
        names = {"mode": mode, "partitions": list(partitions), "api": api}
        names["configuration"] = configuration
        return template.render({f"slurm_elastic_{name}": value for name, value in names.items()})

    return render


def test_the_configuration_of_the_role_is_valid(written):
    config = schema.parse(written(mode="act", partitions=["gpu"], api="ctl1:7321"))
    assert config.controller.mode == "act"
    assert config.controller.partitions == ("gpu",)
    assert config.api.controller == "ctl1:7321"
    assert schema.parse(written()).controller.mode == "observe"


def test_a_text_of_the_site_takes_the_place_of_all_settings(written):
    config = schema.parse(written(mode="act", configuration="[slurm]\nlease_s = 99"))
    assert (config.controller.mode, config.slurm.lease_s) == ("observe", 99.0)
