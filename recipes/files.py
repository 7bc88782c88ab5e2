"""Writes JSON whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any) -> None:  # noqa: ANN401 - any JSON value
    """Write a value as JSON under a temporary name first, then in its place; missing folders are made.

    Raises:
        ValueError: a number is not finite, which JSON cannot say; nothing is written.
        OSError: the file cannot be written; what stood there before is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
