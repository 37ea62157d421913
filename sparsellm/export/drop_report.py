"""The result of dropping dead neurons: for the terminal, the model card and `drop_dead.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from sparsellm.recipe import Recipe
from sparsellm.recipe.strict import read_json, validate
from sparsellm.words import markdown_table

DROP_DEAD_FILE = "drop_dead.json"
_REMEDY = "put the model's own file back, or delete it"
_COLUMNS = ("layer", "active", "never active", "of these kept", "dropped", "nearest dropped")


class LayerReport(BaseModel):
    """One layer; fired + silent = N, kept + the dropped = N."""

    model_config = ConfigDict(frozen=True)

    fired: int  # neurons active for some token
    silent: int  # active for none
    kept: int  # W: the active ones, and the silent ones that came closest to it
    nearest_dropped: float | None  # highest pre-activation of a dropped neuron on any token, ≤ 0
    dropped: list[int]  # their numbers in the model as it was trained


class DropReport(BaseModel):
    """The measurement and its result."""

    model_config = ConfigDict(frozen=True)

    tokens: int  # measured
    tokens_asked: int
    context_length: int  # tokens per sequence
    corpus: str
    files: list[str] | None
    dtype: str
    device: str
    intermediate_size_before: int
    intermediate_size: int  # the same as before where nothing can be saved
    width_multiple: int
    parameters_before: int
    parameters_saved: int
    bytes_saved: int
    target_nnz_left_out: float | None  # of the recipe, where it is not below the new width
    layers: list[LayerReport]
    earlier: DropReport | None = None  # of the export that was narrowed further

    @property
    def num_dropped(self) -> int:
        """Neurons dropped from each layer, N - W; 0 if the export is as without --drop-dead."""
        return self.intermediate_size_before - self.intermediate_size

    def remaining(self, layer: int) -> list[int]:
        """The neurons that a layer has left: their numbers in the model as it was trained."""
        before: Iterable[int] = range(self.intermediate_size_before)
        if self.earlier:
            before = self.earlier.remaining(layer)
        dropped = set(self.layers[layer].dropped)
        return [neuron for neuron in before if neuron not in dropped]

    def text(self) -> str:
        """For the terminal and the model card: Markdown."""
        source = self.corpus + (f" ({' '.join(self.files)})" if self.files else "")
        ends = ""
        if self.tokens < self.tokens_asked // self.context_length * self.context_length:
            ends = f" ({self.tokens_asked:,} were asked for: its held-out text ends there)"
        num_active = [layer.fired for layer in self.layers]
        decided = (
            f"layer {num_active.index(max(num_active))} decides, {max(num_active):,} of its "
            f"{self.intermediate_size_before:,} neurons were active; widths are multiples of "
            f"{self.width_multiple}"
        )
        rows = [
            (
                number,
                f"{layer.fired:,}",
                f"{layer.silent:,}",
                f"{layer.kept - layer.fired:,}",
                f"{len(layer.dropped):,}",
                "" if layer.nearest_dropped is None else f"{layer.nearest_dropped:.4g}",
            )
            for number, layer in enumerate(self.layers)
        ]
        head = f"""\
Measured on {self.tokens:,} tokens of `{source}`{ends}, with these weights in {self.dtype}
on {self.device}:

{table(_COLUMNS, rows)}

"""
        if not self.num_dropped:
            return f"{head}Nothing dropped: {decided}."
        target = ""
        if self.target_nnz_left_out is not None:
            target = (
                f"\nThe recipe beside the weights has no sparsity.target_nnz (it was "
                f"{self.target_nnz_left_out:g}), which must be below the width."
            )
        return f"""{head}\
Width {self.intermediate_size_before:,} → {self.intermediate_size:,} in every layer: {decided}.
Where that leaves room, the neurons stay that came closest to being active ("nearest dropped" is how
close a dropped one's pre-activation came to zero, above which it would have been active).
Saved: {self.parameters_saved:,} of {self.parameters_before:,} parameters
({self.parameters_saved / self.parameters_before:.1%}), {self.bytes_saved / 2**20:,.1f} MiB of \
weights in {self.dtype}, {self._gate_gemm_saved:.1%} of the gate GEMM.{target}

On the measured tokens the output is that of the whole model up to the order of summation: what was
left out contributed zeros. On other text a dropped neuron might be active. Silent on
{self.tokens:,} tokens, each is active for under {self._rate_bound:.2g} of the tokens with 95%
confidence (3 over their number; each neuron alone, tokens taken as independent, text of the same
kind in sequences of {self.context_length:,})."""

    @property
    def _rate_bound(self) -> float:
        # The rule of three: a neuron active for none of n tokens is active for under 3/n of them
        # with 95% confidence, (1 - 3/n)^n ≈ 0.05.
        return min(3 / self.tokens, 1.0)

    @property
    def _gate_gemm_saved(self) -> float:
        return self.num_dropped / self.intermediate_size_before

    def to_json(self) -> str:
        """All fields and derived values as JSON."""
        content = self.model_dump()
        content["rate_bound_95"] = self._rate_bound
        content["gate_gemm_saved"] = self._gate_gemm_saved
        return json.dumps(content) + "\n"


def read_report(folder: Path, recipe: Recipe) -> DropReport | None:
    """The report of neurons that an earlier export dropped from the model of ``recipe``, if any.

    Raises:
        ValueError: the file is damaged, or of another model.
    """
    file, shape = folder / DROP_DEAD_FILE, recipe.model
    if not file.is_file():
        return None
    report = validate(DropReport, read_json(file, _REMEDY), file, remedy=_REMEDY)
    has = shape.num_hidden_layers, shape.intermediate_size
    if (len(report.layers), report.intermediate_size) != has:
        raise ValueError(
            f"{file} is not of this model, of {has[0]} layers of {has[1]:,} neurons; {_REMEDY}"
        )
    return report


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown, whose cells are escaped."""
    head_cells, *row_cells = (list(map(_cell, line)) for line in (head, *rows))
    return markdown_table(head_cells, row_cells).removesuffix("\n")


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")
