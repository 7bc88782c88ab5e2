"""Tells checkpoints that were written to their end from those that a crash cut short.

Decisions: a checkpoint is whole once it is sealed, with one file that lists all others with their sizes and is written
last; whoever resumes takes the latest sealed one, and one that is cut short is never read.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

SEAL = "sealed.json"
_PREFIX = "checkpoint-"


def seal(folder: str | Path) -> None:
    """Declare a checkpoint whole: everything in it reaches the disk, then the list of its files appears at once."""
    folder = Path(folder)
    sizes = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != SEAL):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
    partial = folder / f".{SEAL}.partial"
    partial.write_text(json.dumps({"files": sizes}, indent=1) + "\n", encoding="utf-8")
    partial.replace(folder / SEAL)


def break_seal(folder: str | Path) -> None:
    """Before a checkpoint is written (again): it is not whole until it is sealed."""
    (Path(folder) / SEAL).unlink(missing_ok=True)


def what_is_missing(folder: str | Path) -> str | None:
    """Why a checkpoint cannot be trusted, in words; None if it is whole."""
    folder = Path(folder)
    try:
        sizes = json.loads((folder / SEAL).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return "it was never finished"
    except (ValueError, KeyError):
        return f"its {SEAL} is damaged"
    wrong = [name for name, size in sizes.items() if not _has_size(folder / name, size)]
    return f"{len(wrong)} of its files are missing or cut short ({', '.join(wrong[:2])})" if wrong else None


def latest_whole(folder: str | Path) -> Path | None:
    """The sealed checkpoint of the highest step in a trainer's output folder."""
    found = (p for p in Path(folder).glob(f"{_PREFIX}*") if p.name[len(_PREFIX) :].isdecimal() and p.is_dir())
    whole = [p for p in found if what_is_missing(p) is None]
    return max(whole, key=lambda p: int(p.name[len(_PREFIX) :]), default=None)


def checked(folder: str | Path) -> Path:
    """The folder, if it is a whole checkpoint.

    Raises:
        ValueError: it is not; the message names the latest whole one beside it.
    """
    folder = Path(folder)
    missing = what_is_missing(folder) if folder.is_dir() else "there is no such folder"
    if missing is None:
        return folder
    other = latest_whole(folder.parent) if folder.parent.is_dir() else None
    way_out = "there is no whole one beside it; start anew" if other is None else f"resume from {other}"
    raise ValueError(f"cannot resume from {folder}: {missing}; {way_out}.")


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size
