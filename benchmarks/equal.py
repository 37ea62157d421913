"""Dense and sparse FFNs after equal tokens and after equal GPU time, from the sweeps `fair-…`.

Runs in FP8 count if they reached their last step, so that their learning rates decayed fully; runs
of the sweeps `frontier…` of the same shape count too. A kind of FFN is shown at the best of the
settings of its optimizer. Losses are compared across sweeps and models of GPU, times within one.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby, product
from statistics import fmean
from typing import NamedTuple

from results import Line, Run, runs
from sparsellm.recipe import Recipe, load_recipe
from sparsellm.sweep.plan import load_plan


class Shape(NamedTuple):
    """Runs that can be compared: of one shape of model, with the same text."""

    title: str
    recipe: str  # has the usual number of neurons
    sweeps: tuple[str, ...]  # of two runs with the same setting and seed the first listed counts


SHAPES = (
    Shape("`small`", "small", ("fair-small", "frontier")),
    Shape("`small`", "small", ("fair-small-long", "frontier-long")),
    Shape("0.5B", "0.5b", ("fair-0.5b", "frontier-0.5b")),
    Shape("0.5B", "0.5b", ("fair-long", "frontier-0.5b-long")),
    Shape("2B", "2b", ("fair-2b", "frontier-2b")),
)
GPUS = ("H200", "H100")
_NOT_MEASURED = "not measured"
_BY_MUON = "by Muon"
SAME_TIME = 0.08  # times that differ by at most this are taken to be equal
LONGER = 0.1  # by at most so much longer a dense FFN may take if it still ends higher
# By so many nats a setting with fewer seeds must be lower than one with more to be the better one.
SEED_NOISE = 0.01
_OPTIMIZERS = {"muon": "Muon", "adamw": "AdamW"}
_ACTIVATIONS = {"silu": "SiLU", "relu": "ReLU", "relu2": "ReLU²"}
_ACTIVATION_NAMES = list(_ACTIVATIONS)
# Of the usual width: without a gate, that many neurons have as many weights. Wider FFNs count only
# where neurons were normalised: with plain Muon, width brought no gain.
_WIDEST = 1.5


class Kind(NamedTuple):
    """What is compared; kinds are sorted as the tables list them."""

    experts: tuple[int, ...]  # their number, and how many are active for a token; (): none
    target_nnz: float  # 0: dense
    per_layer: bool
    activation: int  # index in `_ACTIVATIONS`
    non_gated: bool
    narrowing: float  # the usual number of neurons, divided by that of this kind
    schedule: tuple[tuple[float, float], ...] = ()  # earlier targets, as in the recipe

    @property
    def is_dense(self) -> bool:
        """Every neuron is computed for every token."""
        return not self.experts and not self.target_nnz


DENSE_SILU = Kind((), 0.0, False, 0, False, 1.0)


class Rates(NamedTuple):
    """Settings of the optimizer."""

    learning_rate: float
    gates: str = ""  # with Muon: their learning rate as a share of that one, or `_BY_MUON`
    more: str = ""

    def __str__(self) -> str:
        gates = f", gates {self.gates}" if self.gates else ""
        return f"{self.learning_rate:g}{gates}{self.more}"


class End(NamedTuple):
    """Where a run ended."""

    gpu: str
    loss: float  # validation, nats per token
    seconds: float  # of all GPUs
    dead: float | None  # share of the neurons; None: not recorded


class Setting(NamedTuple):
    """Runs that differ in nothing but their seed."""

    kind: Kind
    title: str  # of the kind
    tokens: int
    rates: Rates
    ends: dict[int, list[End]]  # by seed; several if it was trained on several models of GPU

    def loss(self, seeds: Sequence[int] | None = None) -> float:
        """Mean over these seeds, or over all."""
        return fmean(self.ends[seed][0].loss for seed in (seeds or self.ends))

    def seconds(self, gpu: str = "") -> list[float]:
        """Of the runs on this model of GPU, or on all."""
        return [end.seconds for ends in self.ends.values() for end in ends if gpu in end.gpu]


def settings(
    lines: Sequence[Line], shape: Shape, gpus: Sequence[str] = GPUS, optimizer: str = "muon"
) -> list[Setting]:
    """All settings with records of these models of GPU, sorted by tokens, kind and rates."""
    usual = load_recipe(shape.recipe).model.intermediate_size
    by_key: dict[tuple[int, Kind, Rates], Setting] = {}
    for sweep, gpu in product(shape.sweeps, gpus):
        for recipe, run in _finished(lines, sweep, gpu):
            if run.case.get("optimizer", "adamw") != optimizer:
                continue
            kind, tokens, rates = _kind(recipe, run, usual), run.case["tokens"], _rates(run)
            reinitialised = recipe is not None and recipe.sparsity.reinit_rate > 0
            may_be_wide = kind.experts or run.case.get("normalize_neurons")
            if (1 / kind.narrowing > _WIDEST and not may_be_wide) or reinitialised:
                continue
            setting = Setting(kind, _title(kind, run), tokens, rates, {})
            setting = by_key.setdefault((tokens, kind, rates), setting)
            ends = setting.ends.setdefault(run.case["seed"], [])
            if all(end.gpu != gpu for end in ends):
                dead = run.last("dead_fraction") if "dead_fraction" in run.by_metric else None
                ends.append(End(gpu, run.last("validation_loss"), run.last("gpu_seconds"), dead))
    return [by_key[key] for key in sorted(by_key)]


def settings_by_sweep(
    lines: Sequence[Line], shape: Shape, gpus: Sequence[str] = GPUS, optimizer: str = "muon"
) -> Iterator[list[Setting]]:
    """`settings` of each of the shape's sweeps alone."""
    for sweep in shape.sweeps:
        yield settings(lines, shape._replace(sweeps=(sweep,)), gpus, optimizer)


def _finished(lines: Sequence[Line], sweep: str, gpu: str) -> Iterator[tuple[Recipe | None, Run]]:
    """Recorded runs in FP8 that reached the last step of their recipe.

    A mixture of experts has no recipe in the sweep, and is recorded only once it has ended.
    """
    try:
        recorded = runs(lines, sweep, "*", gpu=gpu)
    except ValueError:  # there is none
        return
    recipes = _recipes(sweep)
    for run in recorded:
        case, recipe = run.case, recipes.get(run.case["run"])
        ended = recipe is not None and case["step"] == recipe.train.steps
        if not ended and "experts" not in case:
            continue
        if case.get("precision") == "fp8" and "gpu_seconds" in run.by_metric:
            yield recipe, run


@cache
def _recipes(sweep: str) -> dict[str, Recipe]:
    return {run.name: run.recipe for run in load_plan(sweep).runs}


def _kind(recipe: Recipe | None, run: Run, usual: int) -> Kind:
    narrowing = usual / run.case["intermediate_size"]
    if recipe is None:
        experts = (run.case["experts"], run.case["active_experts"])
        return DENSE_SILU._replace(experts=experts, narrowing=narrowing)
    return Kind(
        (),
        recipe.sparsity.target_nnz or 0.0,
        recipe.sparsity.target_per_layer,
        _ACTIVATION_NAMES.index(recipe.ffn.activation),
        not recipe.ffn.gated,
        narrowing,
        tuple(recipe.sparsity.target_schedule),
    )


def _title(kind: Kind, run: Run) -> str:
    neurons = f", {run.case['intermediate_size']:,} neurons" if kind.narrowing != 1 else ""
    if kind.experts:
        experts, active = kind.experts
        return f"{experts} experts in bf16, {active} active{neurons}"
    activation = list(_ACTIVATIONS.values())[kind.activation]
    title = f"dense {activation}"
    if kind.target_nnz:
        title = f"sparse, target {kind.target_nnz:g}{' per layer' if kind.per_layer else ''}"
        for share, target in kind.schedule:
            title += f", {target:g} until {share:.0%}"
        title += f", {activation}" if activation != "ReLU" else ""
    return f"{title}, no gate" if kind.non_gated else title + neurons


def _rates(run: Run) -> Rates:
    rate, gates = run.case["learning_rate"], ""
    if "optimizer" in run.case:
        # Not from the recipe: another default applied to dense models when the first were trained.
        of_gates = run.case.get("gate_learning_rate")
        gates = f"1/{rate / of_gates:.3g}" if of_gates else _BY_MUON
    more = ", normalized" if run.case.get("normalize_neurons") else ""
    of_router = run.case.get("router_learning_rate")
    return Rates(rate, gates, more + (f", router 1/{rate / of_router:.3g}" if of_router else ""))


def best(alike: Sequence[Setting]) -> Setting:
    """The setting with the lowest loss over the seeds that it shares with the others.

    One with fewer seeds must be lower by more than `SEED_NOISE`.
    """
    most = max(len(setting.ends) for setting in alike)
    first = min((s for s in alike if len(s.ends) == most), key=Setting.loss)
    least = min(alike, key=lambda setting: above(setting, first) or 0.0)
    return least if (above(least, first) or 0.0) < -SEED_NOISE else first


def above(setting: Setting, other: Setting) -> float | None:
    """Its loss less the other's, mean of the seeds that both have; None: there is none."""
    seeds = [seed for seed in setting.ends if seed in other.ends]
    return setting.loss(seeds) - other.loss(seeds) if seeds else None


def equal_tokens(lines: Sequence[Line]) -> list[list[str]]:
    """A row for each kind of FFN, where dense SiLU was trained on as many tokens.

    Raises:
        ValueError: no records give a row.
    """
    rows = []
    for shape in SHAPES:
        for tokens, of_tokens in groupby(settings(lines, shape), lambda setting: setting.tokens):
            kinds = {kind: list(group) for kind, group in groupby(of_tokens, lambda s: s.kind)}
            if len(kinds) == 1 or DENSE_SILU not in kinds:
                continue
            dense = best(kinds[DENSE_SILU])
            for alike in kinds.values():
                setting = best(alike)
                row = [f"{shape.title}, {tokens / 1e6:.1f}M", setting.title]
                row += [f"{setting.rates}; {len(alike)}", _losses(setting)]
                row += ["" if setting is dense else _difference(setting, dense), _times(setting)]
                rows.append(row)
    return _checked(rows)


def equal_time(lines: Sequence[Line]) -> list[list[str]]:
    """A row for each kind of sparse FFN and dense one that took about as long, see `_rivals`.

    Raises:
        ValueError: no records give a row.
    """
    rows = []
    for shape, optimizer, gpu in product(SHAPES, _OPTIMIZERS, GPUS):
        shown = set()
        for every in settings_by_sweep(lines, shape, (gpu,), optimizer):
            for key, group in groupby(every, lambda setting: (setting.tokens, setting.kind)):
                sparse = best(list(group))
                rivals = [rival for rival in _rivals(sparse, every) if rival is not None]
                if sparse.kind.is_dense or key in shown or not rivals:
                    continue
                shown.add(key)
                title = f"{shape.title}, {_OPTIMIZERS[optimizer]}, {gpu}"
                for rival in rivals:
                    sides = [cell for side in (sparse, rival) for cell in _side(side)]
                    rows.append([title, *sides, _difference(sparse, rival)])
    return _checked(rows)


def gate_rates(lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """A row for each kind of FFN that one sweep trained with several settings of the gates.

    A cell has the losses of the seeds and, for sparse FFNs, the shares of dead neurons.

    Returns:
        The heads of the columns, with a column for each setting that a row has, and the rows.

    Raises:
        ValueError: no records give a row.
    """
    compared = []
    for shape in SHAPES:
        for of_sweep in settings_by_sweep(lines, shape):
            by_row: dict[tuple[int, str, Rates], dict[str, str]] = {}
            for setting in of_sweep:
                row = (setting.tokens, setting.title, setting.rates._replace(gates=""))
                by_row.setdefault(row, {})[setting.rates.gates] = _losses_and_dead(setting)
            for (tokens, title, rates), cells in by_row.items():
                if len(cells) > 1:
                    model = f"{shape.title}, {tokens / 1e6:.1f}M"
                    compared.append(([model, f"{title} ({rates})"], cells))
    tried = {gates for _, cells in compared for gates in cells}
    # Gates by Muon first, then the highest learning rate of AdamW.
    columns = sorted(
        tried, key=lambda gates: float(gates.removeprefix("1/").replace(_BY_MUON, "0"))
    )
    rows = [[*head, *(cells.get(gates, "") for gates in columns)] for head, cells in compared]
    return ["Model, tokens", "FFN (Muon's learning rate)", *columns], _checked(rows)


def headline(lines: Sequence[Line], shape: Shape, target_nnz: float) -> list[str]:
    """Of the longest runs on H200 that train a sparse FFN with one λ for all layers.

    They are of the first of the shape's sweeps that has such runs: it has the newest code. Times
    are compared within this sweep, losses after equal tokens over all of the shape's sweeps.

    Returns:
        Their tokens; `time_ratio`, from step 0; their loss less that of each of `_rivals`, with the
        seconds of both; and the loss of this kind less that of dense SiLU after equal tokens, each
        at its best.

    Raises:
        ValueError: there are no such runs.
    """
    kind = DENSE_SILU._replace(target_nnz=target_nnz, activation=_ACTIVATION_NAMES.index("relu"))
    sparse, of_sweep = _longest(lines, shape, kind)
    rivals = _rivals(sparse, of_sweep)
    ratio = time_ratio(sparse, of_sweep)
    if rivals[0] is None or ratio is None:
        raise ValueError(f"{shape.title}: no dense run is recorded that took about as long")
    as_long = [s for s in settings(lines, shape, GPUS[:1]) if s.tokens == sparse.tokens]
    dense = [s for s in as_long if s.kind == DENSE_SILU]
    of_kind = best([s for s in as_long if s.kind == kind])
    return [
        f"{sparse.tokens / 1e6:.0f}M",
        f"{ratio:.2f}×",
        *(_in_time(sparse, rival) for rival in rivals),
        _difference(of_kind, best(dense)) if dense else _NOT_MEASURED,
    ]


def time_ratio(setting: Setting, of_sweep: Sequence[Setting]) -> float | None:
    """Seconds per token of dense SiLU over those of this setting.

    Dense SiLU is the rival in equal time or, if there is none, the best after as many tokens. None:
    the sweep has neither.
    """
    dense = [other for other in of_sweep if other.kind == DENSE_SILU]
    rival, _ = _rivals(setting, dense)
    as_long = [other for other in dense if other.tokens == setting.tokens]
    if rival is None and not as_long:
        return None
    return _seconds_per_token(rival or best(as_long)) / _seconds_per_token(setting)


def _seconds_per_token(setting: Setting) -> float:
    return fmean(setting.seconds()) / setting.tokens


def _longest(lines: Sequence[Line], shape: Shape, kind: Kind) -> tuple[Setting, list[Setting]]:
    """The best setting of this kind with the most tokens, and all settings of its sweep."""
    for of_sweep in settings_by_sweep(lines, shape, GPUS[:1]):
        alike = [setting for setting in of_sweep if setting.kind == kind]
        if alike:
            most = max(setting.tokens for setting in alike)
            return best([setting for setting in alike if setting.tokens == most]), of_sweep
    raise ValueError(f"{shape.title}: no sparse run on an {GPUS[0]} is recorded")


def _in_time(setting: Setting, rival: Setting | None) -> str:
    if rival is None:
        return _NOT_MEASURED
    seconds = f"{fmean(setting.seconds()):,.0f} s (dense: {fmean(rival.seconds()):,.0f} s)"
    return f"{_difference(setting, rival)} in {seconds}"


def _rivals(setting: Setting, every: Sequence[Setting]) -> tuple[Setting | None, Setting | None]:
    """The dense ones with the lowest loss of those that took about as long.

    Returns:
        One with the recipe's number of neurons or more, and one with fewer; None: there is none.
    """
    alike = [other for other in every if other.kind.is_dense and _is_rival(other, setting)]
    alike.sort(key=Setting.loss)
    wide = next((other for other in alike if other.kind.narrowing <= 1), None)
    return wide, next((other for other in alike if other.kind.narrowing > 1), None)


def _is_rival(dense: Setting, setting: Setting) -> bool:
    """Whether it took about as long, or longer and ended higher all the same."""
    longer = fmean(dense.seconds()) / fmean(setting.seconds()) - 1
    return abs(longer) <= SAME_TIME or (0 < longer <= LONGER and dense.loss() > setting.loss())


def _checked(rows: list[list[str]]) -> list[list[str]]:
    if not rows:
        raise ValueError("no runs are recorded that can be compared")
    return rows


def _losses(setting: Setting) -> str:
    each = _each_loss(setting)
    return f"{setting.loss():.3f} ({each})" if len(setting.ends) > 1 else each


def _losses_and_dead(setting: Setting) -> str:
    dead = [f"{100 * end.dead:.0f}" for end in _ends(setting) if end.dead is not None]
    with_dead = dead and not setting.kind.is_dense
    return _each_loss(setting) + (f" ({', '.join(dead)}%)" if with_dead else "")


def _each_loss(setting: Setting) -> str:
    return ", ".join(f"{end.loss:.3f}" for end in _ends(setting))


def _ends(setting: Setting) -> list[End]:
    """Of each seed in order, on the first model of GPU."""
    return [ends[0] for _, ends in sorted(setting.ends.items())]


def _difference(setting: Setting, other: Setting) -> str:
    """Nats, and percent in brackets."""
    nats = above(setting, other)
    if nats is None:
        return ""
    return f"{nats:+.3f} ({100 * nats / other.loss():+.1f}%)".replace("-", "−")


def _times(setting: Setting) -> str:
    by_gpu = [(gpu, setting.seconds(gpu)) for gpu in GPUS if setting.seconds(gpu)]
    return "; ".join(f"{_rounded(seconds)} ({gpu})" for gpu, seconds in by_gpu)


def _side(setting: Setting) -> list[str]:
    tokens = f"{setting.tokens / 1e6:.1f}M; {_rounded(setting.seconds())}"
    return [f"{setting.title} ({setting.rates})", tokens, _losses(setting)]


def _rounded(seconds: Sequence[float]) -> str:
    return ", ".join(f"{value:,.0f}" for value in seconds)


TOKENS_HEAD = (
    "Model, tokens", "FFN", "Learning rates; settings tried", "Validation loss (each seed)",
    "Above dense SiLU, nats (%)", "GPU seconds",
)  # fmt: skip
TIME_HEAD = (
    "Model, optimizer, GPU", "Sparse FFN (learning rates)", "Tokens; seconds", "Loss",
    "Dense FFN (learning rates)", "Tokens; seconds", "Loss", "Sparse above dense, nats (%)",
)  # fmt: skip
