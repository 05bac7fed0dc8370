"""The example configuration is generated from the schema."""

import re

from slurm_elastic.cli import main
from slurm_elastic.config import schema
from slurm_elastic.config.documentation import example


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
