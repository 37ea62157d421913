"""The sections of a recipe: one class each, one field per key with its unit in the description."""

import glob
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from sparsellm.ffn.activations import ACTIVATIONS
from sparsellm.paths import RUNS_FOLDER, bundled
from sparsellm.recipe.families import ARCHITECTURES
from sparsellm.recipe.strict import Globs, StrictModel, load_yaml
from sparsellm.recipe.vocabulary import check_name


def _known_family(name: str | None) -> str | None:
    if name is not None and name not in ARCHITECTURES:
        raise ValueError(f"must be null or {' or '.join(map(repr, ARCHITECTURES))}")
    return name


class HuggingFaceFields(TypedDict, total=False):
    """`model.huggingface`: fields of Hugging Face's configurations under their own names."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    attention_bias: bool
    attention_dropout: Annotated[float, Field(ge=0, lt=1)]
    head_dim: PositiveInt
    layer_types: list[Literal["full_attention", "sliding_attention"]]
    max_position_embeddings: PositiveInt
    no_rope_layers: list[int]
    rope_parameters: dict[str, Any]  # without rope_theta, which is a key of the recipe
    sliding_window: PositiveInt | None
    use_sliding_window: bool


class ModelConfig(StrictModel):
    """The transformer. Keys have Hugging Face's names; the paper's sizes are in its table 2."""

    family: Annotated[str | None, AfterValidator(_known_family)] = Field(
        None,
        description="Hugging Face model family: "
        + ", ".join(ARCHITECTURES)
        + "; null is llama with ffn.gated and arcee without",
    )
    hidden_size: PositiveInt = Field(description="Width K of the residual stream, elements")
    intermediate_size: PositiveInt = Field(description="Width N of the FFN, neurons")
    num_hidden_layers: PositiveInt = Field(le=10_000, description="Transformer blocks")
    num_attention_heads: PositiveInt = Field(description="Query heads per layer")
    num_key_value_heads: PositiveInt = Field(description="Key and value heads per layer")
    context_length: PositiveInt = Field(description="Length of a training sequence, tokens")
    rope_theta: PositiveFloat = Field(10_000.0, description="RoPE base")
    rms_norm_eps: PositiveFloat = Field(1e-5, description="RMSNorm epsilon")
    initializer_range: float = Field(
        0.02, gt=0, le=1, description="Std of the initial weights; transformers takes at most 1"
    )
    tie_word_embeddings: bool = Field(
        True, description="Whether input and output embeddings are one matrix"
    )
    vocab_multiple: PositiveInt = Field(
        128,
        le=65_536,
        description="The vocabulary is padded to a multiple of this number of rows, unless "
        "vocab_size is given",
    )
    vocab_size: PositiveInt | None = Field(
        None,
        description="Rows of the embedding; null is the tokenizer's number of ids, padded to "
        "vocab_multiple",
    )
    huggingface: HuggingFaceFields = Field(
        HuggingFaceFields(),
        description="Further fields of the family's Hugging Face configuration: "
        + ", ".join(HuggingFaceFields.__annotations__),
    )

    @property
    def head_dim(self) -> int:
        """Width of an attention head, elements."""
        return self.huggingface.get("head_dim", self.hidden_size // self.num_attention_heads)

    @property
    def max_position_embeddings(self) -> int:
        """Positions that the model has, tokens; training sequences may be shorter."""
        return self.huggingface.get("max_position_embeddings", self.context_length)

    @model_validator(mode="after")
    def _context_fits(self) -> Self:
        for field, why in (
            ("max_position_embeddings", "positions beyond it have no embedding"),
            ("sliding_window", "training's only attention mask is the causal one"),
        ):
            most = self.huggingface.get(field)
            if isinstance(most, int) and self.context_length > most:
                raise ValueError(
                    f"model.context_length {self.context_length} must not exceed "
                    f"model.huggingface.{field} {most}: {why}"
                )
        slides = "sliding_attention" in self.huggingface.get("layer_types", [])
        window, is_used = map(self.huggingface.get, ("sliding_window", "use_sliding_window"))
        if slides and not (window and is_used):
            raise ValueError(
                "model.huggingface.layer_types has sliding_attention, which needs "
                "model.huggingface.sliding_window and model.huggingface.use_sliding_window: true"
            )
        if is_used and not window:
            raise ValueError(
                "model.huggingface.use_sliding_window: true needs "
                "model.huggingface.sliding_window, whose default depends on the family"
            )
        if "rope_theta" in self.huggingface.get("rope_parameters", {}):
            raise ValueError(
                "model.huggingface.rope_parameters.rope_theta must be given as model.rope_theta"
            )
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if "head_dim" in self.huggingface:
            if self.head_dim % 2:
                raise ValueError(
                    f"model.huggingface.head_dim {self.head_dim} must be even (RoPE rotates pairs)"
                )
        elif self.hidden_size % (2 * self.num_attention_heads):
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
        "relu",
        description="Activation of the gate, or of up in an FFN without a gate: "
        + " or ".join(ACTIVATIONS),
    )
    ramp_from: Annotated[str, AfterValidator(_known_activation)] = Field(
        "silu", description="Activation that `activation` replaces during the first ramp_steps"
    )
    ramp_steps: NonNegativeInt = Field(
        0,
        description="Number of steps at the start in which training mixes both activations, "
        "beginning with only ramp_from. During these steps, FFNs train with dense kernels; L1, "
        "statistics, held-out loss and checkpoints are those of `activation`. 0 uses `activation` "
        "from the first step",
    )
    gated: bool = Field(
        True, description="Whether the FFN is act(gate) * up (Llama), or act(up) (paper, appendix)"
    )
    kernels: Literal["auto", "dense", "sparse"] = Field(
        "auto",
        description="Kernels that train the FFNs: dense, sparse, or auto, which uses in each layer "
        "and step the kernels that are predicted from measured costs to be faster at its density. "
        "auto is dense on a CPU and on a GPU that cannot run the sparse kernels, and prints the "
        "reason",
    )
    format: Literal["union", "twell"] = Field(
        "union",
        description="How the sparse kernels store activations. union: the active set of each block "
        "of 64 tokens, which are the neurons active for at least one of them; twell: the paper's "
        "TwELL and hybrid formats",
    )
    ell_width: int = Field(
        512,
        ge=1,
        le=1024,
        description="Non-zeros per token that the ELL matrix of the hybrid format holds (format: "
        "twell); tokens with more are computed densely. The paper uses 128, and 256 at weak "
        "regularisation: this takes less memory, but more time if some tokens have more non-zeros",
    )


class SparsityConfig(StrictModel):
    """Regularisation that makes the FFN sparse, and the tracking of dead neurons."""

    l1_coefficient: float = Field(
        0.0,
        ge=0,
        description="λ, the weight of the L1 loss: |h| summed over the neurons of a layer and "
        "averaged over tokens and layers; for relu2 without a gate, h is the value before "
        "squaring. The paper's eq. 2 takes the mean over the neurons instead: λ_eq2 = λ · "
        "intermediate_size",
    )
    l1_zero_steps: NonNegativeInt = Field(
        0, description="Steps with λ = 0 at the start, before the ramp or the controller begins"
    )
    l1_ramp_steps: NonNegativeInt = Field(0, description="Steps of the linear ramp from 0 to λ")
    target_nnz: PositiveFloat | None = Field(
        None,
        description="Target number of active neurons per token, as the mean over tokens. After "
        "l1_zero_steps, a controller adjusts λ to reach it, starting at l1_coefficient; null keeps "
        "λ fixed",
    )
    target_per_layer: bool = Field(
        False,
        description="Whether each layer has its own λ and is to reach target_nnz; otherwise there "
        "is one λ, and the mean over layers is to reach it",
    )
    target_schedule: list[tuple[Annotated[float, Field(gt=0, lt=1)], PositiveFloat]] = Field(
        [],
        description="Earlier targets: ascending shares of train.steps, each with the target up to "
        "that share, such as [[0.2, 150], [0.6, 60]]; afterwards target_nnz applies",
    )
    dead_window_tokens: PositiveInt = Field(
        1_048_576,
        description="A neuron is dead if it was not active for any of the last so many tokens (of "
        "all ranks)",
    )
    reinit_rate: float = Field(
        0.0,
        ge=0,
        le=1,
        description="r in W ← (1-r) W + r N(0, initializer_range²), which changes the gate weights "
        "of dead neurons after every step; 0 is off, the paper uses 0.1",
    )


def _text_or_shares(value: object) -> object:
    """Checks a name or a mixture: for a union type, pydantic would report two errors."""
    if isinstance(value, dict) and value:
        if all(
            isinstance(name, str) and type(share) in (int, float) and share > 0
            for name, share in value.items()
        ):
            return value
    elif isinstance(value, str):
        return value
    raise ValueError(
        "must be text, or the share of each corpus, greater than 0, such as {fineweb: 0.7, a: 0.3}"
    )


class DataConfig(StrictModel):
    """The training text and its tokenizer."""

    corpus: Annotated[str | dict[str, PositiveFloat], BeforeValidator(_text_or_shares)] = Field(
        description="Name of a corpus file in data/, or path of a corpus file or of text files; or "
        "several corpora with their shares of the tokens, such as {fineweb-edu: 0.7, mine.yaml: "
        "0.3}"
    )
    tokenizer: Annotated[str, AfterValidator(check_name)] = Field(
        "gpt2",
        description="gpt2 (tiktoken), bytes, or hf:ID_OR_PATH for any fast Hugging Face tokenizer",
    )
    num_workers: NonNegativeInt = Field(
        4, le=1024, description="Tokenising processes per rank; 0 tokenises in the rank itself"
    )
    files: Globs | None = Field(
        None, description="Globs, folders or addresses that replace the corpus's `files`"
    )
    validation_files: Globs | None = Field(
        None, description="Globs, folders or addresses that replace the corpus's `validation_files`"
    )
    validation_fraction: float = Field(
        0.01,
        ge=0,
        lt=1,
        description="Share of the documents of `files` that is held out, chosen by a hash of their "
        "text. At least one document is held out, or only its end if it is over a tenth of the "
        "text. Not used if `validation_files` are given. Without `files`, corpora hold out what "
        "their own YAML files say, and another value than 0.01 is refused",
    )
    text_field: str | None = Field(
        None, description="Column or key that holds the text; replaces the corpus's `text_field`"
    )
    document_separator: str | None = Field(
        None,
        min_length=1,
        description="Text that separates the documents of a .txt file, such as <|endoftext|>; if "
        "neither this key nor the corpus file sets it, such a file is one document",
    )
    on_mismatch: Literal["refuse", "restart"] = Field(
        "refuse",
        description="What to do if a run is resumed with other text, another seed or another "
        "tokenizer: refuse, or restart the data stream from its beginning. The numbers of ranks "
        "and workers may always change",
    )

    @model_validator(mode="before")
    @classmethod
    def _text_of_your_own(cls, content: Any) -> Any:
        """`files` alone name a corpus, and so does a folder, file or glob given as ``corpus``."""
        if not isinstance(content, dict) or not isinstance(corpus := content.get("corpus"), str):
            return content
        file = bundled("data") / f"{corpus}.yaml"
        if file.is_file():
            other = content.get("files") and load_yaml(file).get("source") != "files"
            return content | {"corpus": "local"} if other else content
        is_text = Path(corpus).expanduser().exists() or "://" in corpus or glob.has_magic(corpus)
        if is_text and Path(corpus).suffix not in (".yaml", ".yml") and not content.get("files"):
            return content | {"corpus": "local", "files": [corpus]}
        return content

    @property
    def corpus_name(self) -> str:
        """The corpus or the mixture, in words."""
        if isinstance(self.corpus, str):
            return self.corpus
        return " + ".join(f"{weight:g} {name}" for name, weight in self.corpus.items())


def _auto_or_count(value: object) -> object:
    """Checks ``auto`` or a number: for a union type, pydantic would report two errors."""
    if value == "auto" or (type(value) is int and value > 0):
        return value
    raise ValueError("must be auto or a whole number greater than 0")


class TrainConfig(StrictModel):
    """Length of training and batch sizes."""

    steps: PositiveInt = Field(description="Optimizer steps")
    global_batch_tokens: PositiveInt = Field(description="Tokens per step over all ranks")
    micro_batch_size: Annotated[PositiveInt | Literal["auto"], BeforeValidator(_auto_or_count)] = (
        Field(
            description="Sequences that a rank processes at once. auto uses as many as fit into "
            "memory (a power of two), and up to four times as many once layers are sparse"
        )
    )
    distillation: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Weight α in (1 - α) · cross-entropy + α · KL divergence from the logits of "
        "the model that --init-from names; 0 trains without that teacher",
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop",
        description="What to do with a step whose loss or gradient is NaN or infinite: end the "
        "run, or skip the update and continue with the next step's data",
    )
    spike_threshold: float | None = Field(
        None,
        gt=1,
        description="Skip the update of a step whose loss or gradient norm (before clipping) "
        "exceeds its moving average over about 50 steps by this factor, such as 10; null skips no "
        "such step",
    )


class OptimizerConfig(StrictModel):
    """AdamW with linear warm-up and cosine decay (paper, table 2), or others."""

    name: Literal["adamw", "muon"] = Field(
        "adamw",
        description="adamw for all parameters; or muon: torch's Muon (momentum 0.95, Nesterov) for "
        "the matrices of the transformer blocks, and AdamW for embeddings, head, norms and (see "
        "gate_optimizer) the gates. Muon's updates are scaled to the size of AdamW's, so that "
        "learning_rate and weight_decay serve both",
    )
    schedule: Literal["cosine", "wsd", "constant"] = Field(
        "cosine",
        description="Learning rate after warm-up. cosine: cosine decay over train.steps; wsd "
        "(warm-up, stable, decay): constant, then linear decay over decay_steps; constant: "
        "constant to the end",
    )
    decay_steps: PositiveInt | None = Field(
        None,
        description="Number of last steps in which wsd decays, after the warm-up; null is a tenth "
        "of train.steps. Refused with cosine; constant does not decay",
    )
    learning_rate: PositiveFloat = Field(1e-3, description="Peak learning rate")
    gate_optimizer: Literal["adamw", "muon"] | None = Field(
        None,
        description="With muon, the optimizer of the gates (without a gate, of up), in dense and "
        "in sparse models. null is adamw, but muon in a model without gates and without L1",
    )
    gate_learning_rate: PositiveFloat | None = Field(
        None,
        description="Peak learning rate of the gates if AdamW updates them and Muon the other "
        "matrices. null is an eighth of learning_rate, for dense and for sparse models",
    )
    normalize_neurons: bool = Field(
        False,
        description="With muon, scale each neuron's part of an update to the same norm: rows of up "
        "and of a gate that Muon updates, columns of down. The norm of a matrix's update stays, "
        "and a neuron's part grows at most tenfold before that",
    )
    min_lr_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Final learning rate of cosine and wsd, divided by the peak; constant stays at "
        "the peak",
    )
    warmup_steps: NonNegativeInt = Field(600, description="Steps of linear warm-up")
    weight_decay: float = Field(
        0.1, ge=0, description="Decoupled weight decay, times the learning rate; for matrices only"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's decay of the second moment")
    eps: PositiveFloat = Field(1e-8, description="AdamW's epsilon")
    clip_norm: PositiveFloat = Field(
        1.0, description="Largest global gradient norm; larger gradients are scaled down to it"
    )

    @property
    def gate_peak(self) -> float:
        """Peak learning rate of the gates where AdamW updates them beside Muon.

        For sparse models an eighth of Muon's learning rate was the best tried, or within the noise
        of the best, at three sizes (docs/results.md, "The learning rate of the gates"). Dense
        models have the same, so that comparisons are between equals. Over 111M tokens of 0.5b's
        shape, dense SiLU ends 0.036 nats higher with gates at a sixteenth than with gates by Muon
        (two seeds).
        """
        return self.gate_learning_rate or self.learning_rate / 8

    @property
    def gate_lr_scale(self) -> float:
        """Learning rate of gates beside Muon, divided by that of everything else, at any step."""
        return self.gate_peak / self.learning_rate


class RuntimeConfig(StrictModel):
    """How training is computed. None of these keys changes results beyond rounding."""

    precision: Literal["bf16", "fp8", "fp32"] = Field(
        "bf16",
        description="Number type of matrix products; weights, gradients and optimizer state stay "
        "in fp32. With fp8 (on Ada, Hopper and newer GPUs), these products use e4m3 numbers, with "
        "a scale per token and per neuron: the gates of sparse FFNs, linear layers without bias in "
        "attention and in dense FFNs (for their output and the gradient of their input), and the "
        "head (for its output). Everything else is then in bf16",
    )
    compile: bool = Field(True, description="torch.compile of each transformer block and the loss")
    activation_checkpointing: bool = Field(
        False, description="Recompute each transformer block in the backward pass to save memory"
    )
    loss: Literal["torch", "liger"] = Field(
        "torch",
        description="torch: cross-entropy of logits in memory; liger: Liger's fused linear "
        "cross-entropy (GPU only, fp32 accumulation, no logits in memory)",
    )
    weight_gradients: Literal["autograd", "fused"] = Field(
        "autograd",
        description="How linear layers of attention and of dense FFNs accumulate gradients. "
        "autograd: every micro-batch casts their fp32 weights and accumulates their gradients; "
        "fused: one cast serves a whole step, and the matrix products add to the gradients (under "
        "FSDP2, it is the same as autograd)",
    )
    timeout_minutes: PositiveInt = Field(
        30,
        ge=2,
        description="Minutes that a rank waits for the others before the run ends; must exceed one "
        "minute, for retries when the Hub cannot be reached, and the time to write a checkpoint",
    )
    token_order: Literal["auto", "none"] = Field(
        "auto",
        description="auto: sparse FFNs process the tokens of a micro-batch sorted by token id, so "
        "that each block of 64 tokens has fewer active neurons; none: in the order of the text",
    )


class CheckpointConfig(StrictModel):
    """When checkpoints are saved, and how many are kept."""

    every_steps: NonNegativeInt = Field(
        1000,
        description="Steps between checkpoints; one is also saved at the end. 0 saves none at all",
    )
    keep: PositiveInt = Field(3, description="Number of newest checkpoints to keep")


class ValidationConfig(StrictModel):
    """Validation loss."""

    every_steps: NonNegativeInt = Field(
        500, description="Steps between validations; one is also run at the end. 0 means never"
    )
    tokens: PositiveInt = Field(
        1_048_576, description="Held-out tokens per validation, over all ranks"
    )
    on_error: Literal["continue", "stop"] = Field(
        "continue",
        description="After a failed validation: continue (the error is logged) or stop the run",
    )


class EvaluationConfig(StrictModel):
    """The benchmark suite (eval/suite.yaml) during training; requires `sparsellm[eval]`."""

    every_steps: NonNegativeInt = Field(
        0, description="Steps between evaluations; one is also run at the end. 0 means never"
    )
    data_dir: str | None = Field(
        None,
        description="Folder with the benchmarks' rows as <task>/<split>.jsonl; null downloads them "
        "from the Hub",
    )
    limit: PositiveInt | None = Field(
        None, description="Number of rows of each task to score, from the first on; null means all"
    )
    batch_size: PositiveInt = Field(32, description="Answers that a rank scores at once")
    on_error: Literal["continue", "stop"] = Field(
        "continue",
        description="After a failed evaluation: continue (the error is logged) or stop the run",
    )


class LoggingConfig(StrictModel):
    """Progress lines, records and wandb."""

    run_dir: str = Field(
        RUNS_FOLDER, description="Folder of all runs; the folder of this run is <run_dir>/<name>"
    )
    every_steps: PositiveInt = Field(10, description="Steps between progress lines and records")
    wandb: Literal["online", "offline", "disabled"] = Field("disabled", description="wandb's mode")
    wandb_project: str = Field("sparsellm", description="wandb project")
