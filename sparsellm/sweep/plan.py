"""A sweep: one strict YAML (``recipes/sweeps/``) that names the runs of an experiment.

Needs no PyTorch.
"""

import fnmatch
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, NonNegativeInt, model_validator

from sparsellm.paths import bundled, named_file
from sparsellm.recipe import Recipe, load_recipe
from sparsellm.recipe.changes import check_shapes
from sparsellm.recipe.keys import section_of
from sparsellm.recipe.strict import StrictModel, load_yaml, parse_yaml, validate
from sparsellm.runs.huggingface.hf_files import with_tokenizer_at_hand

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


def _dotted(keys: dict[str, Any]) -> dict[str, Any]:
    """Recipe keys with their values; a section's are named one by one, as ``section.key``."""
    dotted: dict[str, Any] = {}
    for key, value in keys.items():
        is_section = isinstance(value, dict) and section_of(Recipe, key)
        dotted |= {f"{key}.{leaf}": v for leaf, v in value.items()} if is_section else {key: value}
    return dotted


Settings = Annotated[dict[str, Any], AfterValidator(_dotted)]


class Variant(StrictModel):
    """One setting, or one per combination of values; every seed is a run."""

    name: str = Field(
        pattern=NAME, description="Name of the runs; the values of `each` are appended"
    )
    set: Settings = Field({}, description="Recipe keys, such as sparsity.l1_coefficient: 0")
    each: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(
        {}, description="Recipe keys with several values each"
    )
    seeds: list[NonNegativeInt] | None = Field(
        None, min_length=1, description="Replaces the sweep's seeds"
    )
    init_from: str | None = Field(
        None,
        description="Run of this sweep, listed before, such as dense-seed0: these begin with its "
        "last checkpoint, once it is finished",
    )


class Sweep(StrictModel):
    """An experiment."""

    name: str = Field(pattern=NAME, description="Folder of its runs, in the recipe's run_dir")
    description: str = Field("", description="One sentence that describes it")
    recipe: str = Field(description="Bundled recipe or YAML file, the base of every run")
    set: Settings = Field({}, description="Recipe keys for all runs")
    seeds: list[NonNegativeInt] = Field([0], min_length=1, description="Seeds of each variant")
    runs: list[Variant] = Field(min_length=1, description="The settings that are compared")

    @model_validator(mode="after")
    def _leaves_names_alone(self) -> Self:
        reserved = ("name", "seed", "logging.run_dir")
        for keys in (self.set, *(v.set for v in self.runs), *(v.each for v in self.runs)):
            for key in keys:
                if key in reserved:
                    raise ValueError(f"key {key!r} is the sweep's own: use `name` and `seeds`")
        return self


@dataclass(frozen=True)
class PlannedRun:
    """One run. Runs of a group differ only in their seed."""

    name: str
    group: str
    recipe: Recipe
    init_from: str | None = None  # name of the run whose last checkpoint it begins with
    changes: tuple[str, ...] = ()  # ``key=value`` of its variant

    @property
    def source_path(self) -> Path | None:
        """The folder of that run."""
        return None if self.init_from is None else self.recipe.run_path.parent / self.init_from


@dataclass(frozen=True)
class SweepPlan:
    """The runs of a sweep."""

    name: str
    description: str
    folder: Path
    runs: tuple[PlannedRun, ...]

    def named(self, patterns: Sequence[str]) -> list[PlannedRun]:
        """The runs whose names match any of the patterns (`fnmatch`).

        Raises:
            ValueError: a pattern matches none.
        """
        for pattern in patterns:
            if not fnmatch.filter((run.name for run in self.runs), pattern):
                raise ValueError(
                    f"sweep {self.name}: no run is called {pattern!r}; --list instead of --only "
                    "lists them"
                )
        return [run for run in self.runs if any(fnmatch.fnmatch(run.name, p) for p in patterns)]


def bundled_sweeps() -> dict[str, str]:
    """The bundled sweeps by name, each with a sentence that describes it."""
    files = sorted((bundled("recipes") / "sweeps").glob("*.yaml"))
    return {file.stem: validate(Sweep, load_yaml(file), file).description for file in files}


def load_plan(name_or_path: str, overrides: list[str] | None = None) -> SweepPlan:
    """Reads a sweep and resolves all recipes, so that a wrong key is found before any run starts.

    ``overrides`` (``section.key=value``) are for all runs, and override the file, except what the
    runs' names say: seeds and the values of `each`.

    Raises:
        FileNotFoundError: the sweep or recipe does not exist.
        ValueError: an unknown key, values that contradict one another, two runs of one name, or
            different settings under one.
    """
    path = named_file("sweep", name_or_path, bundled("recipes") / "sweeps")
    sweep = validate(Sweep, load_yaml(path), path)
    # Two runs of one name would share a folder.
    named = {"name", "seed", *(key for variant in sweep.runs for key in variant.each)}
    overridden = {key for override in overrides or [] for key in _keys_of(override)}
    for key in overridden:
        if any(f"{key}.".startswith(f"{name}.") for name in named):
            raise ValueError(f"--set {key}: the runs of {path} are named by it; change it there")
    # The others may fit only together with what a run sets.
    base = load_recipe(sweep.recipe, [o for o in overrides or [] if o.startswith("logging")])
    folder = Path(base.logging.run_dir).expanduser() / sweep.name
    runs = _planned(sweep, path, folder, overrides or [], overridden)
    _check_together(path, runs)
    resumable = (replace(run, recipe=with_tokenizer_at_hand(run.recipe)) for run in runs)
    return SweepPlan(sweep.name, sweep.description, folder, tuple(resumable))


def _keys_of(override: str) -> Iterable[str]:
    """The keys that an override sets."""
    key, _, text = override.partition("=")
    return _dotted({key.strip(): parse_yaml(text, f"--set {override!r}")})


def _planned(
    sweep: Sweep, path: Path, folder: Path, overrides: list[str], overridden: set[str]
) -> list[PlannedRun]:
    """The runs in the order of the file at ``path``, so that a run's source comes before it."""
    runs: list[PlannedRun] = []
    shared = _assignments(sweep.set, except_for=overridden)
    for variant in sweep.runs:
        source, before = variant.init_from, {run.name: run.recipe for run in runs}
        if source is not None and source not in before:
            raise ValueError(
                f"{path}: init_from of {variant.name}: no run {source!r} is listed before it; "
                f"there are {', '.join(before) or 'none'}"
            )
        seeds = variant.seeds or sweep.seeds
        for (group, values), seed in itertools.product(_settings(variant), seeds):
            name = f"{group}-seed{seed}"
            if not re.match(NAME, name):
                raise ValueError(
                    f"{path}: `each` of {variant.name} makes a run {name!r}, which cannot be the "
                    "name of a folder; write one entry of `runs` for each of these values, with "
                    "`set`"
                )
            changes = _assignments(variant.set | values, except_for=overridden)
            place = [f"name={name}", f"seed={seed}", f"logging.run_dir={json.dumps(str(folder))}"]
            try:
                recipe = load_recipe(sweep.recipe, [*shared, *changes, *overrides, *place])
            except ValueError:
                load_recipe(sweep.recipe, overrides)  # a mistake in these needs fewer words
                raise
            if source is not None:
                where = f"{path}: init_from of {variant.name}: {source}"
                check_shapes(where, before[source], recipe, "train one of the same shapes")
            runs.append(PlannedRun(name, group, recipe, source, changes))
    return runs


def _check_together(path: Path, runs: list[PlannedRun]) -> None:
    """Raises ValueError for what cannot be seen in one variant alone."""
    names = [run.name for run in runs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path}: two runs are called {min(twice)}; give them other names")
    firsts: dict[str, Recipe] = {}
    for run in runs:
        first = firsts.setdefault(run.group, run.recipe)
        same = run.recipe.model_copy(update={"name": first.name, "seed": first.seed})
        if same != first:
            raise ValueError(
                f"{path}: runs of the group {run.group}, which are averaged, differ in more than "
                "their seed; give them other names"
            )


def _assignments(keys: dict[str, Any], *, except_for: set[str]) -> tuple[str, ...]:
    items = (item for item in keys.items() if item[0] not in except_for)
    return tuple(f"{key}={json.dumps(value)}" for key, value in items)


def _settings(variant: Variant) -> list[tuple[str, dict[str, Any]]]:
    """The group's name and the values of each combination."""
    keys, lists = list(variant.each), variant.each.values()
    return [
        ("-".join([variant.name, *map(_short, values)]), dict(zip(keys, values, strict=True)))
        for values in itertools.product(*lists)
    ]


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return str(int(number)) if number.is_integer() else f"{number:g}"  # no sign, as in 1e+06
