"""Files are whole or not there."""

import json

import pytest
from forklora.recipes.files import write_json


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
