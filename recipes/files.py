"""Writes files whole or not at all, and finds out beforehand where nothing can be written."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from forklora.recipes.refusal import Refusal


def write_json(path: Path, content: Any) -> None:  # noqa: ANN401 - any JSON value
    """Write a value as JSON under a temporary name first, then in its place; missing folders are made.

    Raises:
        ValueError: a number is not finite, which JSON cannot say; nothing is written.
        OSError: the file cannot be written; what stood there before is untouched.
    """
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, content: str) -> None:
    """Write a text under a temporary name first, then in its place; missing folders are made.

    Raises:
        OSError: the file cannot be written; what stood there before is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(content, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def check_writable(folder: Path, purpose: str) -> None:
    """Refuse a folder that nothing can be written to; a missing one is made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Refusal(f"cannot write to {folder} ({error.strerror}), {purpose}") from error
