"""JSON lines: whole, finite, and cut where a run goes on."""

import json

import pytest

from experiments.errors import UserError
from experiments.tracking.journal import Journal, write_whole


def test_records_come_back_in_order(tmp_path):
    journal = Journal(tmp_path / "events.jsonl")
    assert journal.read() == []
    journal.append({"step": 1, "loss": 0.5})
    journal.append({"step": 2}, {"step": 3})
    assert journal.read() == [{"step": 1, "loss": 0.5}, {"step": 2}, {"step": 3}]


def test_number_that_is_not_finite_is_null(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append({"step": 1, "loss": float("nan"), "accuracy": float("-inf")})
    line = json.loads(journal.path.read_text(), parse_constant=pytest.fail)
    assert line == {"step": 1, "loss": None, "accuracy": None}


def test_later_records_are_cut(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append(*({"step": step} for step in (10, 20, 20, 30)))
    journal.cut_after(20)
    assert [record["step"] for record in journal.read()] == [10, 20, 20]
    journal.cut_after(0)
    assert journal.read() == []


def test_line_that_a_kill_cut_short_is_left_out_and_removed_by_the_cut(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append({"step": 1}, {"step": 2})
    text = journal.path.read_text()
    journal.path.write_text(text[:-4])
    assert journal.read() == [{"step": 1}]
    journal.cut_after(5)
    journal.append({"step": 2})
    assert journal.read() == [{"step": 1}, {"step": 2}]


def test_damaged_line_in_the_middle_is_named(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(UserError, match="Line 2 of .*metrics.jsonl is not JSON"):
        journal.read()


@pytest.mark.parametrize("line", ["[1]", "7", "null", '{"epoch": 1}', '{"step": "1"}'])
def test_line_that_is_no_record_is_named_wherever_it_is(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(UserError, match="Line 2 of .*metrics.jsonl is no record with a step"):
        Journal(path).read()


def test_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b'{"step": 1, "reason": "\xff"}\n')
    (tmp_path / "metrics.jsonl").mkdir()
    for name in ("events.jsonl", "metrics.jsonl"):
        with pytest.raises(UserError, match=f"{name} cannot be read"):
            Journal(tmp_path / name).read()


def test_failed_write_names_the_file_and_leaves_the_former_content(tmp_path):
    path = tmp_path / "config.json"
    write_whole(path, "first")
    assert path.read_text() == "first"
    with pytest.raises(UserError, match="cannot be written"):
        write_whole(tmp_path / "missing" / "config.json", "second")
    with pytest.raises(UserError, match="nowhere.*cannot be written"):
        Journal(tmp_path / "nowhere" / "a.jsonl").append({"step": 1})
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]
