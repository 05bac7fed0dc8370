"""The example configuration is generated from the schema."""

import re

from slurm_elastic.cli import main
from slurm_elastic.config import schema
from slurm_elastic.config.documentation import example, sections


def test_the_example_has_every_key_with_its_default():
    text = re.sub(r"^#(\w+ = )", r"\1", example(), flags=re.MULTILINE)
    assert schema.parse(text) == schema.Config()
    assert text.count(" = ") >= sum(
        len(vars(getattr(schema.Config(), s))) for s in vars(schema.Config())
    )


def test_the_commented_example_is_the_defaults():
    assert schema.parse(example()) == schema.Config()


def test_selastic_config_prints_the_example(capsys):
    assert main.run(["config"]) == 0
    assert capsys.readouterr().out == example()


def test_every_key_has_a_description_and_sections_have_titles():
    for section, title, keys in sections():
        assert title, section
        assert [key.name for key in keys if not key.description.endswith(".")] == []
