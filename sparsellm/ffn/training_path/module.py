"""The FFN module: Hugging Face's Llama MLP in names and shapes, plus its sparsity statistics."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sparsellm.ffn.activations import ACTIVATIONS, RECTIFIED, WITH_KERNELS
from sparsellm.ffn.dispatch import Costs, Kernels, Path, check_choice
from sparsellm.ffn.formats import ELL_WIDTH, backup_rows_for
from sparsellm.ffn.inference_path.discover import Projections
from sparsellm.ffn.reference import dense_ffn
from sparsellm.ffn.shared_linear import SharedLinear
from sparsellm.ffn.step_shared import (
    Fills,
    add_to_gradient,
    gradient_memory,
    kernel_weights,
    summable,
    transposed,
)
from sparsellm.ffn.token_order import TrainingOrder
from sparsellm.ffn.training_path.adapters import beyond_weight
from sparsellm.ffn.training_path.capacity import Capacity
from sparsellm.ffn.training_path.recorded import Recorded, recomputing, recording
from sparsellm.ffn.training_path.training_ops import sparse_ffn_training
from sparsellm.ffn.types import (
    BLOCK_TOKENS,
    FFNStats,
    FFNWeights,
    Format,
    MatrixGradients,
    Ramp,
    StepShared,
    TokenOrder,
)

LLAMA_NAMES = ("gate_proj", "up_proj", "down_proj")
# The largest capacity. It is never reached: the columns of a pattern are fewer than 2³¹.
_UNLIMITED = 2**31


class SparseFFN(nn.Module):
    """``down(act(gate(x)) * up(x))``, or without a gate ``down(act(up(x)))``; no biases.

    Its children have the names and shapes of those of Hugging Face's `LlamaMLP` (without a gate:
    `ArceeMLP`), so a checkpoint of one loads into the other without conversion.

    It computes in the dtype of x, or under autocast in autocast's dtype; the weights may have
    another dtype. On the sparse path, it uses the weights of its children without calling them; on
    the dense path, it calls them. To train it in your own loop, see `SparsityController`.

    Args:
        hidden_size: K, features of a token.
        intermediate_size: N, neurons.
        activation: ``relu``, ``relu2`` (its square) or ``silu`` (dense only).
        gated: whether it has a gate (three matrices) or not (two).
        kernels: see `use_kernels`.
        linear: makes the linear layers, such as a subclass of `nn.Linear` that the host model uses;
            called as ``linear(in_features, out_features, bias=False)``.
        names: names of the children, in the order gate, up, down, or without a gate up, down. None:
            those of `LlamaMLP`.

    Raises:
        ValueError: unknown ``activation`` or ``kernels``; a size below 1; ``names`` are not as many
            different names as matrices.
    """

    # Under their usual names; `projections` has them under any.
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "relu",
        gated: bool,
        kernels: Kernels = "auto",
        linear: Callable[..., nn.Linear] = nn.Linear,
        names: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r} must be one of {', '.join(ACTIVATIONS)}")
        self.use_format("union")
        self.activation = activation
        self.gated = gated
        self.names = names or LLAMA_NAMES[0 if gated else 1 :]
        if isinstance(names, str) or not len(self.names) == len(set(self.names)) == 2 + gated:
            order = "gate, up, down" if gated else "up, down"
            raise ValueError(f"names {self.names}: with gated={gated} these must be {order}")
        if min(hidden_size, intermediate_size) < 1:
            raise ValueError(
                f"hidden_size {hidden_size} and intermediate_size {intermediate_size} must be at "
                "least 1"
            )
        for name in self.names[:-1]:
            setattr(self, name, linear(hidden_size, intermediate_size, bias=False))
        setattr(self, self.names[-1], linear(intermediate_size, hidden_size, bias=False))
        self._capacity: Capacity | None = None
        # The same for compiled code, which would be compiled again for every new Python number.
        # In a list: it is none of the module's tensors, which are moved with it.
        self._columns = [torch.tensor(_UNLIMITED, device="cpu")]
        # Statistics of the last training pass, with the graph of its L1, for `SparsityController`.
        self.records = False
        self.recorded: Recorded | None = None
        self.training_order: TrainingOrder | None = None  # None: the order of x
        self.step_shared: StepShared | None = None
        self.ramp: Ramp | None = None
        self.fp8 = False
        # Whether the loss has L1 of this FFN. Otherwise L1 is not computed, and stated as 0.
        self.has_l1 = True
        self.use_kernels(kernels)

    @property
    def projections(self) -> Projections:
        """The present linear layers; the host model may replace them."""
        layers: list[Any] = [getattr(self, name) for name in self.names]
        return Projections(layers[0] if self.gated else None, layers[-2], layers[-1])

    @property
    def intermediate_size(self) -> int:
        """N."""
        return self.projections.up.weight.shape[0]

    @property
    def pattern_weight(self) -> Tensor:
        """The (N, K) weight that decides which neurons are active: the gate's, else up's."""
        return self._weights().first[0]

    def use_format(self, format: Format, ell_width: int = ELL_WIDTH) -> None:
        """Sets the format in which the sparse path stores the activation pattern.

        Args:
            format: see `Format`.
            ell_width: width of the ELL matrix of ``twell``; tokens with more non-zeros are stored
                dense.

        Raises:
            ValueError: unknown ``format``.
        """
        check_choice("format", format, Format)
        self.format: Format = format
        self.ell_width = ell_width

    def use_fp8(self) -> None:
        """Computes the product that decides which neurons are active in FP8, on the sparse path.

        On the dense path the linear layers decide for themselves (`SharedLinear`).

        Raises:
            ValueError: K or N is not a multiple of 16.
        """
        n, k = self.pattern_weight.shape
        if k % 16 or n % 16:
            raise ValueError(
                f"precision fp8: hidden_size {k} and intermediate_size {n} must be multiples of 16"
            )
        self.fp8 = True

    def use_kernels(self, kernels: Kernels, costs: Costs | None = None) -> None:
        """Sets which path computes the FFN, now and in `update_kernels`.

        Args:
            kernels: ``dense``; ``sparse``: always by `training_ops`; ``auto``: dense until
                ``costs`` predict that sparse is faster.
            costs: of a micro-batch's forward and backward pass, in a distributed run the same on
                all ranks. None: ``auto`` stays dense.

        Raises:
            ValueError: unknown ``kernels``; ``sparse`` for an activation without sparse kernels.
        """
        check_choice("kernels", kernels, Kernels)
        can_be_sparse = self.activation in RECTIFIED
        if kernels == "sparse" and not can_be_sparse:
            raise ValueError(
                f"kernels: sparse needs activation {WITH_KERNELS}, not {self.activation}"
            )
        self.kernels = kernels
        self.costs = costs if can_be_sparse else None
        self.path: Path = "sparse" if kernels == "sparse" else "dense"

    def update_kernels(self, mean_union: float, mean_nnz: float) -> None:
        """Chooses the path of the next step under ``auto``; with hysteresis.

        Both arguments are means over the last step and all ranks, so that all ranks make the same
        choice.

        Args:
            mean_union: number of neurons active for at least one of 64 neighbouring tokens; the
                cost of the union format is linear in it.
            mean_nnz: number of neurons active for a token; the cost of TwELL is linear in it.
        """
        if self.kernels != "auto" or self.costs is None or self.ramp is not None:
            return
        num_active = mean_union if self.format == "union" else mean_nnz
        self.path = self.costs.choose(self.path, num_active)

    def use_ramp(self, ramp: Ramp | None) -> None:
        """Mixes activations in training, by dense products, until it is called with None.

        In evaluation mode the FFN computes with its own activation alone.
        """
        self.ramp = ramp
        if ramp is not None:
            self.path = "dense"
        elif self.kernels == "sparse":
            self.path = "sparse"

    def capacity_for(self, num_tokens: int) -> int | None:
        """The ``capacity`` to pass to `compute` for so many tokens; None for the dense path."""
        if self.path == "dense":
            return None
        if not torch.is_grad_enabled():
            return 0  # nothing is kept for a backward pass
        if self.format == "twell":
            return backup_rows_for(num_tokens)
        worst = -(-num_tokens // BLOCK_TOKENS) * self.intermediate_size
        if torch.compiler.is_compiling():
            # One column below the worst case, for which torch would compile another graph.
            columns: Any = self._columns[0].clamp(max=worst - 1).item()
            torch._check(columns >= 0)
            torch._check(columns < worst)
            return columns  # type: ignore[no-any-return]
        if self._capacity is None:
            self._capacity = Capacity(worst)
        elif self._capacity.worst != worst:
            self._capacity = self._capacity.scaled(worst)
        return self._capacity.columns

    def observe_union(self, largest: int) -> None:
        """Called after a step with its largest ``union_sum`` on this rank, for `capacity_for`."""
        if self._capacity is not None:
            self._capacity.observe(largest)
            self._columns[0].fill_(self._capacity.columns)

    @torch.no_grad()
    def begin_step(self, dtype: torch.dtype, accumulate: bool, fills: Fills) -> None:
        """Called before a step's first micro-batch: prepares what its micro-batches share.

        Weights must not change until `end_step`. On the dense path its `SharedLinear`, if it has
        any, prepare themselves. Nothing is shared of sharded parameters, of which this rank has
        only a part; `training.gathered` calls it again once FSDP2 has gathered them.

        Args:
            dtype: in which the step computes.
            accumulate: the step has several micro-batches, and their gradients may be added up
                outside autograd, since nothing else reads them (no shards). `end_accumulation` must
                follow.
            fills: of all layers; what is prepared is valid once they are filled.
        """
        if self.path == "dense":
            for linear in self.projections:
                if isinstance(linear, SharedLinear):
                    linear.begin_step(dtype, accumulate, fills)
            return
        w, sums = self._weights(), None
        matrices = [matrix for matrix in (w.gate_NK, w.up_NK, w.down_KN) if matrix is not None]
        if any(isinstance(matrix, DTensor) for matrix in matrices):
            return
        weights = kernel_weights(w, dtype, fills, fp8=self.fp8)
        if accumulate and all(map(summable, matrices)):
            gate_NK = None if w.gate_NK is None else gradient_memory(w.gate_NK, fills)
            down_NK = fills.zeros_like(w.down_KN.t(), torch.float32)
            sums = MatrixGradients(gate_NK, gradient_memory(w.up_NK, fills), down_NK)
        self.step_shared = StepShared(weights, sums)

    @torch.no_grad()
    def end_accumulation(self) -> None:
        """Called before a step's last micro-batch, whose gradients go through autograd.

        DDP's hooks then see the sum of all micro-batches, as they do where nothing is shared.
        """
        if self.step_shared is not None and self.step_shared.sums is not None:
            w, sums = self._weights(), self.step_shared.sums
            down_KN = transposed(sums.down_NK, torch.float32)
            totals = zip(w[:3], (sums.gate_NK, sums.up_NK, down_KN), strict=True)
            for parameter, total in totals:
                if parameter is not None and total is not None:
                    add_to_gradient(parameter, total)
            self.step_shared = self.step_shared._replace(sums=None)
        for linear in self.projections:
            if isinstance(linear, SharedLinear):
                linear.end_accumulation()

    def end_step(self) -> None:
        """Called after a step's last micro-batch."""
        self.step_shared = None
        for linear in self.projections:
            if isinstance(linear, SharedLinear):
                linear.end_step()

    def _weights(self) -> FFNWeights:
        gate, up, down = self.projections
        gate_NK = None if gate is None else gate.weight
        return FFNWeights(gate_NK, up.weight, down.weight, activation=self.activation)

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) → (…, K), as Hugging Face's MLP.

        Raises:
            ValueError: see `forward_with_stats`; the model calls it twice in one forward pass in
                training under a `SparsityController`.
        """
        y, stats = self.forward_with_stats(x)
        if self.records and self.training and torch.is_grad_enabled() and not recomputing():
            self.recorded = recording(x, y, stats, self.recorded)
        return y

    def forward_with_stats(self, x: Tensor) -> tuple[Tensor, FFNStats]:
        """(…, K) → (…, K) and the statistics over all tokens of ``x``, in order.

        Raises:
            ValueError: x holds whole numbers; on the sparse path, a linear layer computes more than
                a product with its weight, such as an adapter.
        """
        if not x.is_floating_point():  # weights are cast to its type
            raise ValueError(
                f"x {tuple(x.shape)} is {x.dtype}: an FFN computes on embedded tokens, in fp32 or "
                "bf16"
            )
        num_tokens = x.numel() // x.shape[-1]
        order = None
        if self.training_order is not None:
            order = self.training_order.of(num_tokens, x.device)
        capacity = self.capacity_for(num_tokens)
        if capacity is not None:
            self._check_layers()
        return self.compute(x, capacity, order)

    @property
    def wants_order(self) -> bool:
        """Whether `compute` uses the tokens' order: it is sparse, or may become so.

        TwELL stores each token separately, so the order does not matter to it.
        """
        if self.format == "twell":
            return False
        return self.path == "sparse" or (self.kernels == "auto" and self.costs is not None)

    def compute(
        self,
        x: Tensor,
        capacity: int | None,
        order: TokenOrder | None = None,
        shared: StepShared | None = None,
    ) -> tuple[Tensor, FFNStats]:
        """`forward_with_stats` by a given path: dense (``capacity`` None), or sparse.

        The capacity is a number of columns of the union format, or of rows of the dense backup
        beside TwELL.

        With an ``order`` of the tokens the sparse path computes in that order, and unions are
        counted over its blocks on both paths; all other results are the same.

        ``capacity`` and ``shared`` (`step_shared` of the sparse path) are arguments because
        compiled code that read them from the module would be recompiled for every new value.
        """
        x_MK = x.reshape(-1, x.shape[-1])
        if capacity is None:
            gate, up, down = self.projections
            products = (
                gate and partial(_linear, gate),
                partial(_linear, up),
                partial(_linear, down),
            )
            token_M = None if order is None else order.token_M
            ramp = self.ramp if self.training else None
            y_MK, stats = dense_ffn(x_MK, *products, self.activation, token_M, ramp, l1=self.has_l1)
        else:
            w, layout = self._weights(), (self.format, self.ell_width)
            y_MK, stats = sparse_ffn_training(
                x_MK, w, capacity, order, shared, *layout, fp8=self.fp8, l1=self.has_l1
            )
        return y_MK.reshape(x.shape), stats

    def _check_layers(self) -> None:
        for name in self.names:
            if layer := beyond_weight(getattr(self, name)):
                raise ValueError(
                    f"this SparseFFN's {name} is {layer}, of which the sparse kernels would use "
                    "the weight alone: call use_kernels('dense') on it"
                )

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without the last pass, since torch does not copy graphs."""
        return self.__dict__ | {"recorded": None}

    def extra_repr(self) -> str:
        return f"activation={self.activation}, gated={self.gated}, kernels={self.kernels}"


def _linear(linear: nn.Linear, x_MK: Tensor) -> Tensor:
    """A linear layer's output; a plain `nn.Linear` casts its weight to the type of x."""
    weight = linear.weight
    if (
        type(linear) is nn.Linear
        and weight.dtype != x_MK.dtype
        and not torch.is_autocast_enabled(x_MK.device.type)
    ):
        return F.linear(x_MK, weight.to(x_MK.dtype))
    output: Tensor = linear(x_MK)
    return output
