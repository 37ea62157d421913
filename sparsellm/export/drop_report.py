"""The result of dropping dead neurons: for the terminal, the model card and `drop_dead.json`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

DROP_DEAD_FILE = "drop_dead.json"
COLUMNS = ("layer", "fired", "never fired", "of these kept", "dropped", "nearest dropped")


@dataclass(frozen=True)
class LayerReport:
    """One layer; fired + silent = N, kept + the dropped = N."""

    fired: int  # neurons that fired on some token
    silent: int  # that fired on none
    kept: int  # W: all that fired, and the silent ones that came closest to firing
    nearest_dropped: float | None  # highest pre-activation of a dropped neuron on any token, ≤ 0
    dropped: list[int]  # their numbers before


@dataclass(frozen=True)
class DropReport:
    """The measurement and its result."""

    tokens: int  # measured
    tokens_asked: int
    context_length: int  # tokens a sequence
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
    layers: list[LayerReport]

    @property
    def num_dropped(self) -> int:
        """Neurons dropped from each layer, N - W; 0 if the export is as without --drop-dead."""
        return self.intermediate_size_before - self.intermediate_size

    @property
    def rate_bound(self) -> float:
        """With 95% confidence a neuron that fired on none of n tokens fires on under 3/n of them.

        The rule of three, (1 - 3/n)^n ≈ 0.05: for each neuron alone, and as if tokens were drawn
        independently from text of the kind that was measured.
        """
        return min(3 / self.tokens, 1.0)

    @property
    def gate_gemm_saved(self) -> float:
        """Share of the gate GEMM's (in dense code: of each FFN GEMM's) arithmetic, 1 - W/N."""
        return self.num_dropped / self.intermediate_size_before

    @property
    def measured(self) -> str:
        """The measured text: how much and from where."""
        source = self.corpus + (f" ({' '.join(self.files)})" if self.files else "")
        text = f"{self.tokens:,} tokens of `{source}`"
        if self.tokens < self.tokens_asked // self.context_length * self.context_length:
            text += f" ({self.tokens_asked:,} were asked for: its held-out text ends there)"
        return text

    @property
    def decided(self) -> str:
        """The reason for the width."""
        fired = [layer.fired for layer in self.layers]
        needed = max(fired)
        return (
            f"layer {fired.index(needed)} decides, {needed:,} of its "
            f"{self.intermediate_size_before:,} neurons fired; widths are multiples of "
            f"{self.width_multiple}"
        )

    @property
    def saved(self) -> str:
        """Parameters, bytes and arithmetic."""
        return (
            f"{self.parameters_saved:,} of {self.parameters_before:,} parameters "
            f"({self.parameters_saved / self.parameters_before:.1%}), "
            f"{self.bytes_saved / 2**20:,.1f} MiB of weights in {self.dtype}, "
            f"{self.gate_gemm_saved:.1%} of the gate GEMM"
        )

    def rows(self) -> list[tuple[str, ...]]:
        """One row per layer with `COLUMNS`."""
        return [
            (
                f"{number}",
                f"{layer.fired:,}",
                f"{layer.silent:,}",
                f"{layer.kept - layer.fired:,}",
                f"{len(layer.dropped):,}",
                "" if layer.nearest_dropped is None else f"{layer.nearest_dropped:.4g}",
            )
            for number, layer in enumerate(self.layers)
        ]

    def text(self) -> str:
        """For a terminal."""
        lines = [f"measured: {self.measured}, in {self.dtype} on {self.device}"]
        for cells in (COLUMNS, *self.rows()):
            padded = (f"{c:>{len(head)}}" for c, head in zip(cells, COLUMNS, strict=True))
            lines.append("  ".join(padded).rstrip())
        if not self.num_dropped:
            return "\n".join([*lines, f"nothing dropped: {self.decided}"])
        return "\n".join(
            [
                *lines,
                f"width {self.intermediate_size_before:,} → {self.intermediate_size:,} in every "
                f"layer: {self.decided}",
                f"saved: {self.saved}",
                "exact on the measured tokens, up to the order of summation; on other such text "
                f"each dropped neuron fires on under {self.rate_bound:.2g} of the tokens (3 over "
                "their number, 95% confidence)",
            ]
        )

    def to_json(self) -> str:
        """All fields and derived values as JSON; one line per layer."""
        content: dict[str, Any] = dataclasses.asdict(self)
        layers = ",\n  ".join(json.dumps(layer) for layer in content.pop("layers"))
        content |= {"rate_bound_95": self.rate_bound, "gate_gemm_saved": self.gate_gemm_saved}
        head = json.dumps(content, indent=1).removesuffix("\n}")
        return f'{head},\n "layers": [\n  {layers}\n ]\n}}\n'
