"""How much of held-out text and of the benchmarks' questions training text has, word for word.

    python benchmarks/text_overlap.py TEXT … EVAL --record benchmarks/results.jsonl

TEXT is a folder with ``train*.parquet`` and ``validation*.parquet`` (a column ``text``), or several
are one corpus. EVAL has ``<task>/<split>.jsonl`` as docs/evaluation.md describes it. Text is
compared as words of letters and digits in lower case, 13 in a row: shorter agreement is common,
longer one is copied.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

WORDS = 13
_WORD = re.compile(r"[a-z0-9]+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no word's part of a window is lost
Windows = np.ndarray[Any, np.dtype[np.uint64]]
_CHOICES: Callable[[dict[str, Any]], list[str]] = lambda row: row["choices"]["text"]  # noqa: E731
# Of a row: the question, and the answers.
_TASKS: dict[str, tuple[Callable[[dict[str, Any]], str], Callable[[dict[str, Any]], list[str]]]] = {
    "arc_easy/test": (lambda row: row["question"], _CHOICES),
    "arc_challenge/test": (lambda row: row["question"], _CHOICES),
    "hellaswag/validation": (
        lambda row: f"{row['ctx_a']} {row['ctx_b']}",
        lambda row: row["endings"],
    ),
    "openbookqa/test": (lambda row: row["question_stem"], _CHOICES),
    "piqa/validation": (lambda row: row["goal"], lambda row: [row["sol1"], row["sol2"]]),
    "winogrande/validation": (lambda row: row["sentence"], lambda row: [""]),
    "commonsense_qa/validation": (lambda row: row["question"], _CHOICES),
}


class Numbered:
    """Words as numbers, the same for the same word."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def windows(self, text: str) -> Windows:
        """A number for each 13 words in a row; two that differ have the same once in 2⁶⁴."""
        known = self._numbers
        found = [known.setdefault(word, len(known) + 1) for word in _WORD.findall(text.lower())]
        count = len(found) - WORDS + 1
        if count <= 0:
            return np.empty(0, np.uint64)
        words = np.array(found, np.uint64) * _FACTOR
        words ^= words >> np.uint64(29)
        windows = np.zeros(count, np.uint64)
        for place in range(WORDS):
            windows = windows * _FACTOR + words[place : place + count]
        return windows


def rows_of(task: str, folder: Path) -> Iterator[list[str]]:
    """The texts of each row of ``<task>/<split>``: its question with each of its answers."""
    question, answers = _TASKS[task]
    with (folder / f"{task}.jsonl").open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            yield [f"{question(row)} {answer}" for answer in answers(row)]


def texts(files: Iterable[Path]) -> Iterator[str]:
    """The documents of Parquet files with a column ``text``."""
    for path in files:
        for batch in pq.ParquetFile(path).iter_batches(columns=["text"]):
            yield from batch.column(0).to_pylist()


def shared_of(
    groups: dict[str, list[list[str]]], training: Iterable[str]
) -> dict[str, tuple[float, float]]:
    """Of each group of items: the share of its windows that training has, and of its items.

    An item is a list of texts, and counts as shared with one window. Items without a window, which
    are shorter than 13 words, count as not shared.
    """
    numbered = Numbered()
    windows = {
        name: [np.concatenate([numbered.windows(text) for text in item]) for item in items]
        for name, items in groups.items()
    }
    sought = np.unique(np.concatenate([w for own in windows.values() for w in own]))
    seen = np.zeros(len(sought), bool)
    for text in training:
        own = numbered.windows(text)
        place = np.minimum(np.searchsorted(sought, own), len(sought) - 1)
        seen[place[sought[place] == own]] = True

    def are_shared(own: Windows) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return seen[np.searchsorted(sought, own)]

    found = {}
    for name, items in windows.items():
        every = np.concatenate(items)
        some = sum(bool(are_shared(own).any()) for own in items)
        of_windows = float(are_shared(every).mean()) if len(every) else 0.0
        found[name] = (of_windows, some / len(items))
    return found


def main(words: list[str] | None = None) -> None:
    """Prints both shares of held-out text and of each task, and records them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    text = "folders with train*.parquet, validation*.parquet"
    parser.add_argument("text", type=Path, nargs="+", help=text)
    parser.add_argument("eval", type=Path, help="folder with <task>/<split>.jsonl")
    parser.add_argument("--record", type=Path, help="such as benchmarks/results.jsonl")
    options = parser.parse_args(words)
    held_out, training = (
        [path for folder in options.text for path in sorted(folder.glob(f"{part}*.parquet"))]
        for part in ("validation", "train")
    )
    groups = {"held-out": [[text] for text in texts(held_out)]}
    groups |= {task.partition("/")[0]: list(rows_of(task, options.eval)) for task in _TASKS}
    found = shared_of(groups, texts(training))
    for name, (of_windows, of_items) in found.items():
        print(f"{name:16} {len(groups[name]):7,} items, {of_items:7.2%} of them and "
              f"{of_windows:7.2%} of their runs of {WORDS} words are in training text")  # fmt: skip
    if options.record:
        from sparsellm.bench.record import Measurement, append

        named = " ".join("TEXT" for _ in options.text)
        taken = {"command": f"python benchmarks/text_overlap.py {named} EVAL"}
        append(
            [
                Measurement("text_overlap", case, metric, value, f"of {metric}", taken=taken)
                for name, (of_windows, of_items) in found.items()
                for case in [_case(name, len(groups[name]), len(options.text))]
                for metric, value in (("windows", of_windows), ("items", of_items))
            ],
            options.record,
        )


def _case(name: str, items: int, corpora: int) -> dict[str, Any]:
    return {"of": name, "words": WORDS, "items": items, "corpora": corpora}


if __name__ == "__main__":
    main()
