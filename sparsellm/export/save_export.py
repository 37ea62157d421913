"""`sparsellm export` and `import`: a checkpoint as stock transformers' folder, and the way back."""

import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError

from sparsellm.device import pick_device
from sparsellm.export.card import CARD_FILE, model_card
from sparsellm.export.drop_dead import DropDead, drop_dead_neurons
from sparsellm.export.drop_report import DROP_DEAD_FILE, DropReport, read_report
from sparsellm.export.early_checks import check_export, check_import
from sparsellm.recipe.vocabulary import GENERATION_FILE, HF_PREFIX, TOKENIZER_FILES
from sparsellm.runs import saver, state
from sparsellm.runs.checkpoint import RECIPE_FILE, CheckpointError, Snapshot
from sparsellm.runs.files import fsync, write_atomically
from sparsellm.runs.huggingface import hf_files, hf_folder
from sparsellm.runs.huggingface.hf_tokenizer import (
    added_around,
    auto_tokenizer_agrees,
    write_tokenizer,
)
from sparsellm.runs.huggingface.pretrained import Pretrained, load_pretrained
from sparsellm.runs.huggingface.recipe_of import load_recipe_of

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def export(
    source: Path,
    folder: Path,
    dtype: str = "bf16",
    max_shard_size: str = "4GB",
    drop_dead: DropDead | None = None,
    *,
    license_name: str | None = None,
) -> tuple[Path, DropReport | None]:
    """Writes ``folder``.

    The files are written beside and renamed at the end, so that ``folder`` is whole or absent.

    Args:
        source: checkpoint, run, exported folder or model of the hub.
        folder: where to; must not exist or be empty.
        dtype: ``bf16`` or ``fp32`` (bit-identical to the training weights).
        max_shard_size: such as ``4GB`` (10⁹ bytes); a larger tensor is a shard of its own.
        license_name: for the model card, such as ``apache-2.0``.
        drop_dead: leave out the neurons active for no token of this text (export/drop_dead.py).

    Returns:
        The checkpoint that was exported, and what ``drop_dead`` found.

    Raises:
        FileNotFoundError, ValueError: the checkpoint cannot be read or is not finite, ``folder``
            has files, or dead neurons cannot be measured.
        CheckpointError: ``folder`` could not be written; nothing is left of it.
    """
    check_export(source, folder, max_shard_size, license_name)
    device = pick_device(drop_dead.device if drop_dead else "cpu")
    pretrained = load_pretrained(source, device, DTYPES[dtype])
    if odd := state.first_nonfinite(dict(pretrained.model.named_parameters())):
        raise ValueError(
            f"{pretrained.path}: {odd} has NaN or infinite values; export an older checkpoint"
        )
    settings, report = hf_files.source_of(pretrained.path), None
    dropped = earlier = read_report(settings, pretrained.recipe) if settings else None
    if drop_dead:
        pretrained, report = drop_dead_neurons(pretrained, dtype, drop_dead, earlier)
        dropped = report if report.num_dropped else earlier
    folder = folder.absolute()
    partial = folder.with_name(f".tmp-{folder.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
        partial.mkdir(parents=True)
        _write(pretrained, partial, max_shard_size, dropped)
        agrees = auto_tokenizer_agrees(partial)
        card = model_card(pretrained, dtype, dropped, license_name, auto_tokenizer_agrees=agrees)
        (partial / CARD_FILE).write_text(card, encoding="utf-8")
        _finish(partial)
        partial.replace(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} was not written: {error}. {_remedy(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return pretrained.path, report


def _remedy(error: Exception) -> str:
    if getattr(error, "errno", None) in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Name a folder that you may write to"
    return "Free space on that disk, or name a folder on another"


def _write(
    pretrained: Pretrained, folder: Path, max_shard_size: str, dropped: DropReport | None
) -> None:
    recipe = pretrained.recipe
    # The FFN in each block has the stock names and shapes, so the stock class reads the weights.
    pretrained.model.save_pretrained(folder, max_shard_size=max_shard_size)
    _state_rope_twice(folder / hf_folder.CONFIG_FILE)
    if pretrained.own_tokenizer is None:
        write_tokenizer(recipe.data.tokenizer, folder, recipe.model.max_position_embeddings)
    else:
        hf_files.write_files(folder, hf_files.files_like(pretrained.own_tokenizer, TOKENIZER_FILES))
    if source := hf_files.source_of(pretrained.path):
        # Of what was trained here since, the model's own settings have more.
        settings = [] if pretrained.trained else [GENERATION_FILE]
        files = hf_files.files_like(source, [*settings, *hf_files.LICENSE_FILES])
        hf_files.write_files(folder, files)
    (folder / hf_folder.EXPORT_RECIPE_FILE).write_text(recipe.to_yaml(), encoding="utf-8")
    tokenizer = {"identity": pretrained.tokenizer.identity, "eot_id": pretrained.tokenizer.eot_id}
    trainer = json.dumps(pretrained.trainer | {"tokenizer": tokenizer}, indent=1) + "\n"
    (folder / hf_folder.EXPORT_TRAINER_FILE).write_text(trainer, encoding="utf-8")
    if dropped:
        (folder / DROP_DEAD_FILE).write_text(dropped.to_json(), encoding="utf-8")


def _finish(folder: Path) -> None:
    """Makes the files readable and durable."""
    mode = (folder / CARD_FILE).stat().st_mode
    for shard in folder.glob("*.safetensors"):
        shard.chmod(mode)  # safetensors makes files that only their owner can read
    for path in [*folder.rglob("*"), folder]:
        fsync(path)


def export_notes(source: Path, folder: Path) -> list[str]:
    """What a user of the export in ``folder`` must know, and how it differs from ``source``."""
    notes = []
    if not auto_tokenizer_agrees(folder):
        notes.append(
            "AutoTokenizer of transformers 5 rebuilds such a tokenizer and gives other ids: use "
            "PreTrainedTokenizerFast.from_pretrained"
        )
    recipe = load_recipe_of(source)
    if path := next(_absolute_paths(recipe.model_dump()), None):
        notes.append(
            f"{hf_folder.EXPORT_RECIPE_FILE} and {CARD_FILE} name places on this machine, such as "
            f"{path}: change them there if those who get the folder should not read them"
        )
    around = added_around(recipe.data.tokenizer)
    if around and hf_folder.read_trainer(folder)["step"]:
        notes.append(
            f"the tokenizer came with a post-processor that makes {around} of a text; training "
            "here has seen texts without it, so the export's tokenizer adds nothing"
        )
    return notes + (import_notes(source) if hf_folder.is_hugging_face(source) else [])


def _absolute_paths(value: object) -> Iterator[str]:
    """The absolute paths among the strings of a recipe's section, list or value."""
    if isinstance(value, str) and Path(value.removeprefix(HF_PREFIX)).is_absolute():
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _absolute_paths(item)


def import_notes(source: Path) -> list[str]:
    """Which files of a Hugging Face folder are left behind."""
    names = hf_files.not_carried(hf_folder.local_copy(source))
    return [f"left behind in {source}: {', '.join(names)}"] if names else []


def _state_rope_twice(path: Path) -> None:
    # transformers 5 has `rope_parameters`; version 4 and readers of its files look for
    # `rope_theta` and `rope_scaling`, and would silently take 10,000 and none otherwise.
    config = json.loads(path.read_text(encoding="utf-8"))
    scaling = dict(config["rope_parameters"])
    config["rope_theta"] = scaling.pop("rope_theta")
    if scaling["rope_type"] != "default":
        config["rope_scaling"] = scaling
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def import_export(source: Path, run_path: Path, recipe: str | None = None) -> tuple[Path, str]:
    """Writes ``run_path/checkpoints/step_…`` with the weights in fp32, and ``recipe.yaml``.

    There is no optimizer state: the checkpoint can be evaluated and exported, and is where
    ``sparsellm train --init-from`` begins; it is not resumed.

    Args:
        source: a folder of Hugging Face's, exported by us or not, or a model of the hub.
        run_path: a new run folder.
        recipe: bundled name or file; default is the recipe that an export carries, else one of the
            model in config.json.

    Returns:
        The checkpoint, and the types that the weights had in ``source``, such as ``bfloat16``.

    Raises:
        FileNotFoundError, ValueError: the folder is damaged or not of the recipe's model, or
            ``run_path`` has files.
        CheckpointError: the checkpoint could not be written.
    """
    check_import(source, run_path)
    loaded = load_pretrained(source, recipe=recipe)
    files = hf_files.carried_files(
        hf_files.tokenizer_of(loaded.path), hf_files.source_of(loaded.path)
    )
    # A run that begins with the weights trains them, and does not take it along.
    dropped = hf_files.files_like(loaded.path, [DROP_DEAD_FILE])
    files |= {f"{hf_files.SOURCE}/{name}": data for name, data in dropped.items()}
    snapshot = Snapshot(
        step=int(loaded.trainer["step"]),
        model=state.gather_model(loaded.model),
        trainer=loaded.trainer,
        recipe_yaml=loaded.recipe.to_yaml(),
        files=files,
    )
    try:
        written = saver.save(run_path / "checkpoints", snapshot, keep=1)
        write_atomically(run_path / RECIPE_FILE, snapshot.recipe_yaml)
    except BaseException:  # the same command is to find a new folder again
        shutil.rmtree(run_path, ignore_errors=True)
        raise
    return written, loaded.stored
