"""The recipe: everything that decides what a training run computes, typed and strict.

A recipe is one YAML file (`recipes/`). `load_recipe` reads it, applies ``--set key=value``
overrides and validates it; the resolved recipe is saved beside every checkpoint. The keys are in
sections.py; this module checks what several sections decide together.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import yaml
from pydantic import Field, NonNegativeInt, model_validator

from sparsellm.ffn.activations import ACTIVATIONS, WITH_EXACT_ZEROS, WITH_KERNELS, Activation
from sparsellm.paths import bundled, named_file
from sparsellm.recipe import sections
from sparsellm.recipe.families import ARCHITECTURES, Architecture, unread_fields
from sparsellm.recipe.keys import section_of
from sparsellm.recipe.strict import StrictModel, load_yaml, parse_yaml, validate
from sparsellm.recipe.vocabulary import vocab_size

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # the one in C is ten times as fast


class Recipe(StrictModel):
    """A complete training run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run")
    description: str = Field("", description="What the recipe trains, in one sentence for people")
    seed: NonNegativeInt = Field(
        0, le=2**64 - 1, description="Seed of weights, data order, dropout and re-initialisation"
    )
    model: sections.ModelConfig
    ffn: sections.FFNConfig = sections.FFNConfig()
    sparsity: sections.SparsityConfig = sections.SparsityConfig()
    data: sections.DataConfig
    train: sections.TrainConfig
    optimizer: sections.OptimizerConfig = sections.OptimizerConfig()
    runtime: sections.RuntimeConfig = sections.RuntimeConfig()
    checkpoint: sections.CheckpointConfig = sections.CheckpointConfig()
    validation: sections.ValidationConfig = sections.ValidationConfig()
    evaluation: sections.EvaluationConfig = sections.EvaluationConfig()
    logging: sections.LoggingConfig = sections.LoggingConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        sequence = self.model.context_length
        if self.train.global_batch_tokens % self.micro_batch_tokens:
            raise ValueError(
                f"train.global_batch_tokens {self.train.global_batch_tokens} must be a multiple of "
                f"train.micro_batch_size {self.train.micro_batch_size} × model.context_length "
                f"{sequence} = {self.micro_batch_tokens}"
            )
        if not self.activation.exact_zeros and self.sparsity.reinit_rate:
            raise ValueError(
                f"sparsity.reinit_rate needs {WITH_EXACT_ZEROS} (with {self.ffn.activation} no "
                "neuron is ever dead); set it to 0"
            )
        if not self.activation.kernels and self.ffn.kernels == "sparse":
            raise ValueError(f"ffn.kernels: sparse needs ffn.activation: {WITH_KERNELS}")
        if self.ffn.ramp_steps and self.ffn.ramp_from == self.ffn.activation:
            raise ValueError(
                f"ffn.ramp_steps needs two activations: ffn.ramp_from and ffn.activation are both "
                f"{self.ffn.activation}"
            )
        if self.train.distillation and self.runtime.loss == "liger":
            raise ValueError(
                "train.distillation compares logits, which runtime.loss: liger never has: set "
                "runtime.loss to torch"
            )
        if self.optimizer.decay_steps is not None and self.optimizer.schedule == "cosine":
            raise ValueError(
                "optimizer.decay_steps needs optimizer.schedule: wsd (cosine decays over all of "
                "train.steps); set it to null"
            )
        if self.architecture.gated != self.ffn.gated:
            gated = str(self.architecture.gated).lower()
            raise ValueError(f"model.family: {self.model.family} needs ffn.gated: {gated}")
        if unread := unread_fields(self.architecture, self.model.huggingface):
            raise ValueError(
                f"model.huggingface.{unread[0]} has no effect on model.family: "
                f"{self.architecture.name}; leave it out"
            )
        self._check_muon()
        self._check_target()
        self._check_lengths()
        return self

    def _check_lengths(self) -> None:
        """Refuses phases that the run would not complete.

        A warm-up may be longer, as in a short trial of a long recipe; training then says so.
        """
        steps, sparsity = self.train.steps, self.sparsity
        l1 = {"l1_zero_steps": sparsity.l1_zero_steps, "l1_ramp_steps": sparsity.l1_ramp_steps}
        phases = [
            ("sparsity", l1 if sparsity.l1_coefficient else {}),
            ("ffn", {"ramp_steps": self.ffn.ramp_steps}),
        ]
        for section, lengths in phases:
            if sum(lengths.values()) > steps:
                keys = " + ".join(f"{section}.{key} {n}" for key, n in lengths.items() if n)
                raise ValueError(
                    f"{keys} must not exceed train.steps {steps} (the run would end before that): "
                    f"lower {'one of these' if '+' in keys else 'it'}, or raise train.steps"
                )
        tokens = steps * self.train.global_batch_tokens
        if sparsity.reinit_rate and sparsity.dead_window_tokens > tokens:
            raise ValueError(
                f"sparsity.reinit_rate changes neurons that were inactive for "
                f"sparsity.dead_window_tokens {sparsity.dead_window_tokens}, and the run has "
                f"{tokens} tokens in all: lower the window, or raise train.steps"
            )

    def _check_muon(self) -> None:
        if self.optimizer.name != "muon":
            if self.optimizer.normalize_neurons:
                raise ValueError(
                    "optimizer.normalize_neurons needs optimizer.name: muon "
                    f"({self.optimizer.name} has no updates of whole matrices); set it to false"
                )
            for key in ("gate_optimizer", "gate_learning_rate"):
                if getattr(self.optimizer, key) is not None:
                    raise ValueError(
                        f"optimizer.{key} needs optimizer.name: muon (with {self.optimizer.name} "
                        "gates have optimizer.learning_rate); set it to null"
                    )
        elif self.optimizer.gate_learning_rate is not None and not self.gates_by_adamw:
            raise ValueError(
                "optimizer.gate_learning_rate needs optimizer.gate_optimizer: adamw (Muon updates "
                "all matrices of a block at optimizer.learning_rate); set one of the two"
            )

    def _check_target(self) -> None:
        sparsity, target = self.sparsity, self.sparsity.target_nnz
        if target is None:
            for key in ("target_per_layer", "target_schedule"):
                if getattr(sparsity, key):
                    raise ValueError(f"sparsity.{key} needs sparsity.target_nnz")
            return
        if not self.activation.exact_zeros:
            raise ValueError(
                f"sparsity.target_nnz needs {WITH_EXACT_ZEROS} (with {self.ffn.activation} no "
                "activation is exactly zero); set it to null"
            )
        targets = [("target_nnz", target)]
        targets += [("target_schedule", earlier) for _, earlier in sparsity.target_schedule]
        for key, each in targets:
            if each < 1:
                raise ValueError(
                    f"sparsity.{key} {each:g} must be at least 1: it is a number of neurons, not a "
                    f"share of the {self.model.intermediate_size}"
                )
            if each >= self.model.intermediate_size:
                raise ValueError(
                    f"sparsity.{key} {each:g} must be below model.intermediate_size "
                    f"{self.model.intermediate_size}"
                )
        shares = [share for share, _ in sparsity.target_schedule]
        if any(after <= before for before, after in pairwise(shares)):
            raise ValueError(
                f"sparsity.target_schedule: the shares of train.steps {shares} must ascend"
            )
        if not sparsity.l1_coefficient:
            raise ValueError(
                "sparsity.target_nnz needs sparsity.l1_coefficient to start from, such as 1e-4; to "
                "train without L1 set target_nnz to null"
            )
        if sparsity.l1_ramp_steps:
            raise ValueError(
                "sparsity.target_nnz adjusts λ by itself: set sparsity.l1_ramp_steps to 0 "
                "(sparsity.l1_zero_steps may stay: for so many steps λ is 0)"
            )

    @property
    def gates_by_adamw(self) -> bool:
        """Whether AdamW updates the gates (without a gate, up) beside Muon."""
        if self.optimizer.gate_optimizer is not None:
            return self.optimizer.gate_optimizer == "adamw"
        return self.ffn.gated or self.sparsity.l1_coefficient > 0

    @property
    def activation(self) -> Activation:
        """The activation of the FFN's gate, or of up without a gate."""
        return ACTIVATIONS[self.ffn.activation]

    @property
    def architecture(self) -> Architecture:
        """The Hugging Face model that is trained."""
        if self.model.family is not None:
            return ARCHITECTURES[self.model.family]
        return next(a for a in ARCHITECTURES.values() if a.gated == self.ffn.gated)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: `vocab_size`, or the tokenizer's, padded to a `vocab_multiple`.

        Raises:
            ValueError: the tokenizer has more ids than `vocab_size`, or its files are unavailable.
        """
        ids, rows = vocab_size(self.data.tokenizer), self.model.vocab_size
        multiple = self.model.vocab_multiple
        if rows is None:
            return -(-ids // multiple) * multiple
        if rows < ids:
            raise ValueError(
                f"model.vocab_size {rows} is less than the {ids} ids of data.tokenizer "
                f"{self.data.tokenizer}; take the model's own tokenizer"
            )
        return rows

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens that a rank computes at once; the fewest possible if the size is ``auto``."""
        return self.micro_batch_sequences * self.model.context_length

    @property
    def micro_batch_sequences(self) -> int:
        """`train.micro_batch_size`; 1, the smallest that it can become, if it is ``auto``."""
        size = self.train.micro_batch_size
        return 1 if size == "auto" else size

    def with_micro_batch(self, sequences: int) -> Self:
        """The same recipe with this `train.micro_batch_size`."""
        train = self.train.model_copy(update={"micro_batch_size": sequences})
        return self.model_copy(update={"train": train})

    @property
    def run_path(self) -> Path:
        """The folder of this run."""
        return Path(self.logging.run_dir).expanduser() / self.name

    def accumulation_steps(self, world_size: int) -> int:
        """Micro-batches that a rank computes in each step.

        Raises:
            ValueError: the global batch is not a multiple of the ranks' micro-batches.
        """
        per_round = self.micro_batch_tokens * world_size
        rounds, rest = divmod(self.train.global_batch_tokens, per_round)
        if rest:
            raise ValueError(
                f"train.global_batch_tokens {self.train.global_batch_tokens} is not a multiple of "
                f"{world_size} ranks × train.micro_batch_size {self.train.micro_batch_size} × "
                f"model.context_length {self.model.context_length} = {per_round}; "
                "change micro_batch_size or the number of ranks"
            )
        return rounds

    def to_yaml(self) -> str:
        """The resolved recipe, loadable again with `load_recipe`."""
        content = self.model_dump(mode="json")
        return yaml.dump(content, Dumper=_DUMPER, sort_keys=False, allow_unicode=True)


def recipe_path(name_or_path: str) -> Path:
    """The file that a bundled recipe's name (``0.5b``, ``ablations/dense-relu``) or a path means.

    Raises:
        FileNotFoundError: neither exists; the message lists the bundled names.
    """
    return named_file("recipe", name_or_path, bundled("recipes"), bundled_recipes())


def bundled_recipes() -> list[str]:
    """Names of the recipes that come with the package, without the sweeps."""
    folder = bundled("recipes")
    names = (path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))
    return sorted(name for name in names if not name.startswith("sweeps/"))


def load_recipe(
    name_or_path: str,
    overrides: list[str] | None = None,
    instead: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Recipe:
    """Reads a recipe and applies ``section.key=value`` overrides (values are YAML).

    A recipe may begin with ``base: <name>``: it then states only what differs from its base, key
    by key. A mapping that is a value (`data.corpus`, `model.huggingface`) is stated whole.

    Args:
        name_or_path: see `recipe_path`.
        overrides: those of ``--set``, such as ``optimizer.learning_rate=1e-3``.
        instead: values, by section, that replace those of the file.

    Raises:
        FileNotFoundError: no such recipe.
        ValueError: unknown or mistyped key, or values that contradict one another.
    """
    path = recipe_path(name_or_path)
    content = _with_base(path)
    for section, values in instead.items():
        before = content.get(section, {})
        if isinstance(before, dict):  # else `validate` refuses it
            content[section] = {**before, **values}
    for override in overrides or []:
        _apply(content, override)
    source = str(path) + (f" with --set {' '.join(overrides)}" if overrides else "")
    overridden = {override.partition("=")[0].strip() for override in overrides or []}
    return validate(Recipe, content, source, path, overridden)


def _with_base(path: Path, derived: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The content of a recipe over that of its base; ``derived`` are the files that led here."""
    real = path.resolve()  # a file has several paths, through `..` and links
    if real in derived:
        raise ValueError(f"{path}: `base` leads back to itself through {derived[-1]}")
    content = load_yaml(path)
    base = content.pop("base", None)
    if base is None:
        return content
    beside = path.parent / str(base)  # a file is named as seen from this one
    base_path = beside if beside.is_file() else recipe_path(str(base))
    return _merge(_with_base(base_path, (*derived, real)), content)


def _merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Sections are merged by key. A value that is itself a mapping, such as the shares of a
    mixture, is replaced whole, as ``--set`` replaces it."""
    merged = base | change
    for key in base.keys() & change.keys():
        pair = (base[key], change[key])
        if section_of(Recipe, key) and all(isinstance(values, dict) for values in pair):
            merged[key] = base[key] | change[key]
    return merged


def _apply(content: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"--set {override!r}: write it as section.key=value")
    *sections, leaf = key.strip().split(".")
    shown = override if len(override) < 100 else f"{override[:100]}…"
    value = parse_yaml(text, f"--set {shown!r}")
    if not sections:  # perhaps a section, of which it states some keys
        content.update(_merge(content, {leaf: value}))
        return
    for section in sections:
        content = content.setdefault(section, {})
        if not isinstance(content, dict):
            raise ValueError(f"--set {override!r}: {section!r} is a value, not a section")
    content[leaf] = value
