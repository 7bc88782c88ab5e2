"""Turns YAML text and `key=value` strings into plain data, refusing what YAML readers usually let pass in silence.

Two departures from the YAML reader underneath: `1e-3` is a number, as in every later edition of YAML and in Python, and
a key that stands twice is refused instead of the first value being lost.
"""

import re
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from forklora.recipes.refusal import Refusal
from forklora.recipes.tasks import TaskError
from forklora.recipes.wording import complaint, nearest
from pydantic import BaseModel, ValidationError

_MOST_COMPLAINTS = 12
_Options = TypeVar("_Options", bound=BaseModel)


class RecipeError(Refusal):
    """A recipe that cannot be used; the message fits on one screen and says what is allowed."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with the two departures of this module."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if repeated := sorted({str(key) for key in keys if keys.count(key) > 1}):
            raise yaml.MarkedYAMLError(problem=f"key {repeated[0]!r} stands twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def find_shipped(path_or_name: str | Path, shipped: Mapping[str, Path], *, what: str, kind: str = "YAML") -> Path:
    """The file meant: a path, or the name of one that is shipped. Raises RecipeError, naming the nearest one."""
    path = Path(path_or_name)
    if path.is_file():
        return path
    if str(path_or_name) in shipped:
        return shipped[str(path_or_name)]
    raise RecipeError(
        f"there is no {what} {str(path_or_name)!r}{nearest(path.stem, list(shipped))}; give the path of a {kind} file, "
        f"or one of: {', '.join(shipped)}"
    )


def _parsed(text: str, source: str) -> Any:  # noqa: ANN401 - whatever the text says
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise RecipeError(f"{source} is not readable YAML: {error}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping written in a YAML file. Raises RecipeError where the file cannot be read or is no mapping."""
    try:
        data = _parsed(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {error}") from error
    if not isinstance(data, dict):
        raise RecipeError(f"the recipe {path} holds no keys; a recipe is a YAML mapping such as 'steps: 15'")
    return data


def parsed_override(text: str) -> tuple[list[str], Any]:
    """The key's parts and the value of `a.b.c=value`, the value read as YAML.

    Raises:
        RecipeError: there is no `=`, an empty key, or a value that is not YAML.
    """
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise RecipeError(f"{text!r} is no override; write key=value, such as steps=3 or arms.0.rate=1e-3")
    return parts, _parsed(value, f"the value of {key.strip()!r}")


def put(data: dict[str, Any], parts: list[str], *, value: Any) -> None:  # noqa: ANN401 - whatever YAML holds
    """Writes `value` at the dotted key `parts` of nested mappings and lists, making mappings on the way.

    An entry of a list is meant by its place, from 0, or by its `name`.

    Raises:
        RecipeError: the key leads through something that has no parts, or to an entry the list does not have.
    """
    here: Any = data
    for depth, part in enumerate(parts):
        way = ".".join(parts[:depth])
        if isinstance(here, list):
            key: Any = _place(here, part, way=way)
        elif isinstance(here, dict):
            key = part
        else:
            raise RecipeError(f"{'.'.join(parts)!r} leads nowhere: {way!r} is {here!r}, which has no parts")
        if depth == len(parts) - 1:
            here[key] = value
        elif isinstance(here, dict) and here.get(key) is None:
            here[key] = {}
        here = here[key]


def _place(entries: list[Any], part: str, *, way: str) -> int:
    """Index of the entry that `part` means."""
    names = [str(entry.get("name")) if isinstance(entry, dict) else "" for entry in entries]
    if part in names:
        return names.index(part)
    if part.isdecimal() and int(part) < len(entries):
        return int(part)
    known = ", ".join(f"{i} ({name})" if name else str(i) for i, name in enumerate(names))
    raise RecipeError(f"{way!r} has no entry {part!r}; it has: {known or 'none'}")


def checked_options(
    group: type[_Options],
    data: dict[str, Any],
    *,
    overrides: list[str],
    problem: str,
    finish: Callable[[_Options], _Options] = lambda options: options,
) -> _Options:
    """Plain data with overrides as an object of a group of options, finished.

    Raises:
        RecipeError: ``problem``, then every complaint of the group, or that of a task.
    """
    for override in overrides:
        parts, value = parsed_override(override)
        put(data, parts, value=value)
    try:
        return finish(group.model_validate(data))
    except ValidationError as error:
        complaints = list(dict.fromkeys(complaint(group, one) for one in error.errors()))
    except TaskError as error:
        complaints = [f"task: {error}"]
    more = len(complaints) - _MOST_COMPLAINTS
    lines = complaints[:_MOST_COMPLAINTS] + ([f"and {more} more"] if more > 0 else [])
    raise RecipeError(f"{problem}:\n" + "\n".join(f"  {line}" for line in lines))
