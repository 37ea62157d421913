"""The benchmark of docs/extending.md, measured on a CPU."""

import re
import textwrap
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from sparsellm.bench import compare, timing


@pytest.fixture
def squares(monkeypatch):
    """`measure` as the page has its reader write it."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    section = page.split("## A benchmark\n", 1)[1]
    [code, *_] = re.findall(r"^ {4}```python\n(.*?)^ {4}```", section, re.DOTALL | re.MULTILINE)
    monkeypatch.setattr(compare, "gpu", lambda name: torch.device("cpu"))
    names = {**vars(compare), "Configuration": timing.Configuration, "torch": torch}
    exec(textwrap.dedent(code), names)
    return names["measure"]


def test_it_is_checked_timed_and_recorded(squares):
    [measurements] = squares(SimpleNamespace(benchmark="squares", width=8, seconds=0.01))
    assert [(m.bench, m.metric) for m in measurements] == [
        ("squares", "ms"),
        ("squares", "difference"),
    ]
    ms, difference = measurements
    assert ms.case == {"M": 16_384, "K": 8}
    assert ms.ratio == ms.baseline / ms.value
    assert set(ms.sustained) == set(ms.baseline_sustained) == {"p10", "p90", "seconds"}
    assert difference.value < 0.01
