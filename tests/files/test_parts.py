"""A folder of parts: claimed, completed, read, and refused where it does not fit together."""

import shutil

import pytest

from dmljax.files import parts

TASK = {"model": "aa", "count": 10}


def _write(out, text, task=TASK):
    shard = parts.parse(text)
    with parts.claimed(out, shard, task) as folder:
        (folder / "data.txt").write_text(text)
        parts.finish(folder, rows=shard.rows(10))
    return parts.state(out)


def test_rows_of_all_parts_are_all_rows_once():
    shards = [parts.Shard(i, 3) for i in range(3)]
    for total in (3, 7, 100):
        assert [row for shard in shards for row in shard.rows(total)] == list(range(total))
    for text in ("", "3", "3/3", "4/3", "-1/3", "a/b", "0/0", "1/2/3", "0/1e3"):
        with pytest.raises(ValueError, match="is not I/N"):
            parts.parse(text)


def test_the_last_part_completes_the_folder(tmp_path):
    for text, missing in (("2/3", 2), ("0/3", 1), ("1/3", 0)):
        state = _write(tmp_path, text)
        assert len(state["missing"]) == missing
        if missing:
            with pytest.raises(ValueError, match="part-1-of-3 missing"):
                parts.read(tmp_path)
    assert parts.read(tmp_path, verify=True) == state
    assert state["model"] == "aa" and state["parts"] == 3
    assert [part["rows"] for part in state["folders"]] == [[0, 3], [3, 6], [6, 10]]


def test_another_number_of_parts_and_another_task_are_refused(tmp_path):
    _write(tmp_path, "0/3")
    for text, task, message in (
        ("0/4", TASK, r"begun with another value of parts \(3, not 4\)"),
        ("1/3", TASK | {"model": "bb"}, r"another value of model \(aa, not bb\)"),
    ):
        with (
            pytest.raises(ValueError, match=message),
            parts.claimed(tmp_path, parts.parse(text), task),
        ):
            pass
    assert not (tmp_path / "part-1-of-3").exists() and not (tmp_path / "part-0-of-4").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with (
        pytest.raises(FileExistsError, match="not empty"),
        parts.claimed(tmp_path / "other", parts.Shard(0, 1), TASK),
    ):
        pass


def test_a_part_has_one_writer(tmp_path):
    with (
        parts.claimed(tmp_path, parts.Shard(0, 2), TASK),
        parts.claimed(tmp_path, parts.Shard(1, 2), TASK),
        pytest.raises(ValueError, match=r"part-0-of-2 in .* is being written by process [0-9]+ on"),
        parts.claimed(tmp_path, parts.Shard(0, 2), TASK),
    ):
        pass


def test_parts_of_another_task_and_damaged_ones_are_named(tmp_path):
    for text in ("0/2", "1/2"):
        _write(tmp_path / "a", text)
        _write(tmp_path / "b", text, TASK | {"model": "bb"})
    shutil.rmtree(tmp_path / "a" / "part-1-of-2")
    shutil.copytree(tmp_path / "b" / "part-1-of-2", tmp_path / "a" / "part-1-of-2")
    with pytest.raises(ValueError, match="part-1-of-2 missing, damaged or of another task"):
        parts.read(tmp_path / "a")
    (tmp_path / "b" / "part-0-of-2" / "data.txt").write_text("changed")
    with pytest.raises(ValueError, match=r"part-0-of-2 \(data\.txt\) missing, damaged"):
        parts.read(tmp_path / "b", verify=True)
