"""The report's files: the same records give the same bytes, JSON holds every figure, nothing half written."""

import json
from pathlib import Path

import pytest
from forklora.recipes.cli import main
from forklora.recipes.comparison import read_comparison
from forklora.recipes.comparison_report import comparison_rows, write_comparison
from forklora.recipes.comparison_tables import comparison_tables
from forklora.recipes.refusal import Refusal

from test_comparison import TASKS, accuracy, reached
from tiny_grid import fill, grid_of

FILES = ("report.html", "report.json", "report.md")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    grid = grid_of(tmp_path_factory.mktemp("report"), tasks=TASKS, seeds=[0, 1, 2])
    fill(grid, accuracy, reached=reached)
    return Path(grid.output)


def test_the_same_records_give_the_same_bytes(folder):
    told = write_comparison(folder)
    first = [(folder / name).read_bytes() for name in FILES]
    assert json.loads(first[1]) == told
    write_comparison(folder)
    assert [(folder / name).read_bytes() for name in FILES] == first
    assert not list(folder.glob("*.partial")) and not list(folder.glob(".*partial"))


def test_every_cell_of_every_table_stands_in_json_and_markdown(folder):
    told = write_comparison(folder)
    tables = comparison_tables(read_comparison(folder))
    markdown = (folder / "report.md").read_text()
    assert [table["title"] for table in told["tables"]] == [table.title for table in tables]
    for table in (table for table in tables if not table.folded):
        for row in table.rows:
            assert f"| {' | '.join(row)} |" in markdown


def test_rows_for_the_terminal_have_one_shape(folder):
    rows = comparison_rows(write_comparison(folder))
    assert [(row["task"], row["arm"]) for row in rows] == [
        ("products", "plain"), ("products", "ours"), ("sums", "plain"), ("sums", "ours"),
    ]  # fmt: skip
    assert len({tuple(row) for row in rows}) == 1


def test_a_folder_without_a_comparison_gets_no_report(tmp_path):
    with pytest.raises(Refusal):
        write_comparison(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_runs_are_written_in_pefts_schema_where_asked(folder, tmp_path, capsys):
    assert main(["report", str(folder), "--peft", str(tmp_path / "peft")]) == 0
    files = sorted((tmp_path / "peft").iterdir())
    assert f"{len(files)} files" in capsys.readouterr().out
    done = [run for run in read_comparison(folder).runs if run.round == "report" and run.status == "done"]
    names = {json.loads(file.read_text())["run_info"]["experiment_name"] for file in files}
    assert len(names) == len(files) == len(done) > 0
