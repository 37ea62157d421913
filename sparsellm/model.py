"""The model: Hugging Face's Llama (without a gate: Arcee) or another family, with our FFN.

Its state dict has exactly the stock model's names and shapes, and its `forward` is the stock one,
so evaluation and generation use it like any Hugging Face model. Training runs the blocks through
`Objective` (objective.py), which also collects their statistics.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel as HFModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sparsellm.ffn.shared_linear import share_weights
from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.ffn.training_path.training_ops import operators_digest
from sparsellm.ffn.types import FFNStats, StepShared, TokenOrder
from sparsellm.recipe import Recipe
from sparsellm.recipe.estimate import count_parameters
from sparsellm.recipe.sections import RuntimeConfig

# Graphs that torch compiles of a block, beyond which it would run it uncompiled: four of each
# micro-batch size (dense and sparse; a step's last micro-batch and the others), and those of
# validation.
_COMPILED_VARIANTS = 32


class SparseDecoderLayer(nn.Module):
    """A pre-norm block: attention and norms as Hugging Face built them, and our FFN in place of
    theirs, under the same names."""

    def __init__(self, layer: Any, ffn: SparseFFN) -> None:
        super().__init__()
        self.self_attn = layer.self_attn
        self.mlp = ffn
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm

    def forward(
        self,
        hidden_states: Tensor,
        *,
        return_stats: bool = False,
        capacity: int | None = None,
        order: TokenOrder | None = None,
        shared: StepShared | None = None,
        **attention: Any,
    ) -> Tensor | tuple[Tensor, FFNStats]:
        """(B, T, C) → (B, T, C); with ``return_stats`` also the FFN's statistics.

        With statistics the FFN uses ``capacity``, ``order`` and ``shared``, see
        `SparseFFN.compute`; without, it chooses its path itself. ``attention`` are the arguments
        that Hugging Face's model passes to its attention: rotary position embeddings, mask, cache.
        """
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **attention)
        hidden_states = hidden_states + attended
        normed = self.post_attention_layernorm(hidden_states)
        if not return_stats:
            return hidden_states + self.mlp(normed)
        # Statistics are returned, not stored: a recomputed block (activation checkpointing) then
        # cannot count twice, and the L1 term is an ordinary output of the graph.
        out, stats = self.mlp.compute(normed, capacity, order, shared)
        return hidden_states + out, stats


def model_config(recipe: Recipe, eos_token_id: int) -> PretrainedConfig:
    """The Hugging Face configuration of a recipe; stock transformers builds the same model.

    Raises:
        ValueError: transformers has no such kind of RoPE, or refuses the configuration.
    """
    shape = recipe.model
    further: dict[str, Any] = {
        "max_position_embeddings": shape.max_position_embeddings,
        "head_dim": shape.head_dim,
        "rope_parameters": {"rope_type": "default"},
        # Later entries win: the family's, then those of the recipe.
        **dict(recipe.architecture.defaults),
        **shape.huggingface,
    }
    further["rope_parameters"] = {**further["rope_parameters"], "rope_theta": shape.rope_theta}
    # Checked here, where the key of the recipe can be named.
    kind, kinds = further["rope_parameters"].get("rope_type"), ["default", *ROPE_INIT_FUNCTIONS]
    if kind not in kinds:
        raise ValueError(
            f"model.huggingface.rope_parameters.rope_type {kind!r} is not supported; valid are "
            + ", ".join(kinds)
        )
    config_class = getattr(transformers, recipe.architecture.config_class)
    vocab_size = recipe.padded_vocab_size  # its error is one of the tokenizer's
    try:
        config: PretrainedConfig = config_class(
            vocab_size=vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_hidden_layers,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            rms_norm_eps=shape.rms_norm_eps,
            initializer_range=shape.initializer_range,
            tie_word_embeddings=shape.tie_word_embeddings,
            hidden_act=recipe.ffn.activation,
            bos_token_id=eos_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=None,
            attn_implementation="sdpa",
            **further,
        )
    except Exception as error:  # transformers raises many kinds
        reason = error.__cause__ or error
        raise ValueError(
            f"model: transformers' {config_class.__name__} refuses the configuration ({reason}); "
            "change model.huggingface or the sizes in model"
        ) from error
    return config


def build_model(recipe: Recipe, eos_token_id: int) -> HFModel:
    """A freshly initialised fp32 model on the current default device.

    Weights depend on ``recipe.seed``, the shapes and the kind of device alone: on a GPU they are
    drawn there, since a CPU takes some 10 s for each billion. The caller's RNG state of the CPU is
    untouched.

    Raises:
        ValueError: the device does not have the memory for it.
    """
    # Hugging Face's constructor would have torch initialise every layer first, in vain: 0.5b would
    # take 8 s instead of 5 (two CPU cores).
    model = build_zero_model(recipe, eos_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        for module in model.modules():
            model._init_weights(module)
    return model


def build_zero_model(recipe: Recipe, eos_token_id: int) -> HFModel:
    """The same model with all weights zero, for a caller that loads its own.

    Raises:
        ValueError: the device does not have the memory for it.
    """
    _check_memory(recipe)
    with init_empty_weights(include_buffers=False):
        model_class = getattr(transformers, recipe.architecture.model_class)
        model = use_sparse_ffn(model_class(model_config(recipe, eos_token_id)).float())
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            zeros = torch.zeros(parameter.shape, dtype=parameter.dtype)
            setattr(module, name, nn.Parameter(zeros))
    model.tie_weights()
    return model


def _check_memory(recipe: Recipe) -> None:
    """Checks before anything is built: the system kills a process that runs out of memory."""
    device = torch.empty(0).device
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[1]
    elif device.type == "cpu":
        room = psutil.virtual_memory().total
    else:
        return  # meta: nothing is allocated
    parameters = count_parameters(recipe).total
    if 4 * parameters > room:
        raise ValueError(
            f"the model of recipe {recipe.name!r} has {parameters:,} parameters: "
            f"{4 * parameters / 2**30:,.0f} GiB in fp32, and {device} has {room / 2**30:,.0f} GiB; "
            "lower the recipe's model sizes (model.*), or use a machine with more memory"
        )


def use_sparse_ffn(model: HFModel) -> HFModel:
    """Replaces every block of a Llama- or Arcee-like model, in place, keeping its weights."""
    config = model.config
    layers = model.model.layers
    # transformers finds the blocks, for `output_hidden_states`, by their class.
    model._can_record_outputs["hidden_states"] = [type(layers[0]), SparseDecoderLayer]
    for index, layer in enumerate(layers):
        with torch.device("meta"):  # the layer's own weights take the place of new ones
            ffn = SparseFFN(
                config.hidden_size,
                config.intermediate_size,
                activation=config.hidden_act,
                gated=hasattr(layer.mlp, "gate_proj"),
            )
        ffn.load_state_dict(layer.mlp.state_dict(), assign=True)
        layers[index] = SparseDecoderLayer(layer, ffn)
    # `gradient_checkpointing_enable` then raises: these blocks would ignore it without a word.
    model.supports_gradient_checkpointing = False
    # Names for FSDP2's automatic wrapping and for model-parallel placement.
    model._no_split_modules = [SparseDecoderLayer.__name__]
    return model


def prepare_blocks(model: HFModel, runtime: RuntimeConfig, *, sizes_change: bool = False) -> None:
    """Compiles each block and recomputes it in the backward pass, as the recipe asks.

    With ``sizes_change`` micro-batches may change their number of sequences.

    With `runtime.precision: fp8` or `runtime.weight_gradients: fused` linear layers are
    `SharedLinear`; in FP8 the head is one, too.

    Compiling a block, not the model, keeps compile time independent of depth and leaves module
    hooks (FSDP2) outside the graph; checkpointing goes around the compiled block, so that what
    is recomputed is the same compiled code.
    """
    fp8, fused = runtime.precision == "fp8", runtime.weight_gradients == "fused"
    for layer in model.model.layers if fp8 or fused else ():
        share_weights(layer.self_attn, fp8=fp8, accumulates=fused)
        share_weights(layer.mlp, fp8=fp8, accumulates=fused)
        if fp8:
            layer.mlp.use_fp8()
    # Liger's loss takes the head's own weight. Models from elsewhere may have any vocabulary.
    if fp8 and runtime.loss == "torch" and model.lm_head.out_features % 16 == 0:
        share_weights(model, fp8=True, fp8_gradient=False, accumulates=False)
    if runtime.compile:
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(_COMPILED_VARIANTS, limit)
        # torch's cache of compiled graphs on disk does not see what operators say of their results:
        # after an update it would hand out graphs that expect other shapes.
        torch.compiler.config.cache_key_tag = operators_digest()
        # One graph for all capacities: torch would compile one for the first capacity alone, and
        # training would stop to compile another when the capacity of a sparse layer shrinks.
        torch.compiler.config.dynamic_sources = "L['capacity']"
        # For DDP torch would cut each graph where 25 MB of gradients are complete, to begin with
        # their reduction: block and loss of 0.5B into seven, and nothing is fused across a cut.
        torch._dynamo.config.optimize_ddp = False
    for layer in model.model.layers:
        if runtime.compile:
            compiled = torch.compile(layer.forward)
            layer.forward = partial(_run_marked, compiled) if sizes_change else compiled
        if runtime.activation_checkpointing:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def mark_size(*tensors: Tensor) -> None:
    """Has torch.compile make one graph for any first size of these tensors.

    Otherwise it would make one for the first size alone, and training would stop to compile another
    when a micro-batch grows. A first size of 1 always has a graph of its own.
    """
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _run_marked(
    compiled: Callable[..., Any], x_BTC: Tensor, *, order: TokenOrder | None = None, **options: Any
) -> Any:
    """Calls a compiled block with tensors of changing size.

    They are marked here and not by the caller, since FSDP2's hooks make new ones in between.
    """
    mark_size(x_BTC, *(order or ()))
    return compiled(x_BTC, order=order, **options)
