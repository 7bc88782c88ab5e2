"""Laws of the passes: every row once, none too large, prompts whole where they fit, few and even."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forklora.passes import joined, split_rows


def rollouts(groups):
    """Prompt ids and masks of rows given as ``(prompt length, completion lengths)`` per group."""
    longest_prompt = max(p for p, _ in groups)
    rows = [(number, p, length) for number, (p, lengths) in enumerate(groups) for length in lengths]
    ids = torch.zeros(len(rows), longest_prompt, dtype=torch.long)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    completion = torch.zeros(len(rows), max(n for *_, n in rows), dtype=torch.bool)
    for i, (number, p, length) in enumerate(rows):
        ids[i, -p:], mask[i, -p:], completion[i, :length] = number + 1, True, True
    return ids, {"prompt_mask": mask, "completion_mask": completion}, rows


def size(rows, chosen, *, shared=True):
    mine = [rows[i] for i in chosen]
    prompts = len({number for number, *_ in mine}) if shared else len(mine)
    return prompts * max(p for _, p, _ in mine) + len(mine) * max(n for *_, n in mine)


groups_of = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=5)), min_size=1, max_size=6
)


@given(groups_of, st.integers(1, 80), st.booleans(), st.randoms())
def test_every_row_is_in_one_pass_and_no_pass_is_too_large(groups, tokens, shared, random):
    ids, masks, rows = rollouts(groups)
    order = list(range(len(rows)))
    random.shuffle(order)
    ids, rows = ids[order], [rows[i] for i in order]
    passes = split_rows(ids, **{k: v[order] for k, v in masks.items()}, tokens=tokens, shared=shared)
    assert sorted(torch.cat(passes).tolist()) == list(range(len(rows)))
    for chosen in passes:
        assert len(chosen) == 1 or size(rows, chosen.tolist(), shared=shared) <= tokens


@given(groups_of, st.integers(60, 120))
def test_a_group_that_fits_is_not_cut(groups, tokens):
    ids, masks, rows = rollouts(groups)
    passes = split_rows(ids, **masks, tokens=tokens)
    for number in range(len(groups)):
        members = [i for i, row in enumerate(rows) if row[0] == number]
        holders = [p for p in passes if set(p.tolist()) & set(members)]
        assert len(holders) == 1 or size(rows, members) > tokens


def test_passes_are_few_even_and_of_like_length():
    ids, masks, rows = rollouts([(40, [5] * 8)] * 16)
    passes = split_rows(ids, **masks, tokens=1024)
    assert [len(p) for p in passes] == [64, 64]
    ids, masks, rows = rollouts([(4, [n] * 2) for n in (30, 2, 30, 2, 3, 29)])
    passes = split_rows(ids, **masks, tokens=140)
    assert [sorted(rows[i][2] for i in p.tolist()) for p in passes] == [
        [2, 2, 2, 2, 3, 3],
        [29, 29],
        [30, 30],
        [30, 30],
    ] or [sorted(rows[i][2] for i in p.tolist()) for p in passes] == [[2, 2, 2, 2, 3, 3], [29, 29, 30, 30], [30, 30]]


def test_no_tokens_at_all_are_refused():
    ids, masks, _ = rollouts([(2, [1])])
    with pytest.raises(ValueError, match="tokens=0 must be at least 1"):
        split_rows(ids, **masks, tokens=0)


def test_joined_parts_hold_every_row_at_the_inner_edge():
    def part(prompts, completions):
        return {
            "prompt_ids": torch.tensor(prompts), "prompt_mask": torch.tensor(prompts) > 0,
            "completion_ids": torch.tensor(completions), "completion_mask": (torch.tensor(completions) > 0).long(),
        }  # fmt: skip

    whole = joined([part([[1, 2], [0, 3]], [[4], [5]]), part([[6, 7, 8]], [[9, 10, 11]])])
    assert whole["prompt_ids"].tolist() == [[0, 1, 2], [0, 0, 3], [6, 7, 8]]
    assert whole["completion_ids"].tolist() == [[4, 0, 0], [5, 0, 0], [9, 10, 11]]
    assert torch.equal(whole["prompt_mask"], whole["prompt_ids"] > 0)
    assert torch.equal(whole["completion_mask"], whole["completion_ids"] > 0)
