"""Estimates: parameters, FLOPs per token, memory per GPU, and peak FLOP/s for MFU."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sparsellm.recipe import Recipe
from sparsellm.words import counted

# Dense bf16 tensor-core peaks by the vendor's datasheets, FLOP/s; matched by substring in order.
PEAK_BF16_FLOPS = {
    "B300": 2.25e15,
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "RTX 5090": 209e12,
}


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak of a GPU by its name, FLOP/s; None if unknown."""
    return next((peak for name, peak in PEAK_BF16_FLOPS.items() if name in device_name), None)


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by what they are used for."""

    embedding: int  # input lookup (and output matrix when tied)
    output: int  # output matrix when not tied
    attention: int
    ffn: int
    vectors: int  # of norms, and biases

    @property
    def total(self) -> int:
        """All parameters, shared ones once."""
        return self.embedding + self.output + self.attention + self.ffn + self.vectors


def count_parameters(recipe: Recipe) -> ParameterCount:
    """Parameters of the recipe's model."""
    m, architecture = recipe.model, recipe.architecture
    matrices = len(architecture.ffn_matrices)
    embedding = recipe.padded_vocab_size * m.hidden_size
    query, key = (h * m.head_dim for h in (m.num_attention_heads, m.num_key_value_heads))
    outputs = {"q": query, "k": key, "v": key, "o": m.hidden_size}
    biases = sum(outputs[projection] for projection in _biased_projections(recipe))
    norms = 2 * m.hidden_size + (2 * m.head_dim if architecture.query_key_norms else 0)
    return ParameterCount(
        embedding=embedding,
        output=0 if m.tie_word_embeddings else embedding,
        attention=m.num_hidden_layers * 2 * m.hidden_size * (query + key),
        ffn=m.num_hidden_layers * matrices * m.hidden_size * m.intermediate_size,
        vectors=m.num_hidden_layers * (norms + biases) + m.hidden_size,
    )


def model_shape(recipe: Recipe) -> dict[str, object]:
    """All that decides the names and shapes of the parameters, besides the vocabulary."""
    m, architecture = recipe.model, recipe.architecture
    return {
        "layers": m.num_hidden_layers,
        "hidden_size": m.hidden_size,
        "intermediate_size": m.intermediate_size,
        "ffn": architecture.ffn_matrices,
        "attention": [h * m.head_dim for h in (m.num_attention_heads, m.num_key_value_heads)],
        "head": m.head_dim if architecture.query_key_norms else None,
        "biases": _biased_projections(recipe),
        "tied": m.tie_word_embeddings,
    }


def _biased_projections(recipe: Recipe) -> str:
    if recipe.model.huggingface.get("attention_bias"):
        return "qkvo"
    return recipe.architecture.attention_biases


def active_parameters(recipe: Recipe, nnz: float) -> int:
    """Parameters that a token uses if ``nnz`` neurons of each layer are active for it.

    These are all but the rows of inactive neurons. The matrix that decides which neurons
    are active (the gate, or up in an FFN without a gate) is used whole.
    """
    m, matrices = recipe.model, len(recipe.architecture.ffn_matrices)
    unused = (matrices - 1) * m.hidden_size * (m.intermediate_size - nnz)
    return count_parameters(recipe).total - round(m.num_hidden_layers * unused)


def train_flops_per_token(recipe: Recipe) -> float:
    """Dense-equivalent FLOPs of forward and backward for one token.

    6 per matrix parameter (2 forward, 4 backward) plus 12·L·H·T for attention scores and values, H
    being the width of all heads (PaLM, appendix B: the causal half is not subtracted). Activations
    that happen to be zero are counted: the figure compares dense and sparse runs by the work of the
    dense one.
    """
    m = recipe.model
    parameters = count_parameters(recipe)
    matrices = parameters.attention + parameters.ffn + recipe.padded_vocab_size * m.hidden_size
    attention = 12 * m.num_hidden_layers * m.num_attention_heads * m.head_dim * m.context_length
    return 6 * matrices + attention


def executed_flops_per_token(
    recipe: Recipe, nnz_L: Sequence[float] = (), sparse_L: Sequence[bool] = ()
) -> float:
    """FLOPs that are executed for one token, in forward and backward.

    These are the FLOPs of `train_flops_per_token` without those that sparse layers leave out. Such
    layers compute the forward product that decides which neurons are active for all neurons, and
    everything else for those that are active.
    Activation checkpointing adds each block's forward a second time, and a teacher
    (`train.distillation`) a dense forward pass.

    Args:
        recipe: the run.
        nnz_L: neurons active for a token, mean of each layer.
        sparse_L: whether each layer runs on the sparse kernels. If both are empty, none does.
    """
    k, n = recipe.model.hidden_size, recipe.model.intermediate_size
    flops, checkpointed = train_flops_per_token(recipe), recipe.runtime.activation_checkpointing
    head = 6 * recipe.padded_vocab_size * k
    forward = (flops - head) / 3  # of the blocks
    teacher = flops / 3 if recipe.train.distillation else 0.0
    matrices = len(recipe.architecture.ffn_matrices)
    for nnz, sparse in zip(nnz_L, sparse_L, strict=True):
        if sparse:
            saved = 2 * k * (n - nnz)  # by a product of one matrix
            forward -= (matrices - 1) * saved
            flops -= (3 * matrices - 1) * saved
    return flops + checkpointed * forward + teacher


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of the parts, without allocator overhead and communication buffers."""
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate_memory(
    recipe: Recipe, num_shards: int = 1, num_gpus: int | None = None
) -> MemoryEstimate:
    """Peak memory of one GPU in training with dense FFNs.

    Args:
        recipe: the run.
        num_shards: GPUs over which FSDP2 shards weights, gradients and optimizer state.
        num_gpus: all GPUs of the run, if there are several such groups (HSDP); default
            ``num_shards``.

    Raises:
        ValueError: the global batch does not divide over them.
    """
    m = recipe.model
    counted = count_parameters(recipe)
    parameters, optimizer = counted.total, 8 * counted.total
    if recipe.optimizer.name == "muon":  # one moment of its matrices
        muon = counted.attention + counted.ffn
        if recipe.gates_by_adamw:
            muon -= m.num_hidden_layers * m.hidden_size * m.intermediate_size
        optimizer -= 4 * muon
    rounds = recipe.accumulation_steps(num_gpus or num_shards)
    half = 4 if recipe.runtime.precision == "fp32" else 2
    tokens = recipe.micro_batch_tokens
    ffn_tensors = len(recipe.architecture.ffn_matrices)  # gate, up, h saved for backward
    saved = half * (6 * m.hidden_size + ffn_tensors * m.intermediate_size)
    boundary = half * m.hidden_size
    if recipe.runtime.activation_checkpointing:
        per_token = m.num_hidden_layers * boundary + saved
    else:
        per_token = m.num_hidden_layers * (saved + boundary)
    if recipe.runtime.loss == "torch":
        # Compiled, the gradient takes the logits' place (2.2 bytes per logit measured at 32,768 ×
        # 50,304 on one H200, commit 4dbf639); eager keeps fp32 logits and their gradient too.
        logit_bytes = half if recipe.runtime.compile else half + 8
        per_token += recipe.padded_vocab_size * logit_bytes
    copies = parameters * 2 if half == 2 else 0
    if recipe.runtime.precision == "fp8":  # the blocks' matrices by row and by column, and the head
        copies += 2 * (counted.attention + counted.ffn)
        copies += recipe.padded_vocab_size * m.hidden_size
    if recipe.train.distillation:  # a whole teacher on each GPU, and its logits
        copies += parameters * half
        per_token += recipe.padded_vocab_size * half
    return MemoryEstimate(
        weights=parameters * 4 // num_shards + copies,
        # FSDP2 shards gradients at the last micro-batch; until then each GPU accumulates whole
        # ones.
        gradients=parameters * 4 // (num_shards if rounds == 1 else 1),
        optimizer=optimizer // num_shards,
        activations=tokens * per_token,
    )


def most_gpus(recipe: Recipe, of: int) -> int:
    """The largest divisor of ``of`` by which the global batch can be divided among GPUs."""
    return math.gcd(recipe.train.global_batch_tokens // recipe.micro_batch_tokens, of)


_GPUS_PER_NODE = 8


def ways_to_shard(num_gpus: int) -> dict[str, int]:
    """The ways to train on so many GPUs, each with the number of shards of the weights."""
    ways = {"DDP": 1, f"FSDP2 × {num_gpus}": num_gpus}
    nodes, rest = divmod(num_gpus, _GPUS_PER_NODE)
    if nodes > 1 and not rest:
        ways[f"HSDP {nodes} × {_GPUS_PER_NODE}"] = _GPUS_PER_NODE
    return ways


def summary(recipe: Recipe, num_gpus: int) -> str:
    """What ``sparsellm recipe show`` prints above the recipe; lines begin with ``#``.

    Raises:
        ValueError: the global batch does not divide over ``num_gpus``.
    """
    parameters = count_parameters(recipe)
    tokens = recipe.train.global_batch_tokens
    flops = train_flops_per_token(recipe)
    rounds, sequence = recipe.accumulation_steps(num_gpus), recipe.model.context_length
    parts = [counted(num_gpus, "GPU")]
    if recipe.train.micro_batch_size == "auto":
        parts += [counted(rounds, "sequence"), f"{sequence} tokens, as many at once as fit"]
    else:
        parts += [counted(rounds, "micro-batch", "micro-batches")]
        parts += [counted(recipe.micro_batch_sequences, "sequence"), f"{sequence} tokens"]
    active, target = [], recipe.sparsity.target_nnz
    if target is not None:
        used = f"{active_parameters(recipe, target):,}"
        active = [("active parameters", f"{used} for a token at sparsity.target_nnz {target:g}")]
    rows = [
        ("parameters", f"{parameters.total:,} ({parameters.ffn / parameters.total:.0%} in FFNs)"),
        *active,
        ("vocabulary", f"{recipe.padded_vocab_size:,} rows, padded"),
        ("tokens per step", f"{tokens:,}"),
        ("a step is", " × ".join(parts)),
        ("steps", f"{recipe.train.steps:,}"),
        ("tokens in all", f"{recipe.train.steps * tokens:,}"),
        (
            "training FLOPs",
            f"{flops / 1e9:.2f} G per token, {flops * tokens * recipe.train.steps:.2e} in all",
        ),
        (
            "λ in paper's eq. 2",
            f"{recipe.sparsity.l1_coefficient * recipe.model.intermediate_size:.3g}",
        ),
    ]
    for way, num_shards in ways_to_shard(num_gpus).items():
        rows.append((f"memory per GPU, {way}", _memory(recipe, num_shards, num_gpus)))
    return "\n".join(f"# {name:28} {value}" for name, value in rows)


def _memory(recipe: Recipe, num_shards: int, num_gpus: int) -> str:
    """See `estimate_memory`. If the micro-batch size is ``auto``, activations per sequence."""
    memory, gib = estimate_memory(recipe, num_shards, num_gpus), 2**30
    parts = (
        f"weights {memory.weights / gib:.1f}, gradients {memory.gradients / gib:.1f}, "
        f"optimizer {memory.optimizer / gib:.1f}"
    )
    activations = f"{memory.activations / gib:.1f}"
    if recipe.train.micro_batch_size == "auto":
        fixed = (memory.total - memory.activations) / gib
        return f"{fixed:.1f} GiB ({parts}) and {activations} for each sequence of a micro-batch"
    return f"{memory.total / gib:.1f} GiB ({parts}, activations {activations})"
