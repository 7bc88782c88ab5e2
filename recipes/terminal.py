"""Tables of what came out, for people at a terminal."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forklora.recipes.tables import Table
    from rich.console import RenderableType
    from rich.table import Table as RichTable


def show(what: "RenderableType") -> None:
    """Print a table, or whatever else rich can print, on stdout."""
    from rich.console import Console

    # A pipe has no width of its own; 120 columns keep the rows whole in logs.
    Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 120).print(what)


def table(rows: Sequence[Mapping[str, Any]], *, title: str) -> "RichTable":
    """A table with one line per row; the first row's keys are the headings."""
    from rich.table import Table as RichTable

    made = RichTable(title=title, title_justify="left")
    for heading, value in (rows[0] if rows else {}).items():
        made.add_column(heading, justify="left" if isinstance(value, str) else "right", overflow="fold")
    for row in rows:
        made.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    return made


def shown_table(found: "Table") -> "RichTable":
    """A table of a page, for a terminal."""
    from rich.table import Table as RichTable

    made = RichTable(title=found.title, title_justify="left")
    for i, heading in enumerate(found.headings):
        made.add_column(heading, justify="left" if i < found.words else "right", overflow="fold")
    for row in found.rows:
        made.add_row(*row)
    return made


def side_by_side(rows: Sequence[Mapping[str, str]], *, title: str) -> "RichTable":
    """A table with one column per row, for rows of many short entries; errors are left out where there are none."""
    from forklora.recipes.summary import MISSING

    headings, *others = rows[0]
    lines = [{headings: other, **{row[headings]: row[other] for row in rows}} for other in others]
    return table([line for line in lines if {*line.values()} != {"error", MISSING}], title=title)
