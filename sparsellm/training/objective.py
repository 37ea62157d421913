"""The objective: cross-entropy and L1 as plain sums, together with the statistics."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel as HFModel

from sparsellm.ffn.token_order import token_order
from sparsellm.model import mark_size
from sparsellm.paths import how_to_install
from sparsellm.recipe.sections import RuntimeConfig

# PyTorch's and Liger's default `ignore_index`.
IGNORED_TARGET = -100

LossFunction = Callable[[nn.Module, Tensor, nn.Linear, Tensor], Tensor]
DistillationFunction = Callable[
    [nn.Module, Tensor, nn.Linear, Tensor, Tensor], tuple[Tensor, Tensor]
]


class LossSums(NamedTuple):
    """Sums over the tokens of one micro-batch; nothing here is averaged, so splits add up."""

    cross_entropy_sum: Tensor  # () fp32, nats
    l1_sum_L: Tensor  # (L,) fp32, `FFNStats.l1_sum` of each layer
    nnz_LBT: Tensor  # (L, B, T) int32, active neurons of each token
    active_LN: Tensor  # (L, N) int32, number of tokens for which each neuron was active
    # (L,) int64, Σ over blocks of 64 tokens of the number of neurons active for any of them.
    union_L: Tensor
    # () int64, layers with tokens that the backward pass recomputes; None without TwELL.
    recomputed: Tensor | None = None
    divergence_sum: Tensor | None = None  # () fp32, nats, from a teacher; None without one


class Objective(nn.Module):
    """Runs the model's blocks on a micro-batch and returns `LossSums`.

    DDP and FSDP2 wrap this module, and every rank calls it with micro-batches of the same size.
    """

    def __init__(self, model: HFModel, runtime: RuntimeConfig) -> None:
        super().__init__()
        self.model = model
        self.loss_function = build_loss(runtime)
        distils = torch.compile(distillation_losses) if runtime.compile else distillation_losses
        self._distillation: DistillationFunction = distils
        self._sorts_tokens = runtime.token_order == "auto"
        self.sizes_change = False  # of micro-batches, and the loss is compiled
        self._rotary_by_kind: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def forward(
        self, inputs_BT: Tensor, targets_BT: Tensor, teacher_BTV: Tensor | None = None
    ) -> LossSums:
        """Computes the sums of a micro-batch.

        Args:
            inputs_BT: int64 token ids.
            targets_BT: int64 token ids; those of `IGNORED_TARGET` add nothing to the cross-entropy.
            teacher_BTV: logits of a teacher; with them the divergence from it is computed too.
        """
        backbone = self.model.model
        x_BTC = backbone.embed_tokens(inputs_BT)
        if torch.is_autocast_enabled(x_BTC.device.type):
            # Autocast does not cover embeddings: without this the residual stream would be fp32,
            # with twice the bytes in every norm and addition. FSDP2's mixed precision makes it bf16
            # too.
            x_BTC = x_BTC.to(torch.get_autocast_dtype(x_BTC.device.type))
        rotary = self._rotary(x_BTC)
        order = None  # of the tokens: one for all layers, forward and backward
        if self._sorts_tokens and any(layer.mlp.wants_order for layer in backbone.layers):
            order = token_order(inputs_BT, backbone.config.vocab_size)
        stats = []
        for layer in backbone.layers:
            # No mask: SDPA then takes its causal path.
            x_BTC, layer_stats = layer(
                x_BTC,
                return_stats=True,
                capacity=layer.mlp.capacity_for(inputs_BT.numel()),
                order=order,
                shared=layer.mlp.step_shared,
                position_embeddings=rotary,
                attention_mask=None,
            )
            stats.append(layer_stats)
        x_MC, targets_M = x_BTC.flatten(0, 1), targets_BT.flatten()
        teacher_MV = [] if teacher_BTV is None else [teacher_BTV.flatten(0, 1)]
        if self.sizes_change:
            mark_size(x_MC, targets_M, *teacher_MV)
        head, divergence = (backbone.norm, x_MC, self.model.lm_head, targets_M), None
        if teacher_BTV is None:
            cross_entropy = self.loss_function(*head)
        else:
            cross_entropy, divergence = self._distillation(*head, *teacher_MV)
        recomputed = [s.recomputed > 0 for s in stats if s.recomputed is not None]
        return LossSums(
            cross_entropy_sum=cross_entropy,
            l1_sum_L=torch.stack([s.l1_sum for s in stats]),
            nnz_LBT=torch.stack([s.nnz_M for s in stats]).view(-1, *inputs_BT.shape),
            active_LN=torch.stack([s.active_N for s in stats]),
            union_L=torch.stack([s.union_sum for s in stats]),
            recomputed=torch.stack(recomputed).sum() if recomputed else None,
            divergence_sum=divergence,
        )

    @torch.no_grad()
    def _rotary(self, x_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions, computed once for each length and type."""
        kind = (x_BTC.shape[1], x_BTC.dtype, x_BTC.device)
        if kind not in self._rotary_by_kind:
            position_ids = torch.arange(x_BTC.shape[1], device=x_BTC.device)[None]
            self._rotary_by_kind[kind] = self.model.model.rotary_emb(x_BTC, position_ids)
        return self._rotary_by_kind[kind]


def total_loss(
    sums: LossSums,
    l1_coefficient: float | Tensor,
    global_tokens: int,
    world_size: int,
    distillation: float = 0.0,
) -> Tensor:
    """This micro-batch's part of ``CE + λ·L1`` of the whole step, ready for `backward`.

    ``CE = Σ ce / tokens`` and ``L1 = Σ|h| / (tokens · layers)``, tokens being those of all ranks
    and micro-batches (``global_tokens``): neither depends on how the batch is split. The paper's
    eq. 2 takes the mean over the N neurons too; λ here is N times smaller than λ there. If
    each layer has its own λ, ``l1_coefficient`` is (L,) and the mean is of λ·L1. With a teacher
    ``(1 - α)·CE + α·KL`` takes the place of CE, α being ``distillation``.

    DDP and FSDP2 average gradients over ranks; ``world_size`` turns their mean into the sum.
    """
    num_layers = sums.l1_sum_L.shape[0]
    penalty = (l1_coefficient * sums.l1_sum_L).sum() / num_layers
    loss = sums.cross_entropy_sum
    if sums.divergence_sum is not None:
        loss = (1 - distillation) * loss + distillation * sums.divergence_sum
    return (loss + penalty) * (world_size / global_tokens)


def reshard(model: nn.Module) -> None:
    """Reshards FSDP2's parameters; does nothing without FSDP2.

    A backward pass does so by itself, and gathers them again where it needs them. After a forward
    pass alone the modules still hold gathered parameters, which are not the objects that the
    optimizer has state for.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def build_loss(runtime: RuntimeConfig) -> LossFunction:
    """The cross-entropy of ``recipe.runtime.loss``: (norm, x_MC, head, targets_M) → sum, fp32.

    The final norm is part of it, so that it is compiled too: eagerly its forward and backward pass
    are some twenty kernels, each of which reads and writes an fp32 copy of x.

    Raises:
        ValueError: Liger is asked for and not installed, or there is no GPU for it.
    """
    if runtime.loss == "liger":
        return _liger_loss()
    return torch.compile(logits_cross_entropy) if runtime.compile else logits_cross_entropy


def logits_cross_entropy(
    norm: nn.Module, x_MC: Tensor, head: nn.Linear, targets_M: Tensor
) -> Tensor:
    """Cross-entropy sum over materialised logits; the softmax is computed in fp32."""
    return F.cross_entropy(head(norm(x_MC)).float(), targets_M, reduction="sum")


def distillation_losses(
    norm: nn.Module, x_MC: Tensor, head: nn.Linear, targets_M: Tensor, teacher_MV: Tensor
) -> tuple[Tensor, Tensor]:
    """Sums of the cross-entropy and of ``KL(teacher ‖ student)``, both in fp32."""
    log_p_MV = F.log_softmax(head(norm(x_MC)).float(), dim=-1)
    log_teacher_MV = F.log_softmax(teacher_MV.float(), dim=-1)
    divergence = F.kl_div(log_p_MV, log_teacher_MV, reduction="sum", log_target=True)
    return F.nll_loss(log_p_MV, targets_M, reduction="sum"), divergence


def _liger_loss() -> LossFunction:
    if not torch.cuda.is_available():
        raise ValueError("runtime.loss: liger needs a CUDA device; set runtime.loss=torch")
    try:
        importlib.import_module("liger_kernel.ops")
    except ImportError as error:
        raise ValueError(
            f"runtime.loss: liger needs `{how_to_install('liger')}`; or set runtime.loss=torch"
        ) from error
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    # The gradient of the vocabulary matrix is summed over chunks of tokens in fp32, as it would be
    # without chunks.
    fused = LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=torch.float32)

    def liger(norm: nn.Module, x_MC: Tensor, head: nn.Linear, targets_M: Tensor) -> Tensor:
        return fused(head.weight, norm(x_MC), targets_M)

    return liger
