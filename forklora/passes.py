"""Splits rollouts into passes through the model that hold a stated number of tokens.

Decisions: completions of one prompt stay together where they fit, since the prompt is then run once for all of them;
groups of like length share a pass, since every row of a pass is padded to its longest; there are as few passes as the
stated number allows, and then all about equally large.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn


class _Piece(NamedTuple):
    """Rows of one prompt, and the lengths of the prompt and of the longest completion among them."""

    rows: list[int]
    prompt: int
    longest: int


def same_prompt(prompt_ids: Int[Tensor, "n p"], prompt_mask: Bool[Tensor, "n p"]) -> Int[Tensor, " n"]:
    """A number for each row, equal where the prompts are; what stands under the mask's False is not looked at."""
    return torch.unique(torch.where(prompt_mask, prompt_ids, -1), dim=0, return_inverse=True)[1]


def regrouped(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows in as many parts of the same sizes, those of one ``group`` next to each other."""
    order = torch.cat([part["group"] for part in parts]).argsort(stable=True)
    size = len(parts[0]["group"])
    chosen = [order[i * size : (i + 1) * size] for i in range(len(parts))]

    def rearranged(name: str) -> list[Any]:
        values = [part[name] for part in parts]
        if isinstance(values[0], list):
            flat = [row for value in values for row in value]
            return [[flat[i] for i in rows] for rows in chosen]
        if isinstance(values[0], Tensor) and values[0].ndim > 0:
            return [torch.cat(values)[rows] for rows in chosen]
        return values

    columns = {name: rearranged(name) for name in parts[0]}
    return [{name: values[i] for name, values in columns.items()} for i in range(len(parts))]


def joined(parts: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Prompts and completions of all parts as one batch, with masks: padded on the left and on the right.

    Args:
        parts: each with ``prompt_ids [n, p]``, ``prompt_mask``, ``completion_ids [n, t]``, ``completion_mask``.
    """
    found = {}
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"):
        columns = [part[name].bool() if name.endswith("mask") else part[name] for part in parts]
        width = max(column.shape[1] for column in columns)
        left = name.startswith("prompt")
        missing = [(width - column.shape[1], 0)[:: 1 if left else -1] for column in columns]
        found[name] = torch.cat([nn.functional.pad(*each) for each in zip(columns, missing, strict=True)])
    return found


def split_rows(
    prompt_ids: Int[Tensor, "n p"],
    *,
    prompt_mask: Bool[Tensor, "n p"],
    completion_mask: Bool[Tensor, "n t"],
    shared: bool = True,
    tokens: int,
) -> list[Int[Tensor, " m"]]:
    """Row indices of each pass; every row stands in exactly one.

    A pass counts ``groups * longest prompt + rows * longest completion`` tokens, padding included; where prompts are
    not shared, every row is a group. A single row that is longer than ``tokens`` is a pass by itself.

    Args:
        prompt_ids: left-padded prompts.
        prompt_mask: true at the prompt's own tokens.
        completion_mask: true at the completion's own tokens.
        shared: a prompt runs once for its group in each pass, else once for each row.
        tokens: most tokens in a pass.
    """
    if tokens < 1:
        raise ValueError(f"tokens={tokens} must be at least 1: a pass holds no row otherwise.")
    group = same_prompt(prompt_ids, prompt_mask).tolist() if shared else list(range(len(prompt_ids)))
    prompt, length = prompt_mask.sum(-1).tolist(), completion_mask.sum(-1).tolist()
    members: dict[int, list[int]] = {}
    for row in sorted(range(len(group)), key=lambda r: (length[r], r)):
        members.setdefault(group[row], []).append(row)
    pieces = [piece for rows in members.values() for piece in _pieces(rows, prompt[rows[0]], length, tokens=tokens)]
    pieces.sort(key=lambda piece: (piece.longest, piece.prompt, piece.rows[0]))
    passes = _packed(pieces, tokens)
    low, high = 0, tokens  # the smallest size that takes no more passes: low is too small, high is large enough
    while high - low > 1:
        middle = (low + high) // 2
        tried = _packed(pieces, middle)
        low, high, passes = (low, middle, tried) if len(tried) == len(passes) else (middle, high, passes)
    return [torch.tensor([r for p in taken for r in p.rows], device=prompt_ids.device) for taken in passes]


def _packed(pieces: list[_Piece], tokens: int) -> list[list[_Piece]]:
    passes: list[list[_Piece]] = []
    for piece in pieces:
        if passes and _size([*passes[-1], piece]) <= tokens:
            passes[-1].append(piece)
        else:
            passes.append([piece])
    return passes


def _pieces(rows: list[int], prompt: int, length: list[int], *, tokens: int) -> list[_Piece]:
    """One piece of a group sorted by length, or several where it is too long for a pass."""
    found: list[_Piece] = []
    for row in rows:
        grown = _Piece([*found[-1].rows, row], prompt, length[row]) if found else None
        if grown is not None and _size([grown]) <= tokens:
            found[-1] = grown
        else:
            found.append(_Piece([row], prompt, length[row]))
    return found


def _size(pieces: list[_Piece]) -> int:
    """Tokens of these pieces in one pass: each prompt once, all padded to the longest."""
    rows = sum(len(piece.rows) for piece in pieces)
    return len(pieces) * max(p.prompt for p in pieces) + rows * max(p.longest for p in pieces)
