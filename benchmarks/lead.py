"""A model of how far ahead sparse FFNs are in equal GPU time, after more tokens than were trained.

    python benchmarks/lead.py

While a dense model trains on T tokens, a sparse one trains on r·T, for r the ratio of their seconds
per token. The loss of dense models falls with tokens, and the sparse model's is higher by a gap:

    dense(T)  = c + B (T / T0)^-β
    sparse(T) = dense(T) + g + h ln(T / T0)
    lead(T)   = dense(T) - sparse(r T) = B (T / T0)^-β (1 - r^-β) - g - h ln(r T / T0)

Least squares give c (for each text), B, g and h. They use the runs that decayed fully: for each
number of tokens, dense and sparse each at its best setting. A few lengths do not show β, so it has
two values, from published fits. h needs sparse runs of two lengths, else it is 0.

The intervals reach two standard errors to both sides, by the residuals of seeds and fit, and cover
both β. They leave out that the model may be wrong: beyond the runs it is not known whether the gap
stays or goes on with ln T. r is that of runs which all began dense.
"""

from collections.abc import Sequence
from itertools import groupby, product
from math import log, sqrt
from operator import itemgetter
from statistics import fmean
from typing import NamedTuple

import numpy as np

import results
from equal import (
    DENSE_SILU,
    GPUS,
    SHAPES,
    Kind,
    Setting,
    Shape,
    best,
    settings,
    settings_by_sweep,
    time_ratio,
)
from results import Line
from sparsellm.recipe import load_recipe

# Hoffmann et al., arXiv 2203.15556, approach 3; the same data fitted again, arXiv 2404.10102.
EXPONENTS = (0.28, 0.37)
T0 = 1e8  # tokens


class Observation(NamedTuple):
    """How a run ended."""

    text: int  # which one it was trained and measured on
    tokens: int
    sparse: bool
    loss: float  # nats per token


class Fit(NamedTuple):
    """The model with its parameters."""

    exponent: float  # β
    values: np.ndarray  # of B, g, h
    covariance: np.ndarray  # of the same
    most_tokens: float  # of a sparse run

    def lead(self, tokens: float, ratio: float, *, grows: bool) -> tuple[float, float]:
        """Of the sparse model while dense trains on so many tokens, in nats; its standard error.

        Args:
            tokens: T.
            ratio: r.
            grows: the gap goes on to change beyond the longest sparse run.
        """
        at = ratio * tokens if grows else min(ratio * tokens, self.most_tokens)
        saved = (tokens / T0) ** -self.exponent * (1 - ratio**-self.exponent)
        row = np.array([saved, -1.0, -log(at / T0)])
        return float(row @ self.values), sqrt(float(row @ self.covariance @ row))


def fit(observations: Sequence[Observation], exponent: float) -> Fit | None:
    """Least squares; None: they are too few, or of dense runs of one length."""
    texts = sorted({run.text for run in observations})
    lengths = {run.tokens for run in observations if run.sparse}
    rows = [
        [
            *(float(run.text == text) for text in texts),
            (run.tokens / T0) ** -exponent,
            float(run.sparse),
            run.sparse * log(run.tokens / T0),
        ]
        for run in observations
    ]
    matrix, losses = np.array(rows), np.array([run.loss for run in observations])
    if len(lengths) < 2:
        matrix = matrix[:, :-1]
    count, parameters = matrix.shape
    if count <= parameters or np.linalg.matrix_rank(matrix) < parameters:
        return None
    solution = np.linalg.lstsq(matrix, losses)[0]
    variance = float(np.sum((losses - matrix @ solution) ** 2)) / (count - parameters)
    fitted = parameters - len(texts)  # without the constants
    values, covariance = np.zeros(3), np.zeros((3, 3))
    values[:fitted] = solution[len(texts) :]
    inverse = np.linalg.inv(matrix.T @ matrix)
    covariance[:fitted, :fitted] = variance * inverse[len(texts) :, len(texts) :]
    return Fit(exponent, values, covariance, max(lengths))


def expected(lines: Sequence[Line]) -> list[list[str]]:
    """A row for each shape, sparse FFN with at least two seeds, and number of tokens.

    Raises:
        ValueError: no records give a row.
    """
    rows: list[list[str]] = []
    for recipe_name in dict.fromkeys(shape.recipe for shape in SHAPES):
        shapes = [shape for shape in SHAPES if shape.recipe == recipe_name]
        by_text = [_best_of_each(settings(lines, shape)) for shape in shapes]
        recipe = load_recipe(recipe_name)
        budgets = [recipe.train.steps * recipe.train.global_batch_tokens, 10**9]
        for kind in sorted({s.kind for text in by_text for s in text if s.kind.target_nnz}):
            runs = [
                [s for s in text if s.kind == DENSE_SILU or (s.kind == kind and len(s.ends) > 1)]
                for text in by_text
            ]
            every = [fit(_observations(runs), exponent) for exponent in EXPONENTS]
            fits = [of for of in every if of is not None]
            ratio = longest_ratio(lines, shapes, kind)
            sparse = [setting for text in runs for setting in text if setting.kind == kind]
            if ratio is None or not fits or not sparse:
                continue
            longest = max(sparse, key=_tokens)
            # At equal time with the longest sparse run, which a measured difference may confirm.
            for tokens in sorted({*budgets, round(longest.tokens / ratio)}):
                title = [shapes[0].title, longest.title, f"{tokens / 1e6:,.0f}M", f"{ratio:.2f}"]
                rows.append([*title, *(_interval(fits, tokens, ratio, g) for g in (False, True))])
    if not rows:
        raise ValueError("no shape has dense and sparse runs from which a lead can be computed")
    return rows


def _best_of_each(of_text: Sequence[Setting]) -> list[Setting]:
    """The best setting of each kind and number of tokens."""
    groups = groupby(of_text, lambda setting: (setting.tokens, setting.kind))
    return [best(list(group)) for _, group in groups]


def _observations(runs: Sequence[Sequence[Setting]]) -> list[Observation]:
    return [
        Observation(text, setting.tokens, setting.kind != DENSE_SILU, ends[0].loss)
        for text, of_text in enumerate(runs)
        for setting in of_text
        for ends in setting.ends.values()
    ]


def longest_ratio(lines: Sequence[Line], shapes: Sequence[Shape], kind: Kind) -> float | None:
    """`time_ratio` of the longest runs of this kind; None: no sweep has dense runs beside them."""
    ratios = [
        (setting.tokens, ratio)
        for shape, gpu in product(shapes, GPUS)
        for of_sweep in settings_by_sweep(lines, shape, (gpu,))
        for setting in _best_of_each(of_sweep)
        if setting.kind == kind and (ratio := time_ratio(setting, of_sweep)) is not None
    ]
    return max(ratios, key=itemgetter(0), default=(0, None))[1]


def _tokens(setting: Setting) -> int:
    return setting.tokens


def _interval(fits: Sequence[Fit], tokens: float, ratio: float, grows: bool) -> str:
    """The mean of the fits' leads, and in brackets the range that their standard errors span."""
    if grows and not fits[0].values[2]:
        return ""
    leads = [of.lead(tokens, ratio, grows=grows) for of in fits]
    lowest = min(lead - 2 * error for lead, error in leads)
    highest = max(lead + 2 * error for lead, error in leads)
    mean = fmean(lead for lead, _ in leads)
    return f"{mean:+.3f} ({lowest:+.3f} to {highest:+.3f})".replace("-", "−")


HEAD = (
    "Model", "Sparse FFN", "Tokens of dense SiLU", "Dense time per token over sparse",
    "Lead in nats if the gap stays", "Lead if the gap keeps changing",
)  # fmt: skip


def main() -> None:
    """Prints the table."""
    for row in (HEAD, *expected(results.read_records(results.RECORDS))):
        print(" | ".join(row))


if __name__ == "__main__":
    main()
