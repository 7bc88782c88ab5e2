"""Writes the report of a comparison: one page, the same tables as Markdown, every figure as JSON.

Decisions: the report depends on the records alone; each file is written whole or not at all.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forklora.recipes.comparison import read_comparison
from forklora.recipes.comparison_page import comparison_html
from forklora.recipes.comparison_parts import Comparison
from forklora.recipes.comparison_tables import comparison_tables, reached_figure, signed_difference
from forklora.recipes.comparison_words import facts, verdict
from forklora.recipes.files import write_json, write_text
from forklora.recipes.summary import MISSING, figure
from forklora.recipes.tables import Table, markdown_lines


def write_comparison(folder: Path) -> dict[str, Any]:
    """Write ``report.html``, ``report.md`` and ``report.json`` beside the records of a comparison.

    Returns:
        What report.json holds, with ``title``, ``rows`` (of the results, as text) and ``failures`` (lines).

    Raises:
        Refusal: the folder holds no comparison.
    """
    found = read_comparison(folder)
    tables = comparison_tables(found)
    runs = [{key: value for key, value in asdict(run).items() if key != "record"} for run in found.runs]
    content = {
        "title": f"{found.grid['name']}: {found.grid['description']}",
        "verdict": verdict(found),
        "facts": facts(found),
        "rows": _rows(found),
        "failures": list(found.failures),
        "tables": [asdict(table) for table in tables],
        "entries": [asdict(entry) for entry in found.entries],
        "overall": [asdict(one) for one in found.overall],
        "checks": asdict(found.checks),
        "runs": runs,
    }
    content = _plain(content)
    write_text(folder / "report.md", comparison_markdown(found, tables))
    write_text(folder / "report.html", comparison_html(found, tables))
    write_json(folder / "report.json", content)
    return content


def comparison_rows(found: dict[str, Any]) -> list[dict[str, str]]:
    """The results as rows for a terminal."""
    return found["rows"]


def _rows(found: Comparison) -> list[dict[str, str]]:
    baseline = found.grid["baseline"]
    targets = {task["name"]: task["target"] for task in found.grid["tasks"]}
    return [
        {
            "task": entry.task,
            "arm": entry.arm,
            "optimizer": entry.optimizer,
            "numbers": figure(entry.trained, ",.0f"),
            "start": figure(entry.start),
            "end": figure(entry.final),
            f"less {baseline}": MISSING if entry.arm == baseline else signed_difference(entry.difference),
            "rollouts to target": reached_figure(entry, entry.rollouts_to_target) if targets[entry.task] else MISSING,
        }
        for entry in found.entries
    ]


def comparison_markdown(found: Comparison, tables: Sequence[Table]) -> str:
    """The report as Markdown: what was compared, what came out, all tables but the list of runs."""
    grid = found.grid
    lines = [f"# {grid['name']}", "", grid["description"], "", verdict(found), ""]
    lines += [f"- {what}: {said}" for what, said in facts(found).items()]
    return "\n".join([*lines, *markdown_lines(tables)]) + "\n"


def _plain(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Keys of mappings as text, tuples as lists."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
