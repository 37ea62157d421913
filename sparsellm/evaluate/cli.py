"""``sparsellm eval MODEL``: benchmark scores, a table, and a JSON beside the checkpoint."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sparsellm import __version__
from sparsellm.arguments import add_model, check_device, check_out, check_sparse, positive_int
from sparsellm.waiting import waiting
from sparsellm.words import counted

if TYPE_CHECKING:
    from transformers import PreTrainedModel as HFModel

    from sparsellm.evaluate.evaluator import Evaluator
    from sparsellm.evaluate.scores import Scores
    from sparsellm.evaluate.suite import Suite
    from sparsellm.runs.huggingface.pretrained import Pretrained

_BEGINNING = '{\n "checkpoint"'  # of every file of scores


def add_eval_parser(commands: Any) -> None:
    """Adds ``eval`` to the ``sparsellm`` command."""
    parser = commands.add_parser(
        "eval",
        help="score a checkpoint on benchmarks (eval/suite.yaml) with lm-eval",
        description="Scores a checkpoint with lm-eval, zero-shot, on the tasks of eval/suite.yaml "
        "or on any other task of lm-eval (--tasks). On several GPUs, run accelerate "
        "launch --config_file launch/ddp8.yaml -m sparsellm eval MODEL",
    )
    add_model(parser, "checkpoint")
    text = "read DIR/<task>/<split>.jsonl instead of the Hugging Face Hub"
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help=text)
    text = (
        "tasks of the suite; tasks, groups or tags of lm-eval; or YAML files in its format. "
        "--data-dir supports only tasks of the suite (default: the whole suite)"
    )
    parser.add_argument("--tasks", metavar="A,B", help=text)
    text = "score only the first N rows of each task"
    parser.add_argument("--limit", type=positive_int, metavar="N", help=text)
    text = "number of rows to score at once (default: 32)"
    parser.add_argument("--batch-size", type=positive_int, default=32, metavar="N", help=text)
    text = "dtype of the weights (default: bf16 on a GPU, fp32 on a CPU)"
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help=text)
    text = "how to compute FFNs: dense as in stock transformers (default), or sparse"
    kernels = ("dense", "auto", "sparse")
    parser.add_argument("--kernels", choices=kernels, default="dense", help=text)
    parser.add_argument("--device", help="cpu, cuda:1, … (default: a GPU if there is one)")
    text = (
        "JSON file to write (default: beside the checkpoint, named after --tasks, --limit, "
        "--kernels and --dtype)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    text = (
        "also write each row with its question, answers and log-likelihoods, as <task>.jsonl in a "
        "folder beside the JSON"
    )
    parser.add_argument("--log-samples", action="store_true", help=text)
    parser.set_defaults(run=_eval)


def _eval(options: argparse.Namespace) -> None:
    _check(options)
    accelerator = _accelerator(options.device)
    try:
        _eval_on(options, accelerator)
    finally:
        if accelerator is not None:
            accelerator.end_training()


def _check(options: argparse.Namespace) -> None:
    """Raises what needs no PyTorch, before it is loaded."""
    from sparsellm.evaluate.suite import require_lm_eval
    from sparsellm.runs.huggingface.find import find_checkpoint

    require_lm_eval()
    check_device(options.device)
    if options.kernels != "dense":
        check_sparse(f"--kernels {options.kernels}", "leave --kernels out")
    _names(options.tasks)
    if options.out is not None:
        check_out(options.out, begins=_BEGINNING)
    find_checkpoint(options.checkpoint)


class _Loaded(NamedTuple):
    """What an evaluation needs."""

    evaluator: Evaluator
    model: HFModel
    tokenizer: Any
    pretrained: Pretrained | None  # None: a model of Hugging Face's that is not ours
    path: Path  # of the checkpoint
    out: Path  # the JSON to write


def _eval_on(options: argparse.Namespace, accelerator: Any) -> None:
    with waiting("loading PyTorch, the tasks and the checkpoint"):
        loaded = _load(options, accelerator)
    from sparsellm.evaluate.scores import table
    from sparsellm.ffn.inference_path.accelerate import accelerate_whole

    evaluator, pretrained = loaded.evaluator, loaded.pretrained
    if options.kernels != "dense":
        accelerate_whole(loaded.model, options.kernels)
    if accelerator is None or accelerator.is_main_process:
        tasks = counted(len(evaluator.tasks), "task")
        print(f"preparing the rows of {tasks}", file=sys.stderr, flush=True)
    scores = evaluator.run(loaded.model, loaded.tokenizer)
    if scores is None:  # the main rank has them
        return
    trained = pretrained.trainer if pretrained else {}
    about = {
        "checkpoint": str(loaded.path if pretrained else options.checkpoint),
        "step": trained.get("step"),
        "tokens": trained.get("tokens"),
        **_about(loaded.model, evaluator, options),
    }
    print(" | ".join(f"{key}: {value}" for key, value in about.items() if value is not None))
    print(table(scores, evaluator.suite), flush=True)
    print(f"saved {_save(loaded.out, about, scores, evaluator)}")
    if options.log_samples:
        print(f"saved {_save_samples(loaded.out.with_suffix(''), evaluator)}/")
    if pretrained:
        _log_to_wandb(pretrained, scores, options.limit)


def _load(options: argparse.Namespace, accelerator: Any) -> _Loaded:
    """Loads the tasks and the model; what can be refused is refused before either."""
    from sparsellm.device import pick_device, pick_dtype, refuse_sparse_without_gpu
    from sparsellm.evaluate.evaluator import Evaluator
    from sparsellm.evaluate.suite import load_suite
    from sparsellm.runs.huggingface.find import find_checkpoint
    from sparsellm.runs.huggingface.hf_folder import (
        is_export,
        is_hugging_face,
        local_copy,
        results_place,
    )
    from sparsellm.runs.huggingface.pretrained import load_pretrained, load_stock

    folder = local_copy(options.checkpoint)  # before the tasks, which take longer
    foreign = is_hugging_face(folder) and not is_export(folder)
    path = folder if foreign else find_checkpoint(folder)
    suite, names = load_suite(), _names(options.tasks)
    out = options.out or _beside(results_place(options.checkpoint, path), suite, names, options)
    check_out(out)
    device = accelerator.device if accelerator is not None else pick_device(options.device)
    if options.kernels != "dense":
        refuse_sparse_without_gpu(f"--kernels {options.kernels}", device, "leave --kernels out")
    dtype = pick_dtype(options.dtype, device)
    evaluator = Evaluator(
        names=names,
        data_dir=options.data_dir,
        limit=options.limit,
        batch_size=options.batch_size,
        accelerator=accelerator,
        show_progress=True,
        log_samples=options.log_samples,
        suite=suite,
    )
    if foreign:
        stock = load_stock(str(options.checkpoint), path, device, dtype)
        return _Loaded(evaluator, *stock, None, path, out)
    pretrained = load_pretrained(path, device, dtype)
    # A special token in a row is text, as in training; no row of the suite has one.
    tokenizer = pretrained.stock_tokenizer(split_special_tokens=True)
    return _Loaded(evaluator, pretrained.model, tokenizer, pretrained, path, out)


def _names(text: str | None) -> list[str] | None:
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError("--tasks names no task; leave it out for the whole suite")
    return names


def _accelerator(device: str | None) -> Any:
    """The ranks of ``accelerate launch``; None for a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    if device is not None:
        raise ValueError(f"--device {device}: several processes have one device each; leave it out")
    import torch
    from accelerate import Accelerator

    return Accelerator(cpu=not torch.cuda.is_available())


def _about(model: HFModel, evaluator: Evaluator, options: argparse.Namespace) -> dict[str, Any]:
    """How it was evaluated: for the report's first line and the head of the JSON."""
    from sparsellm.ffn.kernels.compiler.gpu_architecture import device_name

    ranks = 1 if evaluator.accelerator is None else evaluator.accelerator.num_processes
    data = str(options.data_dir.resolve()) if options.data_dir else "hub"
    of_suite = not evaluator.suite.tasks.keys().isdisjoint(evaluator.tasks)
    return {
        "kernels": options.kernels,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device_name(model.device),
        "processes": ranks,
        "data": data if of_suite else None,  # other tasks say themselves where their rows are
        "limit": evaluator.limit,
        "batch_size": evaluator.batch_size,
        "log_softmax": evaluator.suite.log_softmax,
        "lm_eval": importlib.metadata.version("lm_eval"),
        "sparsellm": __version__,
    }


def _beside(
    checkpoint: Path, suite: Suite, names: list[str] | None, options: argparse.Namespace
) -> Path:
    """The file; scores of a part of the suite, or of other kernels, do not replace the others."""
    # It does not begin with "step_", by which checkpoints are found.
    parts = ["eval", checkpoint.name]
    if names is not None and set(names) != set(suite.tasks):
        suite_tasks = [name for name in suite.tasks if name in names]
        other_tasks = [Path(name).stem for name in suite.split(names)[1]]
        parts.append("+".join([*suite_tasks, *other_tasks]))
    if options.limit is not None:
        parts.append(f"limit{options.limit}")
    if options.kernels != "dense":
        parts.append(options.kernels)
    if options.dtype is not None:
        parts.append(options.dtype)
    return checkpoint.with_name("_".join(parts) + ".json")


def _save(path: Path, about: dict[str, Any], scores: Scores, evaluator: Evaluator) -> Path:
    from sparsellm.runs.files import write_atomically

    suite = evaluator.suite.model_dump(mode="json")
    content = {**about, **asdict(scores), "suite": suite}
    text = json.dumps(content, indent=1) + "\n"
    assert text.startswith(_BEGINNING)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    return path


def _save_samples(folder: Path, evaluator: Evaluator) -> Path:
    """``<task>.jsonl`` with lm-eval's record of each row."""
    from lm_eval.utils import handle_non_serializable

    from sparsellm.runs.files import write_atomically

    folder = folder.with_name(f"{folder.name}_samples")
    folder.mkdir(parents=True, exist_ok=True)
    for task, rows in evaluator.samples.items():
        in_order = sorted(rows, key=lambda row: row["doc_id"])  # of several processes, one by one
        lines = [
            json.dumps(row, default=handle_non_serializable, ensure_ascii=False) for row in in_order
        ]
        write_atomically(folder / f"{task}.jsonl", "\n".join(lines) + "\n")
    return folder


def _log_to_wandb(loaded: Pretrained, scores: Scores, limit: int | None) -> None:
    """Logs to the training run's wandb run, if it has one.

    Its scores have one name each: those of a ``limit`` that is not the run's would be taken for
    scores of whole tasks.
    """
    from sparsellm.evaluate.scores import to_record
    from sparsellm.runs.history import run_of
    from sparsellm.runs.telemetry.dashboard import WANDB_ID_FILE, start_wandb, wandb_values

    run_path = run_of(loaded.path.resolve())
    if loaded.recipe.logging.wandb == "disabled" or run_path is None:
        return
    if not (run_path / WANDB_ID_FILE).is_file():
        print(f"not logged to wandb: {run_path} has no file {WANDB_ID_FILE}")
        return
    if limit not in (None, loaded.recipe.evaluation.limit):
        print(
            f"not logged to wandb: the run's scores have evaluation.limit "
            f"{loaded.recipe.evaluation.limit}, and these --limit {limit}"
        )
        return
    place = {"run_dir": str(run_path.parent)}  # the folder may have moved since
    logging = loaded.recipe.logging.model_copy(update=place)
    recipe = loaded.recipe.model_copy(update={"logging": logging, "name": run_path.name})
    record = to_record(scores, loaded.trainer["step"], loaded.trainer["tokens"])
    run = start_wandb(recipe)
    run.log(wandb_values(record, recipe))
    run.finish()
