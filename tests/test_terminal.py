"""Tables at a terminal say what the rows say."""

from forklora.recipes.summary import summary_table
from forklora.recipes.terminal import side_by_side


def test_the_summary_stands_with_one_column_per_arm():
    records = [{"arm": name, "status": "done", "eval_reward_start": 0.5, "trained_parameters": 7} for name in "ab"]
    table = side_by_side(summary_table(records), title="t")
    assert [column.header for column in table.columns] == ["arm", "a", "b"]
    lines = list(zip(*(column.cells for column in table.columns), strict=True))
    assert ("trained parameters", "7", "7") in lines and ("status", "done", "done") in lines
    # A target that was missed is a finding and stays; an error that did not happen is none.
    assert ("steps to target", "—", "—") in lines
    assert not [line for line in lines if line[0] == "error"]
    (broken,) = summary_table([{"arm": "c", "status": "failed", "error": "out of memory"}])
    (*_, last) = zip(*(column.cells for column in side_by_side([broken], title="t").columns), strict=True)
    assert last == ("error", "out of memory")
