"""The folder of a run into one self-contained HTML page: reads the arms' records and token files, writes report.html.

What stands on the page is a pure function of those files (see page.py): no clock, no model, no network.
"""

import json
from pathlib import Path
from typing import Any

from forklora.recipes.files import write_text
from forklora.recipes.page import render_page
from forklora.recipes.summary import Record, summary_markdown, summary_table

__all__ = ["read_arms", "summary_markdown", "summary_table", "write_report"]


def write_report(folder: Path) -> Path:
    """Read every <folder>/*/record.json with its trace/tokens.json and write <folder>/report.html, whole or not at all.

    Returns the page's path. Raises FileNotFoundError if no arm has a record yet.
    """
    arms = read_arms(folder)
    page = folder / "report.html"
    write_text(page, render_page([record for record, _ in arms], [trace for _, trace in arms]))
    return page


def read_arms(folder: Path) -> list[tuple[Record, Record | None]]:
    """(record, content of tokens.json or None) of every arm, in the recipe's order.

    An unreadable record becomes a failed one that names the cause. Raises FileNotFoundError if no arm has a record.
    """
    paths = sorted(folder.glob("*/record.json"))
    if not paths:
        raise FileNotFoundError(
            f"no arm under {folder} has a record.json; `forklora run RECIPE output={folder}` writes them"
        )
    arms = [(_read_record(path), _read_trace(path.parent / "trace" / "tokens.json")) for path in paths]
    listed = [arm.get("name") for record, _ in arms for arm in (record.get("recipe") or {}).get("arms") or []]
    places = {name: place for place, name in enumerate(dict.fromkeys(listed))}
    return sorted(arms, key=lambda arm: (places.get(arm[0]["arm"], len(places)), str(arm[0]["arm"])))


def _read_object(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"holds a {type(content).__name__} where an object was expected")
    return content


def _read_record(path: Path) -> Record:
    try:
        return {"arm": path.parent.name} | _read_object(path)
    except (OSError, ValueError) as error:
        return {"arm": path.parent.name, "status": "failed", "error": f"record.json could not be read: {error}"}


def _read_trace(path: Path) -> Record | None:
    try:
        return _read_object(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return {"problem": f"trace/tokens.json could not be read: {error}"}
