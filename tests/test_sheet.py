"""A sheet is one page that loads nothing and escapes what it is given, and the same in Markdown."""

import re

import pytest
from forklora.recipes.plots import Series, line_chart
from forklora.recipes.sheet import Plots, Sheet, sheet_html, sheet_markdown
from forklora.recipes.tables import Table

EVIL = '<script>alert("1")</script>'


@pytest.fixture
def sheet():
    drawing = line_chart([Series(EVIL, 0, [(0, 1), (1, 2)])], titles=("x", "y"), description=EVIL, size=(300, 200))
    tables = [Table("open", ("what", "figure"), ((EVIL, "0.5"),)), Table("closed", ("a",), (("b",),), folded=True)]
    return Sheet("kind", EVIL, "lead", {"fact": "said"}, tables, [Plots("drawn", "note", [("", drawing)])])


def test_the_page_needs_no_script_loads_nothing_and_escapes_everything(sheet):
    page = sheet_html(sheet)
    assert "<script" not in page
    assert not re.search(r'(?:src|href)="(?!data:,|#)', page) and "url(" not in page and "@import" not in page
    assert "default-src 'none'" in page
    assert page.count("&lt;script&gt;") >= 4
    assert "lead" in page and "said" in page and "<svg" in page and "<details" in page
    assert page == sheet_html(sheet)


def test_markdown_holds_what_stands_open(sheet):
    said = sheet_markdown(sheet)
    assert f"| {EVIL} | 0.5 |" in said and "- fact: said" in said
    assert "closed" not in said and "| --- | ---: |" in said
