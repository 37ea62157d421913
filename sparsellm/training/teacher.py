"""The teacher of `train.distillation`: the model that the run was initialised from, as it was.

It takes no part in training: not a module of the objective, so neither the optimizer nor a
checkpoint has its weights. A checkpoint names it, and a resumed run reads it again.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.data.tokenizer import load_tokenizer
from sparsellm.model import HFModel, prepare_blocks
from sparsellm.processes.distributed import together
from sparsellm.recipe import Recipe
from sparsellm.runs import checkpoint
from sparsellm.runs.huggingface.pretrained import Pretrained, build_pretrained, read_weights
from sparsellm.runs.state import tensors_digest


class Teacher:
    """A frozen model in the run's compute type.

    Args:
        model: in evaluation mode.
        name: what checkpoints say of it: path, the run's name, step and tokens, and a hash of its
            weights.
    """

    def __init__(self, model: HFModel, name: dict[str, Any]) -> None:
        self._model, self.name = model.requires_grad_(False), name

    @torch.no_grad()
    def logits(self, inputs_BT: Tensor) -> Tensor:
        """(B, T) token ids → (B, T, V)."""
        backbone = self._model.model
        x_BTC = backbone.embed_tokens(inputs_BT)
        positions_1T = torch.arange(inputs_BT.shape[1], device=inputs_BT.device)[None]
        rotary = backbone.rotary_emb(x_BTC, positions_1T)
        for layer in backbone.layers:
            x_BTC = layer(x_BTC, position_embeddings=rotary, attention_mask=None)
        return F.linear(backbone.norm(x_BTC), self._model.lm_head.weight)


def load_teacher(
    recipe: Recipe, device: torch.device, resume_from: Path | None, init_from: Path | None
) -> Teacher | None:
    """The teacher, if the recipe asks for one; all ranks call it.

    Args:
        recipe: of the run.
        device: of this rank.
        resume_from: checkpoint, which names the teacher.
        init_from: where the teacher is; None if it is where the checkpoint says.

    Raises:
        ValueError: there is no teacher, it has another vocabulary, or it is not the run's.
        FileNotFoundError: it is no longer there; says how to give its new place.
    """
    if not recipe.train.distillation:
        return None
    saved = None
    if resume_from is not None:
        saved = checkpoint.read_trainer(resume_from).get("teacher")
    # A resumed run has noted who its teacher was; --init-from says where it lies now.
    path = init_from or (Path(saved["path"]) if saved else None)
    if path is None:
        raise ValueError(
            "train.distillation: the teacher is the model that training begins from: give it with "
            "--init-from, or set train.distillation to 0"
        )
    precision = "fp32" if recipe.runtime.precision == "fp32" else "bf16"
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    with together(device):
        try:
            weights = read_weights(path)
            loaded = build_pretrained(weights, device, dtype)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"train.distillation needs its teacher: {error}; if it was moved, give its new "
                "place with --init-from"
            ) from error
    # Other weights would change the objective in the middle of a run.
    name = {"path": str(loaded.path.resolve()), "name": loaded.recipe.name}
    name |= {key: loaded.trainer[key] for key in ("step", "tokens")}
    name["weights"] = tensors_digest(weights.tensors)
    if saved and name["weights"] != saved.get("weights"):
        raise ValueError(
            f"train.distillation: {path} has other weights than this run's teacher "
            f"({saved['name']}, step {saved['step']}, {saved['tokens']} tokens, which was at "
            f"{saved['path']}); give the teacher's place with --init-from, or begin a new run: "
            "--set name=NEW"
        )
    _check_logits(path, loaded, recipe)
    # It has no backward pass.
    plain = {"activation_checkpointing": False, "weight_gradients": "autograd"}
    runtime = recipe.runtime.model_copy(update=plain | {"precision": precision})
    prepare_blocks(loaded.model, runtime)
    return Teacher(loaded.model, name)


def _check_logits(path: Path, loaded: Pretrained, recipe: Recipe) -> None:
    """Checks that the logits of teacher and run are of the same tokens, place by place."""
    theirs, ours = loaded.tokenizer, load_tokenizer(recipe.data.tokenizer)
    same_ids = (theirs.identity, theirs.eot_id) == (ours.identity, ours.eot_id)
    if not same_ids or loaded.recipe.padded_vocab_size != recipe.padded_vocab_size:
        raise ValueError(
            f"train.distillation: the teacher {path} has the tokenizer {theirs.name} "
            f"and {loaded.recipe.padded_vocab_size} logits, this run {ours.name} and "
            f"{recipe.padded_vocab_size}: both must be the same"
        )
