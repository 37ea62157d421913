"""The banner: what a training run is about to do, printed before anything heavy is imported.

Nothing here may import torch: that alone takes seconds.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import psutil

from sparsellm import __version__
from sparsellm.paths import has_cupy, usable_cores
from sparsellm.recipe import Recipe, estimate
from sparsellm.recipe.sections import DataConfig
from sparsellm.runs.telemetry.metrics import short
from sparsellm.words import counted

GIB = 2**30
# FLOP/s; no CPU core computes more, so that a run takes at least the time that is stated.
CPU_CORE_FLOPS = 1e11
_LONG_DAYS = 2.0
_DRIVER = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Machine:
    """The hardware of this node, as this process sees it."""

    gpus: tuple[str, ...]  # names
    gpu_bytes: int | None  # memory of the first; None if it is not known
    cores: int
    memory_bytes: int

    @classmethod
    def present(cls) -> Self:
        """This machine; GPUs as CUDA_VISIBLE_DEVICES leaves them."""
        names, memory = _gpus_by_nvml() or (_gpus_by_driver(), None)
        return cls(names, memory if names else None, usable_cores(), psutil.virtual_memory().total)


@dataclass(frozen=True)
class Launch:
    """The processes of this launch, from the launcher's environment."""

    world_size: int
    on_this_node: int
    shards: int = 1  # processes over which FSDP2 or HSDP divides the weights

    @classmethod
    def present(cls) -> Self:
        """The processes of the launch that this one belongs to."""
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        shards = 1  # DDP has the weights whole
        if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
            shards = int(os.environ.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", world_size))
        return cls(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), shards)


def banner(recipe: Recipe, source: str, beginning: str, machine: Machine, ranks: Launch) -> str:
    """The lines; warnings, if any, come last.

    Args:
        recipe: the run.
        source: the recipe's name or file, as the command has it.
        beginning: whether it is new or resumed, see `beginning_of`.
        machine: see `Machine.present`.
        ranks: see `Launch.present`.
    """
    m, batch = recipe.model, recipe.train.global_batch_tokens
    parameters = estimate.count_parameters(recipe)
    target = recipe.sparsity.target_nnz
    active = f" ({short(estimate.active_parameters(recipe, target), ' ')} active)" if target else ""
    gate = "gated" if recipe.ffn.gated else "non-gated"
    rows = [
        (
            "model",
            f"{short(parameters.total, ' ')} parameters{active}: "
            f"{counted(m.num_hidden_layers, 'layer')}, "
            f"{m.hidden_size}/{m.intermediate_size}, {gate} "
            f"{recipe.activation.title}, context {m.context_length}",
        ),
        ("precision", f"{recipe.runtime.precision}; weights and optimizer fp32"),
        (
            "steps",
            f"{recipe.train.steps:,} of {batch:,} tokens: "
            f"{short(recipe.train.steps * batch, ' ')} in all",
        ),
        ("text", _text(recipe.data)),
        ("device", _device(machine, ranks)),
        ("ranks", _ranks(recipe, ranks)),
        ("kernels", _kernels(recipe, machine)),
        ("folder", f"{recipe.run_path}/: {beginning}"),
    ]
    lines = [f"sparsellm {__version__} trains {recipe.name} ({source})"]
    lines += [f"  {name:10} {value}" for name, value in rows]
    lines += [f"warning: {line}" for line in warnings(recipe, machine, ranks)]
    return "\n".join(lines)


def beginning_of(recipe: Recipe, start: Path | None, fresh: bool, init_from: Path | None) -> str:
    """How a run begins; ``start`` is the checkpoint that it goes on from, if there is one."""
    if fresh and recipe.run_path.exists():
        return "new; the earlier run is moved aside"
    if start is not None:
        same_run = start.resolve().parent == (recipe.run_path / "checkpoints").resolve()
        return f"resumes from {start.name}" if same_run else f"new, goes on from {start}"
    return f"new, with the weights of {init_from}" if init_from else "new"


def warnings(recipe: Recipe, machine: Machine, ranks: Launch) -> list[str]:
    """Warnings about what will hardly work on this machine, with the remedy."""
    lines = []
    if len(machine.gpus) > ranks.on_this_node:
        lines.append(
            f"{len(machine.gpus)} GPUs are here and {ranks.on_this_node} will be used; accelerate "
            f"launch --config_file launch/ddp8.yaml --num_processes {len(machine.gpus)} "
            "-m sparsellm train … uses all"
        )
    if not machine.gpus:
        flops = estimate.train_flops_per_token(recipe) * recipe.train.global_batch_tokens
        days = flops * recipe.train.steps / (CPU_CORE_FLOPS * machine.cores) / 86_400
        time = f"{days / 365:.0f} years" if days > 730 else f"{days:.0f} days"
        if days > _LONG_DAYS:
            lines.append(
                f"no GPU, and {machine.cores} CPU cores take at least {time} for "
                f"{flops * recipe.train.steps:.1e} FLOPs; a recipe for CPUs: sparsellm train debug"
            )
        if recipe.runtime.precision == "fp8":
            lines.append(
                "no GPU: runtime.precision: fp8 is emulated, which gives the numbers that a GPU "
                "would and takes longer than bf16"
            )
    if shortage := short_of_memory(recipe, machine, ranks):
        lines.append(shortage)
    return lines


def unused_gpus(machine: Machine, device_type: str, torch_version: str) -> str | None:
    """The warning for machines whose driver has GPUs while PyTorch trains on the CPU."""
    if device_type != "cpu" or not machine.gpus:
        return None
    return (
        f"warning: the driver has {len(machine.gpus)} × {machine.gpus[0]}, but PyTorch "
        f"{torch_version} finds no CUDA device: this trains on the CPU. Install the CUDA build of "
        "torch, or one for this driver (nvidia-smi shows its CUDA version)"
    )


def short_of_memory(recipe: Recipe, machine: Machine, ranks: Launch) -> str | None:
    """The warning for a run that needs more memory than there is, by the estimate."""
    try:
        memory = estimate.estimate_memory(recipe, ranks.shards, ranks.world_size)
    except ValueError:  # the batch does not divide over the ranks: the loop says so
        return None
    if machine.gpus:
        room, where, each = machine.gpu_bytes, f"a {machine.gpus[0]} has", 1
    else:
        room, where, each = machine.memory_bytes, "this machine has", ranks.on_this_node
    needed, fixed = each * memory.total, each * (memory.total - memory.activations)
    if room is None or needed <= room:
        return None
    remedies = []
    if fixed <= room:  # the rest depends on the micro-batch
        if recipe.train.micro_batch_size not in ("auto", 1):
            remedies.append("a smaller train.micro_batch_size")
        if not recipe.runtime.activation_checkpointing:
            remedies.append("runtime.activation_checkpointing=true")
    if machine.gpus:
        sharded = ranks.shards > 1
        remedies.append(f"{'more' if sharded else 'launch/fsdp2.yaml on several'} GPUs")
    if fixed > room or not remedies:
        remedies.append("a smaller model")
    without = f", {fixed / GIB:.0f} of them without activations," if fixed > room else ""
    return (
        f"about {needed / GIB:.0f} GiB{without} are needed and {where} {room / GIB:.0f}; try "
        f"{' or '.join(remedies)} (sparsellm recipe show has the parts)"
    )


def short_on_gpus(recipe: Recipe, machine: Machine, num_gpus: int) -> list[str]:
    """`short_of_memory` for each way to train on ``num_gpus`` GPUs like those of this machine."""
    if not machine.gpus:
        return []
    ways = estimate.ways_to_shard(num_gpus)
    launches = {way: Launch(num_gpus, num_gpus, shards) for way, shards in ways.items()}
    shortages = {way: short_of_memory(recipe, machine, ranks) for way, ranks in launches.items()}
    return [f"{way}: {line}" for way, line in shortages.items() if line]


def _text(data: DataConfig) -> str:
    if data.files is None:
        return data.corpus_name
    held_out = (
        f"{data.validation_fraction:.3g} of the documents" if data.validation_fraction else ""
    )
    held_out = ", ".join(data.validation_files or ()) or held_out
    return ", ".join(data.files) + (f"; held out: {held_out}" if held_out else "")


def _device(machine: Machine, ranks: Launch) -> str:
    if not machine.gpus:
        return f"CPU, {counted(machine.cores, 'core')}, {machine.memory_bytes / GIB:.0f} GiB"
    used = min(ranks.on_this_node, len(machine.gpus))
    memory = "" if machine.gpu_bytes is None else f", {machine.gpu_bytes / GIB:.0f} GiB each"
    nodes = ranks.world_size // max(ranks.on_this_node, 1)
    every = f" on each of {nodes} nodes" if nodes > 1 else ""
    return f"{used} of {len(machine.gpus)} × {machine.gpus[0]}{memory}{every}"


def _ranks(recipe: Recipe, ranks: Launch) -> str:
    try:
        rounds = recipe.accumulation_steps(ranks.world_size)
    except ValueError:
        return f"{ranks.world_size}"
    size = recipe.train.micro_batch_size
    if size == "auto":
        work = f"{counted(rounds, 'sequence')} on each, as many at once as fit"
    else:
        batches = counted(rounds, "micro-batch", "micro-batches")
        work = f"{batches} of {counted(size, 'sequence')} on each"
    return f"{ranks.world_size}; a step is {work}"


def _kernels(recipe: Recipe, machine: Machine) -> str:
    kernels = recipe.ffn.kernels
    if kernels == "dense":
        return "dense, as ffn.kernels says"
    activation = recipe.activation
    if not activation.kernels:
        why = "has no kernels" if activation.exact_zeros else "leaves no zeros to skip"
        return f"dense: {activation.title} {why}"
    if not machine.gpus:
        return f"dense: there is no GPU for the sparse ones (ffn.kernels: {kernels})"
    if not has_cupy():
        return f"dense: CuPy is not installed (ffn.kernels: {kernels})"
    if kernels == "sparse":
        return "sparse, as ffn.kernels says"
    return "auto: both are measured first, then each layer takes the faster one at every step"


def _gpus_by_nvml() -> tuple[tuple[str, ...], int] | None:
    if find_spec("pynvml") is None:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        names = [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
        memory = [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    shown = _visible(len(names))
    return tuple(names[i] for i in shown), memory[shown[0]] if shown else 0


def _gpus_by_driver() -> tuple[str, ...]:
    files = sorted(_DRIVER.glob("*/information")) if _DRIVER.is_dir() else []
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    names = [text.partition("Model:")[2].partition("\n")[0].strip() or "GPU" for text in texts]
    return tuple(names[i] for i in _visible(len(names)))


def _visible(count: int) -> list[int]:
    """Which GPUs CUDA will show; identifiers other than numbers count as the first GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(range(count))
    identifiers = [word.strip() for word in visible.split(",") if word.strip() not in ("", "-1")]
    chosen = [int(word) if word.isdigit() else place for place, word in enumerate(identifiers)]
    return [place for place in chosen if place < count]
