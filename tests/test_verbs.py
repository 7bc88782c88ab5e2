"""What the verbs of the command refuse before any work, and what they leave behind."""

import argparse

import pytest
from forklora.recipes import verbs
from forklora.recipes.grid import grid_paths
from forklora.recipes.refusal import Refusal


@pytest.mark.parametrize("name", sorted(grid_paths()))
def test_a_comparison_is_copied_whole_and_never_over_another_file(tmp_path, name, capsys):
    options = argparse.Namespace(recipe=name, target=tmp_path)
    code, _ = verbs.copy(options)
    assert code == 0
    assert "forklora compare" in capsys.readouterr().out
    assert (tmp_path / f"{name}.yaml").read_bytes() == grid_paths()[name].read_bytes()
    with pytest.raises(Refusal, match="exists already"):
        verbs.copy(options)


def test_recipes_and_comparisons_are_listed(capsys):
    _, rows = verbs.list_all(argparse.Namespace())
    by_verb = {verb: {row["name"] for row in rows if row["verb"] == verb} for verb in ("run", "compare")}
    assert "quickstart" in by_verb["run"]
    assert by_verb["compare"] == set(grid_paths())
    assert "headline" in capsys.readouterr().out
