"""Numbers in prose that come from records: filled in by `make results`, checked by the tests.

A number is followed by a comment that says what it is, which pages do not show:

    ends at 4.437<!--= wide -->, 3.0<!--= 100 * (1 - wide / silu_loss) -->% lower

Besides arithmetic it may use mean, abs, min, max and `interpolate`.

claims.yaml has the names. Each is of a record: a benchmark, keys of its case (values may have
wildcards; `!KEY`: it has none; `on=H100`: taken on that GPU, not on `GPU`) and a metric (or, after
`|`, an older name of it), of which `.ratio` and `.baseline` are what the same run gives, and `.KEY`
is a number of its case. It means the newest such record, at its last step; with `@COMMIT` the one
of that commit, to list repeats. `burst` and `sustained` say which of the two the text calls it: a
newest record of the other kind is an error. The number keeps its digits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Any

from results import FOLDER, GPU, Line, case_text, gpu_of
from sparsellm.recipe.strict import load_yaml

ROOT = FOLDER.parent
SOURCES = FOLDER / "claims.yaml"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_CLAIM = re.compile(r"(\d[\d,]*(?:\.\d+)?)<!--= (.+?) -->", re.DOTALL)
_KINDS = ("burst", "sustained")  # what a time may be


def interpolate(x: float, first: tuple[float, float], second: tuple[float, float]) -> float:
    """What lies linearly between two points (x, y), at an x between theirs.

    Raises:
        ValueError: ``x`` is not between them, so that the text would extrapolate.
    """
    (x0, y0), (x1, y1) = first, second
    if not min(x0, x1) <= x <= max(x0, x1):
        raise ValueError(f"{x:.4g} is not between {x0:.4g} and {x1:.4g}: name other records")
    return y0 + (x - x0) / (x1 - x0) * (y1 - y0)


_FUNCTIONS: dict[str, Any] = {
    "mean": lambda *v: fmean(v),
    "abs": abs,
    "min": min,
    "max": max,
    "interpolate": interpolate,
}


def fill(text: str, lines: Sequence[Line]) -> str:
    """The text with every such number as the records have it now.

    Raises:
        ValueError: a name is of no record, or of several that differ in more than their step; or a
            number is negative, so that the sentence around it says the opposite.
        NameError: claims.yaml has no such name.
    """
    used = names_in(text)
    known = {name: _look_up(s, lines) for name, s in load_yaml(SOURCES).items() if name in used}

    def number(match: re.Match[str]) -> str:
        value = float(eval(match[2], {"__builtins__": {}}, _FUNCTIONS | known))
        digits = len(match[1].partition(".")[2])
        if round(value, digits) < 0:
            raise ValueError(f"{match[2]} is {value:.4g} now: the sentence says the opposite")
        return f"{value:{',' if value >= 1000 else ''}.{digits}f}<!--= {match[2]} -->"

    return _CLAIM.sub(number, text)


def names_in(text: str) -> set[str]:
    """The names that its numbers use, of claims.yaml and of functions."""
    said = " ".join(match[2] for match in _CLAIM.finditer(text))
    return set(re.findall(r"[a-z]\w*", said))


def _look_up(source: str, lines: Iterable[Line]) -> float:
    bench, *keys, metric = source.split()
    metric, _, field = metric.partition(".")
    own = (line for line in lines if line["bench"] == bench and line["metric"] in metric.split("|"))
    kinds = [key for key in keys if key in _KINDS]
    keys = [key for key in keys if key not in _KINDS]
    kinds_of_gpu = {key.partition("=")[2] for key in keys if key.startswith("on=")} or {GPU}
    keys = [key for key in keys if not key.startswith("on=")]
    own = (line for line in own if _gpu_fits(line, kinds_of_gpu))
    found = [line for line in own if _fits(line, keys)]
    if not found:
        raise ValueError(f"{source}: there is no such record")
    found = [line for line in found if line["commit"] == found[-1]["commit"]]
    last = max(line["case"].get("step", 0) for line in found)
    found = [line for line in found if line["case"].get("step", 0) == last]
    cases = {case_text(line["case"]) for line in found}
    if len(cases) > 1:
        raise ValueError(f"{source}: several cases, name more keys:\n" + "\n".join(sorted(cases)))
    kind = _KINDS[bool(found[-1].get("sustained"))]
    if kinds and kinds != [kind]:
        raise ValueError(f"{source}: the newest record is {kind} now: the text says otherwise")
    value = (found[-1]["case"] | found[-1])[field or "value"]
    if value is None:
        raise ValueError(f"{source}: the record has no {field}")
    return float(value)


def _gpu_fits(line: Line, kinds: Iterable[str]) -> bool:
    """Whether a record is of a CPU, or of a GPU of one of these kinds, such as ``H100``."""
    gpu = gpu_of(line)
    return gpu is None or any(kind in gpu for kind in kinds)


def _fits(line: Line, keys: Iterable[str]) -> bool:
    for key in keys:
        name, _, wanted = key.partition("=")
        if name.startswith("@"):
            fits = line["commit"] == name[1:]
        elif name.startswith("!"):
            fits = name[1:] not in line["case"]
        else:
            fits = fnmatchcase(f"{line['case'].get(name)}", wanted)
        if not fits:
            return False
    return True


def unclaimed(text: str) -> list[str]:
    """Measured numbers of a page that name no record, with a little of what is around them.

    Those are numbers with a decimal point, a unit of speed, a percent sign or ×. Code needs none,
    nor do settings (`<!--set-->`), and what a paragraph has from elsewhere or computes from its own
    numbers (`<!--given-->`).
    """
    text = re.sub(r"```.*?```|`[^`\n]*`|arXiv [\d.]+|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    text = "\n\n".join(part for part in text.split("\n\n") if "<!--given-->" not in part)
    text = re.sub(r"[\d.,e-]+<!--set-->", " ", _CLAIM.sub(" ", text))
    measured = (
        r"(?<![\w.-])(?:\d[\d,]*\.\d+(?![\dbB])|\d[\d,]*(?=\s?(?:%|×|tokens/|ms\b|k tokens)))"
    )
    return [text[max(m.start() - 30, 0) : m.end() + 15] for m in re.finditer(measured, text)]


def fill_pages(lines: Sequence[Line]) -> None:
    """Writes what `fill` gives of each page."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (filled := fill(text, lines)) != text:
            page.write_text(filled, encoding="utf-8", newline="\n")
            print(page)
