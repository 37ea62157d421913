"""The measured numbers in the prose of README.md and docs/: claims.csv has one line for each.

A line is the page, a sentence of it with the number as ``{:.1f}``, and an expression of records:
``value(benchmark, metric, key=value, …)`` is the value of `results.find`, ``loss(sweep, run)`` and
``seconds(sweep, run)`` are the validation loss and the GPU seconds at the end of a run.
"""

import csv
from collections.abc import Sequence
from functools import partial
from typing import Any

import results
from results import Line

CLAIMS = results.FOLDER / "claims.csv"
ROOT = results.FOLDER.parent


def read_claims() -> list[dict[str, str]]:
    """Page, sentence and expression of each claim."""
    with CLAIMS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def wrong(lines: Sequence[Line]) -> list[str]:
    """What each page should say whose sentence is not what the records give."""

    def last(metric: str, sweep: str, name: str, **where: str) -> float:
        [run] = results.runs(lines, sweep, name, **where)
        return run.last(metric)

    names: dict[str, Any] = {
        "value": lambda *which, **case: results.find(lines, *which, **case)["value"],
        "ratio": lambda *which, **case: results.find(lines, *which, **case)["ratio"],
        "loss": partial(last, "validation_loss"),
        "seconds": partial(last, "gpu_seconds"),
    }
    missing = []
    for claim in read_claims():
        number = eval(claim["expression"], {"__builtins__": {"abs": abs}}, names)
        sentence = claim["sentence"].format(number)
        text = " ".join((ROOT / claim["page"]).read_text(encoding="utf-8").split())
        if sentence not in text:
            missing.append(f"{claim['page']} does not say: {sentence}")
    return missing
