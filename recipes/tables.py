"""A table as it is shown: the same rows of text for a page, for Markdown and for a terminal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table as it is shown.

    Attributes:
        title: what it holds.
        headings: of its columns.
        rows: of text, as many entries as there are headings.
        words: how many of the first columns hold words; the others hold numbers.
        note: what has to be known to read it.
        folded: whether a page keeps it closed at first.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    note: str = ""
    folded: bool = False


def markdown_lines(tables: Sequence[Table]) -> Iterator[str]:
    """Tables as Markdown, each under its title; folded ones are left out."""
    for table in (table for table in tables if not table.folded):
        yield from ("", f"## {table.title}", "", *([table.note, ""] if table.note else []))
        yield _cells(table.headings)
        yield _cells(["---" if i < table.words else "---:" for i in range(len(table.headings))])
        yield from map(_cells, table.rows)


def _cells(row: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in row)} |"
