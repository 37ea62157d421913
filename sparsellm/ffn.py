"""The FFN module: Hugging Face's Llama MLP in names and shapes, plus its sparsity statistics."""

from __future__ import annotations

from torch import Tensor, nn

from sparsellm.reference import FFNStats, gated_ffn, non_gated_ffn


class SparseFFN(nn.Module):
    """``gate_proj``, ``up_proj``, ``down_proj`` as in `LlamaMLP` (non-gated: as in `ArceeMLP`).

    A checkpoint of the one loads into the other without conversion.

    Args:
        hidden_size: K.
        intermediate_size: N.
        activation: ``relu`` or ``silu``.
        gated: with `gate_proj` (`act(gate) * up`), or without (`act(up)`).
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, activation: str = "relu", gated: bool
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gated = gated
        if gated:
            self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    @property
    def pattern_weight(self) -> Tensor:
        """The (N, K) weight whose activation decides the pattern: the gate's, else up's."""
        return (self.gate_proj if self.gated else self.up_proj).weight

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) → (…, K), as Hugging Face's MLP."""
        return self.forward_with_stats(x)[0]

    def forward_with_stats(self, x: Tensor) -> tuple[Tensor, FFNStats]:
        """(…, K) → (…, K) and the statistics over all tokens of ``x``, in order."""
        x_MK = x.reshape(-1, x.shape[-1])
        if self.gated:
            y_MK, stats = gated_ffn(
                x_MK,
                self.gate_proj.weight,
                self.up_proj.weight,
                self.down_proj.weight,
                self.activation,
            )
        else:
            y_MK, stats = non_gated_ffn(
                x_MK, self.up_proj.weight, self.down_proj.weight, self.activation
            )
        return y_MK.reshape(x.shape), stats

    def extra_repr(self) -> str:
        return f"activation={self.activation}, gated={self.gated}"
