"""A mixture of experts that trains as the recipe's own models do: Mixtral of stock transformers.

With Muon each expert's matrices are orthogonalised one by one. What the recipe says of gates holds
for the gates of experts, too: beside Muon, AdamW updates them at `optimizer.gate_learning_rate`.
The router, which chooses experts, has a learning rate of its own.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import MixtralConfig, MixtralForCausalLM

from sparsellm.ffn.shared_linear import share_weights
from sparsellm.recipe import Recipe
from sparsellm.training.objective import build_loss
from sparsellm.training.optimization.muon import MuonAndAdamW, muon_groups

ALIGNMENT = 8  # bf16 numbers of which rows of grouped products consist: 16 bytes


class Mixture(NamedTuple):
    """What a mixture of experts has beyond the recipe."""

    experts: int
    active: int  # per token
    balance: float = 0.01  # weight of the balancing loss (Switch Transformer, arXiv 2101.03961)
    router_learning_rate: float | None = None  # peak; None: that of the gates, if AdamW has one
    implementation: str = "grouped_mm"  # transformers' name of how experts are multiplied


class Sums(NamedTuple):
    """Of one micro-batch."""

    cross_entropy_sum: Tensor  # () fp32, nats
    balance: Tensor  # () fp32, the number of active experts if all are chosen equally often


class MoEObjective(nn.Module):
    """The model with its loss; called as `sparsellm.training.objective.Objective` is.

    With `runtime.precision: fp8` attention and head are computed as in the recipe's own models, and
    experts in bf16: torch's grouped product of FP8 numbers has no derivative.
    """

    def __init__(self, recipe: Recipe, mixture: Mixture) -> None:
        super().__init__()
        runtime = recipe.runtime
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            self.model = MixtralForCausalLM(moe_config(recipe, mixture)).float()
        self.loss_function = build_loss(runtime)
        self.block = torch.compile(moe_block) if runtime.compile else moe_block
        self.balance = torch.compile(balance_loss) if runtime.compile else balance_loss
        if runtime.precision == "fp8":
            for layer in self.model.model.layers:
                share_weights(layer.self_attn, fp8=True, accumulates=False)
            share_weights(self.model, fp8=True, fp8_gradient=False, accumulates=False)
        # How many held-out tokens chose each expert of each layer, and how many there were.
        self.chosen_LE = torch.zeros(recipe.model.num_hidden_layers, mixture.experts)
        self.num_tokens = 0

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> Sums:
        """int64 token ids."""
        backbone = self.model.model
        x_BTC = backbone.embed_tokens(inputs_BT)
        if torch.is_autocast_enabled(x_BTC.device.type):
            x_BTC = x_BTC.to(torch.get_autocast_dtype(x_BTC.device.type))
        position_ids = torch.arange(x_BTC.shape[1], device=x_BTC.device)[None]
        rotary = backbone.rotary_emb(x_BTC, position_ids)
        logits, chosen = [], []
        for index, layer in enumerate(backbone.layers):
            x_BTC, logits_ME, index_MA = self.block(layer, x_BTC, rotary)
            logits.append(logits_ME)
            chosen.append(index_MA)
            if not self.training:
                chosen_E = torch.bincount(index_MA.flatten(), minlength=logits_ME.shape[1])
                self.chosen_LE[index] += chosen_E.cpu()
        self.num_tokens += 0 if self.training else inputs_BT.numel()
        head = (backbone.norm, x_BTC.flatten(0, 1), self.model.lm_head)
        return Sums(self.loss_function(*head, targets_BT.flatten()), self.balance(logits, chosen))

    def busiest_share(self) -> float:
        """The share of held-out tokens that chose the most used expert, mean over layers.

        Of the evaluations since it was last asked for.
        """
        share = float((self.chosen_LE.amax(1) / self.num_tokens).mean())
        self.chosen_LE.zero_()
        self.num_tokens = 0
        return share


def moe_config(recipe: Recipe, mixture: Mixture) -> MixtralConfig:
    """The recipe's shape, with its neurons shared out among the experts.

    Raises:
        ValueError: they cannot be.
    """
    shape, experts, active = recipe.model, mixture.experts, mixture.active
    if shape.intermediate_size % (ALIGNMENT * experts) or not 0 < active <= experts:
        raise ValueError(
            f"model.intermediate_size {shape.intermediate_size} must be a multiple of {ALIGNMENT} "
            f"times --experts {experts}, and --active {active} at most as many"
        )
    return MixtralConfig(
        vocab_size=recipe.padded_vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size // experts,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        max_position_embeddings=shape.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        rms_norm_eps=shape.rms_norm_eps,
        initializer_range=shape.initializer_range,
        tie_word_embeddings=shape.tie_word_embeddings,
        num_local_experts=experts,
        num_experts_per_tok=active,
        attn_implementation="sdpa",
        experts_implementation=mixture.implementation,
    )


def moe_block(
    layer: Any, x_BTC: Tensor, rotary: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """One block of the model; its router's logits (tokens, experts); the chosen experts."""
    attended, _ = layer.self_attn(
        layer.input_layernorm(x_BTC), position_embeddings=rotary, attention_mask=None
    )
    x_BTC = x_BTC + attended
    x_MC = layer.post_attention_layernorm(x_BTC).flatten(0, 1)
    logits_ME, weights_MA, index_MA = layer.mlp.gate(x_MC)
    # Autocast does not cover grouped products, and its norms return fp32.
    x_MC = x_MC.to(x_BTC.dtype)
    weights = {name: p.to(x_BTC.dtype) for name, p in layer.mlp.experts.named_parameters()}
    y_MC = functional_call(layer.mlp.experts, weights, (x_MC, index_MA, weights_MA))
    return x_BTC + y_MC.view_as(x_BTC), logits_ME, index_MA


def balance_loss(logits: list[Tensor], chosen: list[Tensor]) -> Tensor:
    """The loss of Switch Transformer, mean over layers.

    transformers' `load_balancing_loss_func` counts the tokens of all layers together instead, so
    that layers which each prefer another expert seem balanced (5.23); and it waits for the GPU in
    every layer (5.17).

    Args:
        logits: of each layer's router, (M, E).
        chosen: each layer's experts, int64 (M, A).
    """
    share_LE = torch.stack(logits).softmax(-1, dtype=torch.float32).mean(1)
    choices_LC = torch.stack(chosen).flatten(1)
    weights_LC = torch.full_like(choices_LC, 1 / choices_LC.shape[1], dtype=torch.float32)
    chosen_LE = torch.zeros_like(share_LE).scatter_add(1, choices_LC, weights_LC)
    return share_LE.shape[1] * chosen[0].shape[1] * (chosen_LE * share_LE).sum(1).mean()


class ExpertMatrices:
    """The matrices of all experts as parameters of their own, which share memory with the model's.

    transformers has one parameter of three dimensions for the gates and ups of a layer's experts,
    and one for their downs. Muon takes matrices.
    """

    def __init__(self, model: MixtralForCausalLM) -> None:
        self.gates: list[nn.Parameter] = []
        self.ups: list[nn.Parameter] = []
        self.downs: list[nn.Parameter] = []
        self.stacked: list[nn.Parameter] = []
        self._parts: list[tuple[nn.Parameter, nn.Parameter, tuple[Any, ...]]] = []
        for layer in model.model.layers:
            experts = layer.mlp.experts
            for name, stacked in experts.named_parameters():
                self.stacked.append(stacked)
                for part, index in self._indices(name, stacked):
                    matrix = nn.Parameter(stacked.data[index])
                    part.append(matrix)
                    self._parts.append((matrix, stacked, index))

    def _indices(
        self, name: str, stacked: Tensor
    ) -> Iterator[tuple[list[nn.Parameter], tuple[Any, ...]]]:
        for expert in range(len(stacked)):
            if name == "gate_up_proj":
                half = stacked.shape[1] // 2
                yield self.gates, (expert, slice(None, half))
                yield self.ups, (expert, slice(half, None))
            else:
                assert name == "down_proj", name
                yield self.downs, (expert,)

    def take_gradients(self) -> None:
        """After the backward passes of a step: the model's gradients become those of the parts."""
        for matrix, stacked, index in self._parts:
            assert stacked.grad is not None
            matrix.grad = stacked.grad[index]


def build_moe_optimizer(
    objective: MoEObjective, recipe: Recipe, mixture: Mixture
) -> tuple[torch.optim.Optimizer, ExpertMatrices]:
    """The recipe's optimizer; learning rates are multiplied by a group's ``lr_scale``.

    Before a step `ExpertMatrices.take_gradients` is to be called, and gradients are to be cleared
    on the objective.
    """
    config, experts = recipe.optimizer, ExpertMatrices(objective.model)
    stacked = {id(p) for p in experts.stacked}
    rest = [(name, p) for name, p in objective.named_parameters() if id(p) not in stacked]
    routers = [p for name, p in rest if name.endswith(".mlp.gate.weight")]
    attention = [p for name, p in rest if ".self_attn." in name and p.dim() == 2]
    vectors = [p for _, p in rest if p.dim() < 2]
    apart = {id(p) for p in (*routers, *attention, *vectors)}
    matrices = [p for _, p in rest if id(p) not in apart]  # embeddings and head
    of_blocks, gates = [*attention, *experts.ups, *experts.downs], experts.gates
    gate_scale = 1.0
    muons = of_blocks if config.name == "muon" else []
    if not muons:
        matrices = [*matrices, *of_blocks]
    elif recipe.gates_by_adamw:
        gate_scale = config.gate_lr_scale
    else:
        muons, gates = [*muons, *gates], []
    router_scale = gate_scale
    if mixture.router_learning_rate is not None:
        router_scale = mixture.router_learning_rate / config.learning_rate
    decay = {"weight_decay": config.weight_decay}
    groups = [
        {"params": matrices, **decay},
        {"params": vectors, "weight_decay": 0.0},
        {"params": routers, **decay, "lr_scale": router_scale},
    ]
    if gates:
        groups.append({"params": gates, **decay, "lr_scale": gate_scale})
    adamw = torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
    if not muons:
        return adamw, experts
    dims = {id(p): 0 for p in (*experts.gates, *experts.ups)} | {id(p): 1 for p in experts.downs}
    matrices_of_muon = muon_groups(muons, dims if config.normalize_neurons else {})
    muon = MuonAndAdamW(matrices_of_muon, config.learning_rate, config.weight_decay, adamw)
    return muon, experts
