"""Training in plain torch: stock transformers on the sequences that a recipe's run reads.

It shares with a run only its initial weights and its text. B sequences of T tokens are the global
batch of a step, L layers, N intermediate_size.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from data.loaders import token_loader
from torch import Tensor

from sparsellm.data.held_out import validation_batches
from sparsellm.data.text.corpus import load_corpora
from sparsellm.data.tokenizer import load_tokenizer
from sparsellm.model import build_model
from sparsellm.recipe import Recipe


class Forward(NamedTuple):
    """What the formula of the loss is made of."""

    cross_entropy: Tensor  # () mean over tokens, nats
    l1_L: Tensor  # (L,) Σ|h| / tokens
    active_LBTN: Tensor  # bool: active neurons


class PlainModel:
    """Stock transformers with the weights that a run of ``recipe`` begins with."""

    def __init__(self, recipe: Recipe) -> None:
        ours = build_model(recipe, load_tokenizer(recipe.data.tokenizer).eot_id)
        self.stock = type(ours)(ours.config)
        assert type(self.stock).__module__.startswith("transformers.models.")
        self.stock.load_state_dict(ours.state_dict())
        for layer in self.stock.model.layers:
            gate = layer.mlp.gate_proj if recipe.ffn.gated else layer.mlp.up_proj
            gate.register_forward_hook(lambda _, inputs, gate: self._active.append(gate > 0))
            layer.mlp.down_proj.register_forward_hook(
                lambda _, inputs, y: self._hidden.append(inputs[0])
            )

    def __call__(self, tokens_BT1: Tensor) -> Forward:
        self._active: list[Tensor] = []
        self._hidden: list[Tensor] = []
        logits_BTV = self.stock(tokens_BT1[:, :-1]).logits
        cross_entropy = F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT1[:, 1:].flatten())
        l1_L = torch.stack(self._hidden).abs().sum(-1).mean((1, 2))
        return Forward(cross_entropy, l1_L, torch.stack(self._active))

    def load(self, weights: dict[str, Tensor]) -> None:
        """Takes the weights of a checkpoint."""
        parameters = dict(self.stock.named_parameters())
        assert parameters.keys() == weights.keys()
        for name, parameter in parameters.items():
            parameter.data.copy_(weights[name])


def global_batches(recipe: Recipe) -> Iterator[Tensor]:
    """``tokens_BT1`` of each step."""
    return token_loader(
        load_corpora(recipe.data),
        recipe.data.tokenizer,
        context_length=recipe.model.context_length,
        micro_batch_size=recipe.train.global_batch_tokens // recipe.model.context_length,
        seed=recipe.seed,
    )


def held_out(recipe: Recipe) -> Tensor:
    """All held-out sequences, ``tokens_ST1``."""
    (corpus,) = load_corpora(recipe.data)
    return torch.cat(
        list(
            validation_batches(
                corpus,
                load_tokenizer(recipe.data.tokenizer),
                context_length=recipe.model.context_length,
                micro_batch_size=1,
                num_tokens=recipe.validation.tokens,
                rank=0,
                world_size=1,
            )
        )
    )
