"""What training text shares with other text, word for word."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import text_overlap
from results import read_records
from text_overlap import WORDS, Numbered, shared_of


def words(first: int, count: int) -> str:
    return " ".join(f"w{number}" for number in range(first, first + count))


def test_windows_are_equal_where_thirteen_words_are():
    numbered = Numbered()
    windows = numbered.windows(words(0, 20))
    assert len(set(windows.tolist())) == 20 - WORDS + 1
    assert numbered.windows(words(3, WORDS)) == windows[3]
    assert numbered.windows(words(3, WORDS).upper().replace(" ", ",\n")) == windows[3]
    assert len(numbered.windows(words(0, WORDS - 1))) == 0
    backwards = " ".join(reversed(words(3, WORDS).split()))
    assert numbered.windows(backwards) != windows[3]


def test_an_item_is_shared_with_one_window_and_windows_are_counted_each():
    training = [words(0, 30), words(100, 12)]
    items = [[words(0, 14), "short"], [f"{words(20, 10)} {words(900, 10)}"], [words(100, 13)]]
    found = shared_of({"all": items, "copied": [[words(5, 20)]]}, training)
    assert found["copied"] == (1.0, 1.0)
    # 2 windows of the first item; none of 8 and of 1 of the others, where 12 words are not enough.
    assert found["all"] == pytest.approx((2 / 11, 1 / 3))


def test_shares_of_held_out_text_and_of_tasks_are_recorded(tmp_path, capsys):
    text, rows, records = tmp_path / "text", tmp_path / "eval", tmp_path / "results.jsonl"
    text.mkdir()
    for name, documents in (("train-0", [words(0, 40)]), ("validation", [words(30, 40), "a"])):
        pq.write_table(pa.table({"text": documents}), text / f"{name}.parquet")
    choices = {"text": [words(10, 4), "no"], "label": ["A", "B"]}
    of_tasks = {
        "arc_easy/test": {"question": words(0, 10), "choices": choices, "answerKey": "A"},
        "arc_challenge/test": {"question": "why", "choices": choices, "answerKey": "A"},
        "hellaswag/validation": {"ctx_a": words(0, 9), "ctx_b": "w9", "endings": ["w10 w11 w12"]},
        "openbookqa/test": {"question_stem": words(50, 20), "choices": choices, "answerKey": "A"},
        "piqa/validation": {"goal": words(0, 12), "sol1": "no", "sol2": "w12", "label": 1},
        "winogrande/validation": {"sentence": words(1, 13), "option1": "a", "answer": "1"},
        "commonsense_qa/validation": {"question": "who", "choices": choices, "answerKey": "A"},
    }
    for task, row in of_tasks.items():
        path = rows / f"{task}.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(row) + "\n")
    other = tmp_path / "other"
    other.mkdir()
    pq.write_table(pa.table({"text": [words(500, 20)]}), other / "train.parquet")
    text_overlap.main([str(text), str(other), str(rows), "--record", str(records)])
    assert "held-out" in capsys.readouterr().out
    lines = read_records(records)
    assert {line["case"]["corpora"] for line in lines} == {2}
    assert {line["command"] for line in lines} == {
        "python benchmarks/text_overlap.py TEXT TEXT EVAL"
    }
    found = {(line["case"]["of"], line["metric"]): line["value"] for line in lines}
    assert found["held-out", "windows"] == 0  # ten words are shared
    items = {name: value for (name, metric), value in found.items() if metric == "items"}
    shared = [name for name, value in items.items() if value]
    assert shared == ["arc_easy", "hellaswag", "piqa", "winogrande"]
