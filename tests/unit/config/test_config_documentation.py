"""The example configuration is made from the schema, and etc/elastic.toml is it."""

import re
from pathlib import Path

from slurm_elastic.cli import main
from slurm_elastic.config import schema
from slurm_elastic.config.documentation import example

ETC = Path(__file__).parents[3] / "etc" / "elastic.toml"


def test_etc_is_up_to_date():
    """If this fails: `selastic config > etc/elastic.toml`."""
    assert ETC.read_text() == example()


def test_the_example_holds_every_key_with_its_default():
    text = re.sub(r"^#(\w+ = )", r"\1", example(), flags=re.MULTILINE)
    assert schema.parse(text) == schema.Config()
    assert text.count(" = ") >= sum(
        len(vars(getattr(schema.Config(), s))) for s in vars(schema.Config())
    )


def test_the_example_as_it_stands_changes_nothing():
    assert schema.parse(example()) == schema.Config()


def test_selastic_prints_it(capsys):
    assert main.run(["config"]) == 0
    assert capsys.readouterr().out == example()
