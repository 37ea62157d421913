"""What a training loop needs besides the FFNs: L1 for its loss, and one call after each step.

L layers, M tokens of a micro-batch, N neurons.
"""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from sparsellm.ffn.inference_path.discover import check_model
from sparsellm.ffn.kernels.compiler.gpu_architecture import device_name
from sparsellm.ffn.token_order import TrainingOrder
from sparsellm.ffn.training_path.recorded import Recorded
from sparsellm.sparsity.counts import (
    NeuronActivity,
    SparsityStatistics,
    StepCounts,
    StepNumbers,
    nnz_statistics,
)
from sparsellm.sparsity.forward_passes import named_ffns, take_recorded
from sparsellm.sparsity.layer_kernels import Call, LayerKernels
from sparsellm.sparsity.optimizer_steps import OptimizerSteps
from sparsellm.sparsity.over_ranks import Group, warn_on_first_rank
from sparsellm.sparsity.settings import ControllerSettings, check_range, check_state
from sparsellm.sparsity.target import TargetController, final_l1


class SparsityController:
    """Makes the `SparseFFN` of a model sparse while your own loop trains the model.

    ```python
    controller = SparsityController(model, optimizer, target_nnz=60, l1_coefficient=2e-4)
    for batch in batches:
        loss = model(batch) + controller.l1_loss()  # once after each forward pass
        loss.backward()
        optimizer.step()
        controller.step()  # once after each optimizer step
        optimizer.zero_grad()
    ```

    It supports one process or several (all must make the same calls), gradient accumulation, DDP,
    FSDP2, autocast, `torch.compile` and activation checkpointing (``use_reentrant=False``). The
    host waits for the device once per step, in the first `l1_loss` of the next step, after the
    forward pass has been queued. If sharded code is compiled around activation checkpointing, set
    ``torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True``. If the whole
    model is compiled as one graph, set ``torch._dynamo.config.capture_scalar_outputs = True``.

    Args:
        model: the model with all its `SparseFFN`, before or after it is wrapped.
        optimizer: the optimizer or optimizers of the model; call `step` after their steps.
        target_nnz: number of neurons that are to be active for a token, as the mean over tokens; λ
            is adjusted to reach it. None keeps λ at ``l1_coefficient``.
        target_per_layer: each layer has its own λ and its own count is to reach the target;
            otherwise there is one λ, and the mean over layers is to reach it.
        l1_coefficient: λ, the weight of |h| summed over the neurons of a layer and averaged over
            tokens and layers (see `l1_loss`); with a target, the value at which λ starts.
        l1_zero_steps: optimizer steps at the start for which λ is zero.
        warmup_steps: warm-up of the learning rate, in optimizer steps; λ then changes more slowly.
        dead_window_tokens: a neuron that was not active for any of the last so many tokens (of all
            ranks) is dead.
        embedding: the model's input embedding, which is called with the ids of all tokens that the
            FFNs compute. In training, the FFNs then sort their tokens by id. This makes the unions
            of 64 neighbouring tokens, and with them the cost of the sparse kernels, about half as
            large. Results are the same.
        switch_together: under ``kernels="auto"``, either all layers run dense or all run sparse.
            Use it for a model that is compiled as one graph, which is recompiled whenever a layer
            changes its path. The second step runs sparse, so that both graphs are compiled at the
            start.
        process_group: the ranks that train on different tokens; None: all of them.

    Raises:
        ValueError: ``model`` is no model, or has no `SparseFFN`; there is a target, and an FFN uses
            SiLU or has no more neurons than the target; an FFN has adapters but always runs sparse;
            an argument is out of range; ``optimizer`` is not an optimizer; ``embedding`` is not an
            embedding.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        *,
        target_nnz: float | None = None,
        target_per_layer: bool = False,
        l1_coefficient: float = 0.0,
        l1_zero_steps: int = 0,
        warmup_steps: int = 0,
        dead_window_tokens: int = 1_048_576,
        embedding: nn.Embedding | None = None,
        switch_together: bool = False,
        process_group: Group = None,
    ) -> None:
        check_model(model, "SparsityController")
        self.ffns = named_ffns(model)
        settings = ControllerSettings(
            target_nnz,
            target_per_layer,
            l1_coefficient,
            l1_zero_steps,
            warmup_steps,
            dead_window_tokens,
        )
        settings.check(self.ffns)
        self._optimizer_steps = OptimizerSteps(model, optimizer)
        self._settings = settings
        self._target: TargetController | None = None
        if target_nnz is not None:
            self._target = TargetController(settings, len(self.ffns), warmup_steps, recipe=False)
        self._group = process_group
        self.num_steps = 0  # that `step` has followed
        self._present: _Step | None = None  # from its first micro-batch on
        self._last: _Step | None = None
        self._unused: list[StepNumbers] = []  # read since kernels were last chosen
        sizes = [ffn.intermediate_size for ffn in self.ffns.values()]
        device = torch.device("cpu")  # until that of the steps is known
        self._neurons = NeuronActivity(len(sizes), max(sizes), dead_window_tokens, device)
        self._call: Call | None = None  # the last forward pass
        self._kernels = LayerKernels(
            self.ffns, switch_together=switch_together, group=process_group
        )
        self._order = order = None if embedding is None else TrainingOrder(embedding)
        for ffn in self.ffns.values():
            if ffn.training_order is not None:
                ffn.training_order.unwatch()  # of a controller before this one
            ffn.records, ffn.training_order = True, order

    @property
    def dense_because(self) -> str | None:
        """The reason why ``auto`` runs no sparse kernels here."""
        return self._kernels.dense_because

    def l1_loss(self, num_tokens: int | Tensor | None = None) -> Tensor:
        """Returns the L1 term of the last forward pass, to be added to its loss; () fp32.

        It is ``Σ λ_l · Σ|h| / num_tokens / L``, over the L layers l and over all tokens of
        the forward pass. For ReLU² without a gate, h is the value before squaring. Like a mean
        cross-entropy, divide it by the number of micro-batches of the step. Padding counts as
        tokens.

        Args:
            num_tokens: the number by which your loss is divided, if it is not the number of tokens
                of this micro-batch; for example, the tokens of all micro-batches of the step.

        Raises:
            RuntimeError: there was no forward pass, or `step` did not follow the last optimizer
                step.
            ValueError: layers have computed different numbers of tokens; ``num_tokens`` below 1.
        """
        self._optimizer_steps.check()
        if isinstance(num_tokens, Real):
            check_range("num_tokens", num_tokens, at_least=1)
        recorded = take_recorded(self.ffns)
        if (passes := max(record.passes for record in recorded)) > 1:
            warn_on_first_rank(
                f"FFNs have made {passes} forward passes since the last l1_loss(), and only the "
                "last one is counted: call it after each pass whose loss is trained on, and give "
                "each call of an FFN in one pass an FFN of its own (a warm-up needs neither)",
                stacklevel=3,
            )
        stats = [record.stats for record in recorded]
        tokens = stats[0].nnz_M.numel()
        device = stats[0].nnz_M.device
        # The host waits for the last step here, where this forward pass has been queued.
        step = self._present or self._begin_step(device)
        self._note_call(recorded[0])
        step.counts.add(stats, self._kernels.room(tokens, device))
        if not any(step.l1):
            return torch.zeros((), device=device)
        l1_L = torch.stack([s.l1_sum for s in stats])
        divisor = max(tokens, 1) if num_tokens is None else num_tokens
        return (step.l1_L * l1_L).sum() / (len(stats) * divisor)

    def step(self) -> None:
        """Ends a step. Call it on all ranks, once after each optimizer step.

        Reduces the step's counts over ranks. λ changes in the first `l1_loss` of the next step.
        Under ``kernels="auto"``, the first call on a GPU measures the cost of the layers, which
        takes seconds.

        Raises:
            RuntimeError: no `l1_loss` since the last call.
        """
        if self._present is None:
            raise RuntimeError(
                "controller.step() was called twice after one optimizer step, or without "
                "controller.l1_loss(): add l1_loss() to the loss after each forward pass, and call "
                "step() once after each optimizer.step()"
            )
        counts = self._present.counts
        assert self._call is not None
        counts.reduce(self._group)
        refused = torch.zeros((), device=counts.active_LN.device)
        self._neurons.advance(counts.active_LN, counts.num_tokens, refused)
        counts.send()
        self._kernels.measure(self._call)
        # By the steps that have been read; this one has not.
        self._kernels.choose(self._unused)
        self._unused.clear()
        if self.num_steps == 0:
            self._kernels.begin_sparse()
        self._last, self._present = self._present, None
        self._optimizer_steps.followed()
        self.num_steps += 1

    def statistics(self) -> SparsityStatistics | None:
        """The numbers of the last step, or None before the first step. Waits for the device."""
        if self._last is None:
            return None
        numbers = self._read(self._last)
        nnz = nnz_statistics(self._last.counts.histogram_LC.cpu().numpy())
        dead = self._without_padding(self._neurons.dead_LN().cpu())
        return SparsityStatistics(
            step=self.num_steps,
            num_tokens=numbers.num_tokens,
            l1=sum(numbers.l1_L) / len(self.ffns),
            l1_coefficient=self._last.l1,
            **nnz._asdict(),
            dead_fraction=[int(dead_N.sum()) / dead_N.numel() for dead_N in dead.values()],
            union_mean=numbers.union_L,
            sparse=self._last.sparse,
            recomputed=numbers.recomputed,
            target_error=self._target.error if self._target else None,
        )

    def dead_neurons(self) -> dict[str, Tensor]:
        """The dead neurons of each FFN by its name: (N,) bool on the device."""
        return self._without_padding(self._neurons.dead_LN())

    def state_dict(self) -> dict[str, Any]:
        """The state from which a resumed run continues: numbers, text and tensors.

        It is the state after the last `step`, even during the next step, and the same on all ranks.
        It has the same keys and shapes at any time, as `torch.distributed.checkpoint` needs them.
        Waits for the device.

        Raises:
            RuntimeError: `step` did not follow the last optimizer step.
        """
        self._optimizer_steps.check()
        if self._last is not None:
            self._read(self._last)
        return {
            "num_steps": self.num_steps,
            "target": deepcopy(self._target.state_dict()) if self._target else None,
            "neurons": {
                name: tensor.clone() for name, tensor in self._neurons.state_dict().items()
            },
            **self._kernels.state_dict(),
            "device": self._device_name(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict`, at any time; counts made since it was saved are dropped.

        On a GPU of the same model, it takes over the costs of the layers, and with them the choice
        of kernels; otherwise the costs are measured again.

        Raises:
            ValueError: the state belongs to other layers, or to other settings of the target.
        """
        check_state(state, self.ffns)
        self._load_target(state["target"])
        self.num_steps = state["num_steps"]
        self._optimizer_steps.followed()
        self._present = self._last = None
        self._unused.clear()
        self._neurons.load_state_dict(state["neurons"])
        if state["device"] == self._device_name():
            self._kernels.load_state_dict(state)

    def _load_target(self, state: dict[str, Any] | None) -> None:
        if self._target is None and state:
            last = f"{final_l1(state):.3g}"
            raise ValueError(
                f"this state belongs to a run with target_nnz, which has moved λ to {last}: give "
                f"the controller the same arguments, or to keep λ, l1_coefficient={last} and load "
                "{**state, 'target': None}"
            )
        if self._target and not (state and self._target.load_state_dict(deepcopy(state))):
            raise ValueError(
                "this state belongs to a run without target_nnz, or with another target_per_layer; "
                "give the controller the same arguments"
            )

    def _device_name(self) -> str:
        return device_name(next(iter(self.ffns.values())).pattern_weight.device)

    def _without_padding(self, values_LN: Tensor) -> dict[str, Tensor]:
        """The values of each FFN's neurons, of which the widest FFN has N."""
        return {
            name: values_N[: ffn.intermediate_size]
            for (name, ffn), values_N in zip(self.ffns.items(), values_LN, strict=True)
        }

    def _begin_step(self, device: torch.device) -> "_Step":
        """At a step's first micro-batch: reads the step before, and moves λ."""
        self._optimizer_steps.begin()
        self._neurons.move_to(device)
        if self._last is not None:
            self._read(self._last)
        num_layers, num_neurons = self._neurons.silent_tokens_LN.shape
        if self._target:
            l1 = self._target.l1_by_layer(self.num_steps)
        else:
            is_zero = self.num_steps < self._settings.l1_zero_steps
            l1 = [0.0 if is_zero else self._settings.l1_coefficient] * num_layers
        self._present = _Step(
            counts=StepCounts(num_layers, num_neurons, device),
            l1=l1,
            l1_L=torch.tensor(l1).to(device, non_blocking=True),
            sparse=self._kernels.sparse,
        )
        return self._present

    def _note_call(self, record: Recorded) -> None:
        """Notes a forward pass; warns if the embedding had no part in the first."""
        nnz_M, first = record.stats.nnz_M, self._call is None
        num_tokens = nnz_M.numel()
        ordered = self._order is not None and self._order.is_of(num_tokens)
        self._call = Call(num_tokens, record.dtype, record.compiled, ordered, nnz_M.device)
        if first and self._order is not None and not ordered:
            warn_on_first_rank(
                f"the FFNs have computed {num_tokens:,} tokens, and `embedding` was not called "
                "with their ids, in training mode: they are not sorted, and sparse kernels slower",
                stacklevel=4,
            )

    def _read(self, last: "_Step") -> StepNumbers:
        """The last step's numbers, by which λ moves when they are read first."""
        if last.numbers is None:
            last.numbers = last.counts.read()
            if last.numbers.num_tokens:  # else they say nothing about λ and kernels
                self._unused.append(last.numbers)
                self._move_l1(last.numbers.nnz_L)
        return last.numbers

    def _move_l1(self, nnz_L: list[float]) -> None:
        """Moves λ after a step, by its mean non-zeros per token; warns if the target is not met."""
        if self._target is None:
            return
        self._target.observe(self.num_steps - 1, nnz_L)
        if warning := self._target.new_warning():
            warn_on_first_rank(f"step {self.num_steps}: {warning}", stacklevel=6)


@dataclass
class _Step:
    """A step from its first micro-batch on."""

    counts: StepCounts
    l1: list[float]  # λ of each layer
    l1_L: Tensor  # the same on the device
    sparse: list[bool]  # which layers compute with the sparse kernels
    numbers: StepNumbers | None = None  # once they have been read
