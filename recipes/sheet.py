"""Puts what a measurement found on one page that needs no script and loads nothing, or into Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files

import jinja2
from forklora.recipes.summary import figure, text
from forklora.recipes.tables import Table, markdown_lines
from markupsafe import Markup


@dataclass(frozen=True)
class Plots:
    """Drawings that belong together.

    Attributes:
        title: what they show.
        note: what has to be known to read them.
        drawings: each with its caption, which may be empty.
    """

    title: str
    note: str
    drawings: Sequence[tuple[str, Markup]]


@dataclass(frozen=True)
class Sheet:
    """Everything on one page.

    Attributes:
        kicker: what kind of page it is.
        title: what was measured.
        lead: what came out, in a sentence or two.
        facts: how it was measured.
        tables: the figures; folded ones stand closed at the end.
        plots: drawings of them.
        body: markup of its own before all of them.
    """

    kicker: str
    title: str
    lead: str
    facts: dict[str, str]
    tables: Sequence[Table] = ()
    plots: Sequence[Plots] = field(default_factory=tuple)
    body: Markup = Markup("")


def sheet_html(sheet: Sheet) -> str:
    """The page; the same sheet always gives the same bytes."""
    return package_templates().get_template("sheet.html.j2").render(sheet=sheet)


def sheet_markdown(sheet: Sheet) -> str:
    """The words, the facts and the tables that stand open."""
    lines = [f"# {sheet.title}", "", sheet.lead, ""]
    lines += [f"- {what}: {said}" for what, said in sheet.facts.items()]
    return "\n".join([*lines, *markdown_lines(sheet.tables)]) + "\n"


def package_templates() -> jinja2.Environment:
    """The templates that come with the package; what they are given is escaped, what is missing is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (files(__package__) / name).read_text(encoding="utf-8")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"figure": figure, "visible": text, "headline": lambda value: value[:1].upper() + value[1:]}
    return environment
