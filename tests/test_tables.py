"""Tables as Markdown keep their columns whatever stands in a cell."""

from forklora.recipes.tables import Table, markdown_lines


def test_cells_keep_their_columns():
    table = Table("t", ("a", "b"), (("x|y", "1\n2"),), note="n")
    lines = list(markdown_lines([table, Table("folded", ("a",), (("b",),), folded=True)]))
    assert lines == ["", "## t", "", "n", "", "| a | b |", "| --- | ---: |", r"| x\|y | 1 2 |"]
