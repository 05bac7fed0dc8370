"""Description of one configuration key, kept in the metadata of its dataclass field.

>>> from dataclasses import dataclass, fields
>>> @dataclass(frozen=True)
... class Settings:
...     interval_s: float = key(30.0, "Seconds between rounds.", bounds=(1, 3600))
>>> Settings().interval_s, key_of(fields(Settings)[0]).description
(30.0, 'Seconds between rounds.')
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_METADATA = "key"
_TITLE = "title"


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """Description and permitted values of a key; elastic.toml(5) and the reader use both.

    Attributes:
        description: English; one line where possible.
        bounds: smallest and largest number, also of a table's values.
        choices: permitted words, also of a list's items.
        names: permitted names in a table.
        parse: checks a text; its ValueError names the expected form.
    """

    description: str
    bounds: tuple[float, float] | None = None
    choices: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    parse: Callable[[str], object] | None = None


def key(
    default: Any,
    description: str,
    *,
    bounds: tuple[float, float] | None = None,
    choices: tuple[str, ...] = (),
    names: tuple[str, ...] = (),
    parse: Callable[[str], object] | None = None,
) -> Any:
    """Return a dataclass field with this default and the description of its key."""
    described = ConfigKey(description, bounds, choices, names, parse)
    metadata = {_METADATA: described}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def key_of(field: dataclasses.Field[Any]) -> ConfigKey:
    """Return the description of the key that a field made by `key` holds."""
    described: ConfigKey = field.metadata[_METADATA]
    return described


def section(settings: type[Any], title: str) -> Any:
    """Return a dataclass field for one section of the file, with its title."""
    return dataclasses.field(default_factory=settings, metadata={_TITLE: title})


def title_of(field: dataclasses.Field[Any]) -> str:
    """Return the title of the section that a field made by `section` holds."""
    title: str = field.metadata[_TITLE]
    return title
