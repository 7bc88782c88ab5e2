"""Says in words what the options of a recipe are, and what is wrong with a value given for one.

Everything is read off the option groups themselves (pydantic models): names, types, defaults and the description under
each field.
"""

import difflib
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Group = type[BaseModel]
Place = tuple[int | str, ...]
_NAMES = {str: "text", int: "whole number", float: "number", bool: "true | false", type(None): "null"}


def nearest(word: str, words: list[str]) -> str:
    """The tail of an error message that names the most similar of `words`, or nothing where none is similar."""
    found = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f" (did you mean {found[0]!r}?)" if found else ""


def described_options(group: Group, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Dotted key, type, default and description of every option of `group`, in the order of the fields."""
    for name, field in group.model_fields.items():
        inner = next(_groups_in(field.annotation), None)
        if inner is not None:
            many = get_origin(field.annotation) in (list, tuple)
            yield from described_options(inner, f"{prefix}{name}.{'N.' if many else ''}")
            continue
        default = "required" if field.is_required() else "null" if field.default is None else str(field.default)
        yield f"{prefix}{name}", _spelled(field.annotation), default, field.description or ""


def complaint(group: Group, error: Mapping[str, Any]) -> str:
    """One line for one of pydantic's errors: the key, what was found there, and what is allowed."""
    place = _option_at(group, error["loc"])
    key, field, kind = ".".join(map(str, place)), _field_at(group, place), error["type"]
    if kind == "extra_forbidden":
        known = list(_group_at(group, place[:-1]).model_fields)
        return f"unknown key {key!r}{nearest(str(place[-1]), known)}; allowed here: {', '.join(known)}"
    if kind == "value_error":
        return f"{key}: {error['ctx']['error']}" if key else str(error["ctx"]["error"])
    about = f". {field.description}" if field and field.description else ""
    return f"{key}{_problem(error, 'mapping' if field is None else _spelled(field.annotation))}{about}"


def _problem(error: Mapping[str, Any], expected: str) -> str:
    """What is wrong with the value, to stand behind its key."""
    kind, found = error["type"], error["input"]
    if kind == "missing":
        return f" is missing; expected {expected}"
    if kind == "literal_error":
        return f" = {found!r}{nearest(str(found), expected.split(' | '))}: expected {expected}"
    if kind.endswith("_type") or kind == "int_from_float":
        return f" = {found!r}: expected {expected}"
    if kind == "too_short":
        return f" = {found!r}: expected at least one entry"
    return f" = {found!r}: {error['msg'].replace('Input should', 'must').replace('String should', 'must')}"


def _group_at(group: Group, place: Place) -> Group:
    """The group of options at a place such as `("arms", 0)`."""
    for part in place:
        field = group.model_fields.get(str(part))
        group = next(_groups_in(field.annotation), group) if field else group
    return group


def _field_at(group: Group, place: Place) -> FieldInfo | None:
    """The option at a place, if what is there is an option and not a whole entry of a list."""
    return _group_at(group, place[:-1]).model_fields.get(str(place[-1])) if place else None


def _option_at(group: Group, place: Place) -> Place:
    """The place without what pydantic adds behind an option: the branches of a union, the entries of a list."""
    for end in range(1, len(place)):
        field = _field_at(group, place[:end])
        if field and next(_groups_in(field.annotation), None) is None:
            return place[:end]
    return place


def _groups_in(annotation: Any) -> Iterator[Group]:  # noqa: ANN401 - any type expression
    """The option groups a type expression speaks of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _groups_in(part)


def _spelled(annotation: Any) -> str:  # noqa: ANN401 - any type expression
    """A type as a user of YAML would name it."""
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind is Literal:
        return " | ".join(parts)
    if kind in (Union, types.UnionType):
        return " | ".join(_spelled(part) for part in parts)
    if kind is Annotated:
        return _spelled(parts[0])
    if kind in (list, tuple):
        return f"list of {_spelled(parts[0])}"
    return _NAMES.get(annotation, "mapping")
