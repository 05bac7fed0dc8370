"""Plain tables with Slurm's options: columns, no header, parsable.

A column is named by its header, as for sacct: `-o jobid,name%20,gpus`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slurm_elastic.cli.exit_codes import USAGE, CliError
from slurm_elastic.cli.formatting import clean

_FIELD = re.compile(r"(\w+)(?:%(-?)(\d+))?")


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a table.

    Attributes:
        value: returns the text of a row.
        most: longer texts are cut, but not in parsable output.
        width: as given with -o; else that of the longest text.
    """

    header: str
    value: Callable[[Any], str]
    right: bool = False
    most: int = 1000
    width: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLayout:
    """Values of the options -o, -h and -P."""

    columns: str = ""
    header: bool = True
    parsable: bool = False


def render(
    rows: Sequence[Any], columns: Sequence[Column], default: Sequence[str], layout: TableLayout
) -> list[str]:
    """Return the lines of a table.

    Args:
        rows: arguments of the columns' `value`.
        columns: all columns.
        default: headers of the columns that are shown without -o.
        layout: the user's options.

    Raises:
        CliError: -o names a column that does not exist.
    """
    columns_by_header = {c.header: c for c in columns}
    chosen = (
        _chosen(layout.columns, columns_by_header)
        if layout.columns
        else [columns_by_header[h] for h in default]
    )
    cells = [[clean(c.value(row)) for c in chosen] for row in rows]
    if layout.header:
        cells.insert(0, [c.header for c in chosen])
    if layout.parsable:
        # A job's name may contain the separator; scripts rely on the number of fields.
        return ["|".join(text.replace("|", "?") for text in row) for row in cells]
    widths = [_width(column, i, cells) for i, column in enumerate(chosen)]
    return [_line(row, chosen, widths) for row in cells]


def _width(column: Column, index: int, cells: Sequence[Sequence[str]]) -> int:
    """Return the width of the longest text; one that ends its row may be longer."""
    if column.width:
        return column.width
    texts = [row[index] for row in cells if index == len(row) - 1 or any(row[index + 1 :])]
    return min(column.most, max(map(len, texts), default=0))


def _line(row: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    last = max((i for i, text in enumerate(row) if text), default=0)
    texts = []
    for i, (text, column, width) in enumerate(zip(row, columns, widths, strict=True)):
        cell_width = column.most if i == last and column.width is None else width
        shortened = text if len(text) <= cell_width else text[: cell_width - 1] + "+"
        texts.append(shortened.rjust(width) if column.right else shortened.ljust(width))
    return "  ".join(texts).rstrip()


def _chosen(text: str, columns_by_header: Mapping[str, Column]) -> list[Column]:
    chosen = []
    for word in text.split(","):
        match = _FIELD.fullmatch(word.strip())
        column = columns_by_header.get(match[1].upper()) if match else None
        if match is None or column is None:
            names = ", ".join(h.lower() for h in columns_by_header)
            raise CliError(f'--format: "{clean(word)}" is unknown; known: {names}', USAGE)
        if match[3]:
            # As with sacct: %8 aligns right, %-8 left.
            column = replace(column, right=match[2] != "-", width=int(match[3]) or None)
        chosen.append(column)
    return chosen
