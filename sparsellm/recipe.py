"""The recipe: everything that decides what a training run computes, typed and strict.

A recipe is one YAML file (`recipes/`). `load_recipe` reads it, applies ``--set key=value``
overrides and validates it; the resolved recipe is saved beside every checkpoint. This module
imports nothing of the package but `architecture`, `paths` and `strict`.
"""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from sparsellm.architecture import ACTIVATIONS, ARCHITECTURES, Activation, Architecture
from sparsellm.paths import bundled
from sparsellm.strict import Globs, StrictModel, load_yaml, validate
from sparsellm.vocabulary import check_name, vocab_size

UNION_TOKENS = 64  # of a block whose neurons `sparsity.union_coefficient` shrinks


def _known_family(name: str | None) -> str | None:
    if name is not None and name not in ARCHITECTURES:
        raise ValueError(f"must be null or {' or '.join(map(repr, ARCHITECTURES))}")
    return name


class ModelConfig(StrictModel):
    """The transformer (paper, table 2). Hugging Face's names."""

    family: Annotated[str | None, AfterValidator(_known_family)] = Field(
        None,
        description="Hugging Face model family: "
        + " or ".join(ARCHITECTURES)
        + "; null is llama, or arcee without a gate",
    )
    hidden_size: PositiveInt = Field(description="Width K of the residual stream, elements")
    intermediate_size: PositiveInt = Field(description="Width N of the FFN, neurons")
    num_hidden_layers: PositiveInt = Field(description="Transformer blocks")
    num_attention_heads: PositiveInt = Field(description="Query heads a layer")
    num_key_value_heads: PositiveInt = Field(description="Key and value heads a layer")
    context_length: PositiveInt = Field(description="Sequence length, tokens")
    rope_theta: PositiveFloat = Field(10_000.0, description="RoPE base")
    rms_norm_eps: PositiveFloat = Field(1e-5, description="RMSNorm epsilon")
    initializer_range: PositiveFloat = Field(0.02, description="Std of the initial weights")
    tie_word_embeddings: bool = Field(True, description="Share input and output embeddings")
    vocab_multiple: PositiveInt = Field(128, description="Vocabulary is padded to a multiple of it")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"model.hidden_size {self.hidden_size} must be an even multiple of "
                f"model.num_attention_heads {self.num_attention_heads} (RoPE rotates pairs)"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"model.num_attention_heads {self.num_attention_heads} must be a multiple of "
                f"model.num_key_value_heads {self.num_key_value_heads}"
            )
        return self


def _known_activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ValueError(f"must be {' or '.join(map(repr, ACTIVATIONS))}")
    return name


class FFNConfig(StrictModel):
    """The feedforward block."""

    activation: Annotated[str, AfterValidator(_known_activation)] = Field(
        "relu", description="Activation of the gate: " + " or ".join(ACTIVATIONS)
    )
    gated: bool = Field(True, description="gate * up (Llama), or up alone (paper, appendix)")
    kernels: Literal["auto", "dense", "sparse"] = Field(
        "auto",
        description="Training by dense matrix products, on the sparsity pattern, or (auto) a layer "
        "and step by whichever was measured to be faster; auto is dense on a CPU, and on a GPU "
        "that cannot run the sparse kernels, where it says why",
    )
    format: Literal["union", "twell"] = Field(
        "union",
        description="How the sparse kernels keep what fires: by the neurons that 64 tokens share, "
        "or as the paper does, in TwELL and its hybrid format",
    )
    ell_width: int = Field(
        128,
        ge=1,
        le=1024,
        description="Non-zeros of a token up to which the hybrid format (format: twell) keeps them "
        "in its ELL matrix; other tokens are computed densely. The paper's: 128, and 256 at weak "
        "regularisation",
    )


class SparsityConfig(StrictModel):
    """What makes the FFN sparse, and what is watched."""

    l1_coefficient: float = Field(
        0.0,
        ge=0,
        description="λ on Σ_units |h|, averaged over tokens and layers; "
        "paper's eq. 2 takes the mean over the N units: λ_eq2 = λ · intermediate_size",
    )
    l1_zero_steps: NonNegativeInt = Field(0, description="Steps at λ = 0 before the ramp")
    l1_ramp_steps: NonNegativeInt = Field(0, description="Steps of the linear ramp from 0 to λ")
    target_nnz: PositiveFloat | None = Field(
        None,
        description="Mean non-zeros a token that λ is moved to reach, from l1_coefficient on and "
        "after l1_zero_steps; null keeps λ as it is",
    )
    target_per_layer: bool = Field(
        False, description="A λ for each layer, each to reach target_nnz; else one for their mean"
    )
    union_coefficient: float = Field(
        0.0,
        ge=0,
        description="Weight of Σ_units ‖h over 64 neighbouring tokens‖₂, averaged over tokens and "
        "layers: makes neighbours share neurons. Trains dense; 0 is off",
    )
    dead_window_tokens: PositiveInt = Field(
        1_048_576, description="A neuron silent for this many tokens (all ranks) is dead"
    )
    reinit_rate: float = Field(
        0.0,
        ge=0,
        le=1,
        description="r in W ← (1-r) W + r N(0, initializer_range²) for the gate weights of dead "
        "neurons after every step; 0 is off, the paper uses 0.1",
    )


def _text_or_shares(value: object) -> object:
    """Whether a corpus is one or a mixture: a union would report what each of both misses."""
    if isinstance(value, dict) and value:
        shares = value.values()
        if all(isinstance(share, int | float) and share > 0 for share in shares):
            return value
    elif isinstance(value, str):
        return value
    raise ValueError(
        "must be text, or the share of each corpus, greater than 0, such as {fineweb: 0.7, a: 0.3}"
    )


class DataConfig(StrictModel):
    """What is read and how it becomes tokens."""

    corpus: Annotated[str | dict[str, PositiveFloat], BeforeValidator(_text_or_shares)] = Field(
        description="Name of a file in data/, or a path to such a YAML; or several with their "
        "shares of the tokens, such as {fineweb-edu: 0.7, mine.yaml: 0.3}"
    )
    tokenizer: Annotated[str, AfterValidator(check_name)] = Field(
        "gpt2",
        description="gpt2 (tiktoken), bytes, or hf:ID_OR_PATH: any fast tokenizer of the hub's",
    )
    num_workers: NonNegativeInt = Field(4, description="Tokenising processes a rank; 0 is in-line")
    files: Globs | None = Field(
        None, description="Globs, folders or addresses that replace the corpus's `files`"
    )
    validation_files: Globs | None = Field(
        None, description="The same in place of the corpus's `validation_files`"
    )
    text_field: str | None = Field(
        None, description="Column or key of the text, in place of the corpus's `text_field`"
    )
    on_mismatch: Literal["refuse", "restart"] = Field(
        "refuse",
        description="On resume with other text, another seed or tokenizer: refuse, or restart "
        "the data stream from its beginning; ranks and workers may change",
    )

    @property
    def corpus_name(self) -> str:
        """What is read, for people."""
        if isinstance(self.corpus, str):
            return self.corpus
        return " + ".join(f"{weight:g} {name}" for name, weight in self.corpus.items())

    def sources(self) -> dict[str, Any]:
        """What `sparsellm.data.load_corpora` takes."""
        return {
            "corpus": self.corpus,
            "files": self.files,
            "validation_files": self.validation_files,
            "text_field": self.text_field,
        }


class TrainConfig(StrictModel):
    """How long, and how many tokens at a time."""

    steps: PositiveInt = Field(description="Optimizer steps")
    global_batch_tokens: PositiveInt = Field(description="Tokens a step over all ranks")
    micro_batch_size: PositiveInt = Field(description="Sequences a rank runs at once")
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop",
        description="What to do with a step whose loss or gradient is NaN or infinite: end the "
        "run, or go on with the next one's data and the weights as they are",
    )
    spike_threshold: float | None = Field(
        None,
        gt=1,
        description="Skip the update of a step whose loss or gradient norm (before clipping) "
        "exceeds its moving average over about 50 steps so many times, such as 10; null never does",
    )


class OptimizerConfig(StrictModel):
    """AdamW with linear warm-up and cosine decay (paper, table 2), or another schedule."""

    schedule: Literal["cosine", "wsd", "constant"] = Field(
        "cosine",
        description="Learning rate after warm-up: cosine decay over train.steps; warm-up, stable, "
        "decay: constant, then linear over decay_steps; or constant to the end",
    )
    decay_steps: PositiveInt | None = Field(
        None, description="Last steps, in which wsd decays; null is a tenth of train.steps"
    )
    learning_rate: PositiveFloat = Field(1e-3, description="Peak learning rate")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Final over peak learning rate")
    warmup_steps: NonNegativeInt = Field(600, description="Steps of linear warm-up")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled, on matrices only")
    beta1: float = Field(0.9, ge=0, lt=1, description="First-moment decay")
    beta2: float = Field(0.95, ge=0, lt=1, description="Second-moment decay")
    eps: PositiveFloat = Field(1e-8, description="AdamW epsilon")
    clip_norm: PositiveFloat = Field(1.0, description="Global gradient norm is clipped to it")


class RuntimeConfig(StrictModel):
    """How it is computed. None of these changes what is computed beyond rounding."""

    precision: Literal["bf16", "fp32"] = Field(
        "bf16", description="Autocast type; weights, gradients and optimizer state stay fp32"
    )
    compile: bool = Field(True, description="torch.compile of each transformer block and the loss")
    activation_checkpointing: bool = Field(
        False, description="Recompute each block in the backward pass to save memory"
    )
    loss: Literal["torch", "liger"] = Field(
        "torch",
        description="Cross-entropy over materialised logits, or Liger's fused linear "
        "cross-entropy (GPU, fp32 accumulation, no logits in memory)",
    )
    timeout_minutes: PositiveInt = Field(
        30,
        ge=2,
        description="Minutes that a rank waits for the others before the run ends: longer than the "
        "retries of an unreachable hub (15) and than a checkpoint takes to write",
    )
    token_order: Literal["auto", "none"] = Field(
        "none",
        description="auto: sparse FFNs compute like tokens together, so that 64 of them share more "
        "neurons; none: in the order of the text",
    )


class CheckpointConfig(StrictModel):
    """What is kept."""

    every_steps: NonNegativeInt = Field(
        1000, description="Steps between checkpoints; 0 is never, not even at the end"
    )
    keep: PositiveInt = Field(3, description="Newest checkpoints that are kept")


class ValidationConfig(StrictModel):
    """Held-out loss."""

    every_steps: NonNegativeInt = Field(500, description="Steps between validations; 0 is never")
    tokens: PositiveInt = Field(1_048_576, description="Held-out tokens a validation, all ranks")
    on_error: Literal["continue", "stop"] = Field(
        "continue", description="A validation that fails is logged, or ends the run"
    )


class EvaluationConfig(StrictModel):
    """The benchmark suite (eval/suite.yaml) during training; needs `sparsellm[eval]`."""

    every_steps: NonNegativeInt = Field(0, description="Steps between evaluations; 0 is never")
    data_dir: str | None = Field(None, description="<task>/<split>.jsonl below it; null is the hub")
    limit: PositiveInt | None = Field(None, description="First rows of each task; null is all")
    batch_size: PositiveInt = Field(32, description="Questions' answers a rank scores at once")
    on_error: Literal["continue", "stop"] = Field(
        "continue", description="An evaluation that fails is logged, or ends the run"
    )


class LoggingConfig(StrictModel):
    """What is shown and where it is kept."""

    run_dir: str = Field("runs", description="Folder of the runs; this one is <run_dir>/<name>")
    every_steps: PositiveInt = Field(10, description="Steps between progress lines and records")
    wandb: Literal["online", "offline", "disabled"] = Field("disabled", description="wandb's mode")
    wandb_project: str = Field("sparsellm", description="wandb project")


class Recipe(StrictModel):
    """A complete training run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run")
    description: str = Field("", description="One sentence for people")
    seed: NonNegativeInt = Field(0, description="Seed of weights, data order and re-initialisation")
    model: ModelConfig
    ffn: FFNConfig = FFNConfig()
    sparsity: SparsityConfig = SparsityConfig()
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        sequence = self.model.context_length
        if self.train.global_batch_tokens % (sequence * self.train.micro_batch_size):
            raise ValueError(
                f"train.global_batch_tokens {self.train.global_batch_tokens} must be a multiple of "
                f"train.micro_batch_size {self.train.micro_batch_size} × model.context_length "
                f"{sequence} = {self.train.micro_batch_size * sequence}"
            )
        if not self.activation.exact_zeros and self.sparsity.reinit_rate:
            raise ValueError("sparsity.reinit_rate needs ffn.activation: relu (no neuron is dead)")
        if not self.activation.kernels and self.ffn.kernels == "sparse":
            raise ValueError("ffn.kernels: sparse needs ffn.activation: relu (nothing is zero)")
        if self.architecture.gated != self.ffn.gated:
            gated = str(self.architecture.gated).lower()
            raise ValueError(f"model.family: {self.model.family} needs ffn.gated: {gated}")
        self._check_target()
        self._check_union()
        return self

    def _check_union(self) -> None:
        if not self.sparsity.union_coefficient:
            return
        if self.ffn.kernels == "sparse":
            raise ValueError(
                "sparsity.union_coefficient trains by dense products alone: set ffn.kernels to "
                "auto or dense"
            )
        if self.model.context_length % UNION_TOKENS:
            raise ValueError(
                f"sparsity.union_coefficient needs a model.context_length that is a multiple of "
                f"{UNION_TOKENS}, not {self.model.context_length}: a block must lie within a "
                "sequence"
            )

    def _check_target(self) -> None:
        sparsity, target = self.sparsity, self.sparsity.target_nnz
        if target is None:
            if sparsity.target_per_layer:
                raise ValueError("sparsity.target_per_layer needs sparsity.target_nnz")
            return
        if not self.activation.exact_zeros:
            raise ValueError("sparsity.target_nnz needs ffn.activation: relu (nothing is zero)")
        if target >= self.model.intermediate_size:
            raise ValueError(
                f"sparsity.target_nnz {target:g} must be below model.intermediate_size "
                f"{self.model.intermediate_size}"
            )
        if not sparsity.l1_coefficient:
            raise ValueError(
                "sparsity.target_nnz needs sparsity.l1_coefficient to start from, such as 1e-4"
            )
        if sparsity.l1_ramp_steps:
            raise ValueError(
                "sparsity.target_nnz moves λ by itself: set sparsity.l1_ramp_steps to 0 "
                "(sparsity.l1_zero_steps is its dense phase)"
            )

    @property
    def activation(self) -> Activation:
        """Of the FFN's gate."""
        return ACTIVATIONS[self.ffn.activation]

    @property
    def architecture(self) -> Architecture:
        """The Hugging Face model that is trained."""
        if self.model.family is not None:
            return ARCHITECTURES[self.model.family]
        return next(a for a in ARCHITECTURES.values() if a.gated == self.ffn.gated)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the tokenizer's vocabulary rounded up to `vocab_multiple`."""
        multiple = self.model.vocab_multiple
        return -(-vocab_size(self.data.tokenizer) // multiple) * multiple

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens that a rank runs at once."""
        return self.train.micro_batch_size * self.model.context_length

    @property
    def run_path(self) -> Path:
        """The folder of this run."""
        return Path(self.logging.run_dir).expanduser() / self.name

    @property
    def dead_window_steps(self) -> int:
        """`sparsity.dead_window_tokens` in whole steps, at least one."""
        return math.ceil(self.sparsity.dead_window_tokens / self.train.global_batch_tokens)

    def accumulation_steps(self, world_size: int) -> int:
        """Micro-batches a rank runs in each step.

        Raises:
            ValueError: the global batch does not divide by the ranks' micro-batches.
        """
        per_round = self.micro_batch_tokens * world_size
        rounds, rest = divmod(self.train.global_batch_tokens, per_round)
        if rest:
            raise ValueError(
                f"train.global_batch_tokens {self.train.global_batch_tokens} is no multiple of "
                f"{world_size} ranks × train.micro_batch_size {self.train.micro_batch_size} × "
                f"model.context_length {self.model.context_length} = {per_round}; "
                "change micro_batch_size or the number of ranks"
            )
        return rounds

    def to_yaml(self) -> str:
        """The resolved recipe, loadable again with `load_recipe`."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def recipe_path(name_or_path: str) -> Path:
    """The file of a bundled recipe's name (``0.5b``, ``ablations/dense-relu``) or of a path.

    Raises:
        FileNotFoundError: neither exists; the message lists the bundled names.
    """
    folder = bundled("recipes")
    for candidate in (Path(name_or_path), folder / f"{name_or_path}.yaml"):
        if candidate.is_file():
            return candidate
    bundled_names = bundled_recipes()
    close = difflib.get_close_matches(name_or_path, bundled_names, n=1, cutoff=0.5)
    raise FileNotFoundError(
        f"recipe {name_or_path!r}: no such file, and no bundled recipe of that name; "
        f"{f'did you mean {close[0]!r}? ' if close else ''}bundled are {', '.join(bundled_names)}"
    )


def bundled_recipes() -> list[str]:
    """Names of the recipes that come with the package; sweeps/ varies them and holds none."""
    folder = bundled("recipes")
    names = (path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))
    return sorted(name for name in names if not name.startswith("sweeps/"))


def load_recipe(name_or_path: str, overrides: list[str] | None = None) -> Recipe:
    """Reads a recipe and applies ``section.key=value`` overrides (values are YAML).

    A recipe may begin with ``base: <name>``: it then states only what differs from that one.

    Raises:
        FileNotFoundError: no such recipe.
        ValueError: unknown or mistyped key, or values that contradict one another.
    """
    path = recipe_path(name_or_path)
    content = _with_base(path)
    for override in overrides or []:
        _apply(content, override)
    source = str(path) + (f" with --set {' '.join(overrides)}" if overrides else "")
    return validate(Recipe, content, source)


def _with_base(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    if path in seen:
        raise ValueError(f"{path}: `base` leads back to itself through {seen[-1]}")
    content = load_yaml(path)
    base = content.pop("base", None)
    if base is None:
        return content
    beside = path.parent / str(base)  # a file is named as seen from this one
    found = beside if beside.is_file() else recipe_path(str(base))
    return _merge(_with_base(found, (*seen, path)), content)


def _merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        both_sections = isinstance(merged.get(key), dict) and isinstance(value, dict)
        merged[key] = _merge(merged[key], value) if both_sections else value
    return merged


def _apply(content: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"--set {override!r}: write it as section.key=value")
    *sections, leaf = key.strip().split(".")
    for section in sections:
        content = content.setdefault(section, {})
        if not isinstance(content, dict):
            raise ValueError(f"--set {override!r}: {section!r} is a value, not a section")
    try:
        content[leaf] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {override!r}: the value is not valid YAML: {error}") from error
