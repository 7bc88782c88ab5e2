"""Files are whole or not there."""

import json

import pytest
from forklora.recipes.files import check_writable, write_json
from forklora.recipes.refusal import Refusal


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "record.json"
    write_json(path, {"a": [1, None, 0.5]})
    assert json.loads(path.read_text()) == {"a": [1, None, 0.5]}
    for broken, error in (({"a": float("nan")}, ValueError), ({"a": {1, 2}}, TypeError)):
        with pytest.raises(error):
            write_json(path, broken)
        assert json.loads(path.read_text()) == {"a": [1, None, 0.5]}
    assert [p.name for p in path.parent.iterdir()] == ["record.json"]
    (path.parent / "taken" / "by").mkdir(parents=True)
    with pytest.raises(OSError):
        write_json(path.parent / "taken", {})
    assert sorted(p.name for p in path.parent.iterdir()) == ["record.json", "taken"]


def test_a_folder_that_can_be_written_to_is_made_and_left_empty(tmp_path):
    check_writable(tmp_path / "a" / "b", "for a test")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(Refusal, match="for a test"):
        check_writable(tmp_path / "file" / "b", "for a test")
    assert (tmp_path / "file").read_text() == "mine"
