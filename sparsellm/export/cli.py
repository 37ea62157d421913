"""``sparsellm export`` and ``sparsellm import``."""

import argparse
from pathlib import Path
from typing import Any

from sparsellm.arguments import add_model, check_device, positive_int
from sparsellm.waiting import waiting

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"


def add_export_parsers(commands: Any) -> None:
    """Adds both to the ``sparsellm`` command."""
    export = commands.add_parser("export", help="write a checkpoint for stock transformers")
    add_model(export, "source")
    export.add_argument("folder", type=Path, metavar="DIR", help="new folder to write")
    text = "dtype of the weights (default: bf16)"
    export.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help=text)
    text = "largest size of a weight file (default: 4GB)"
    export.add_argument("--max-shard-size", default="4GB", metavar="SIZE", help=text)
    text = "license in the model card, such as apache-2.0 (default: none)"
    export.add_argument("--license", metavar="ID", help=text)
    hub = export.add_argument_group("the Hugging Face Hub")
    text = "also upload the folder to this repository"
    hub.add_argument("--push", metavar="OWNER/NAME", help=text)
    hub.add_argument("--private", action="store_true", help="make a new repository private")
    group = export.add_argument_group(
        "dead neurons",
        "On the measured text, the model's output does not change; the command says how often a "
        "dropped neuron may be active on other text.",
    )
    text = (
        "leave out FFN neurons that are never active on held-out text; all layers get the width "
        "that the layer with the most active neurons needs, a multiple of 128"
    )
    group.add_argument("--drop-dead", action="store_true", help=text)
    text = "number of held-out tokens to measure on, in whole sequences (default: 1,048,576)"
    group.add_argument("--drop-dead-tokens", type=positive_int, metavar="N", help=text)
    text = "text files of the recipe's format to measure on (default: the recipe's corpus)"
    group.add_argument("--data", nargs="+", metavar="GLOB", help=text)
    text = "sequences per forward pass (default: 4)"
    group.add_argument("--micro-batch-size", type=positive_int, metavar="N", help=text)
    group.add_argument("--device", help="device to measure on (default: a GPU if there is one)")
    export.set_defaults(run=_export)

    back = commands.add_parser(
        "import",
        help="convert a Hugging Face folder, or an exported one, to a checkpoint",
        description="Writes a run folder with one checkpoint: weights in fp32, no optimizer "
        "state. `sparsellm train --init-from RUN_DIR` continues training from it.",
    )
    text = "exported folder, or a Hugging Face model or folder"
    back.add_argument("source", type=Path, metavar="DIR", help=text)
    back.add_argument("run_path", type=Path, metavar="RUN_DIR", help="new run folder to write")
    back.add_argument(
        "--recipe", help="name or file of the recipe (default: the recipe of the model in DIR)"
    )
    back.set_defaults(run=_import)


@waiting("exporting")
def _export(options: argparse.Namespace) -> None:
    drop_options = {
        "tokens": options.drop_dead_tokens,
        "files": options.data,
        "micro_batch_size": options.micro_batch_size,
        "device": options.device,
    }
    # Options that do nothing are refused, before torch is loaded.
    drop_options = {name: value for name, value in drop_options.items() if value is not None}
    if drop_options and not options.drop_dead:
        raise ValueError(
            "--drop-dead-tokens, --data, --micro-batch-size and --device set how dead neurons are "
            "measured; add --drop-dead, or omit them"
        )
    if options.private and not options.push:
        raise ValueError("--private applies to the repository of --push; add --push OWNER/NAME")
    if options.push:
        _check_push(options.push)
    check_device(options.device)
    from sparsellm.export.early_checks import check_export

    check_export(options.source, options.folder, options.max_shard_size, options.license)
    from sparsellm.export.drop_dead import DropDead
    from sparsellm.export.save_export import export, export_notes

    drop_dead = DropDead(**drop_options) if options.drop_dead else None
    if drop_dead:
        print(f"measuring which neurons are active on {drop_dead.tokens:,} tokens", flush=True)
    source, dropped = export(
        options.source,
        options.folder,
        options.dtype,
        options.max_shard_size,
        drop_dead,
        license_name=options.license,
    )
    if dropped:
        print(dropped.text())
    print(f"exported {source} to {options.folder} ({options.dtype})", flush=True)
    for note in export_notes(source, options.folder):
        print(note, flush=True)
    if options.push:
        print(f"pushed {_push(options, f'sparsellm export of {source.name}')}")


def _check_push(repo: str) -> None:
    """Raises ValueError for what can fail before anything is computed."""
    from huggingface_hub import get_token
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except ValueError as error:
        raise ValueError(f"--push {repo}: {error}; give one such as my-name/my-model") from error
    if "/" not in repo:
        raise ValueError(f"--push {repo}: name the owner too, such as my-name/{repo}")
    if get_token() is None:
        raise ValueError(f"--push {repo}: you are not logged in to the hub; {_LOG_IN}")


def _push(options: argparse.Namespace, message: str) -> str:
    """Uploads the folder as one commit, to a repository that is made if there is none.

    Returns the address of the model; where the hub refuses, the folder is as it was.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api, repo, folder = HfApi(), options.push, options.folder
    try:
        address = api.create_repo(repo, private=options.private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"--push {repo}: {reason}. {folder} is complete here; {_LOG_IN}, and push it again: "
            f"hf upload {repo} {folder}"
        ) from error
    return str(address)


@waiting("importing")
def _import(options: argparse.Namespace) -> None:
    from sparsellm.export.early_checks import check_import

    check_import(options.source, options.run_path)
    from sparsellm.export.save_export import import_export, import_notes

    written, stored = import_export(options.source, options.run_path, options.recipe)
    print(f"imported {options.source} to {written} (fp32, read from {stored}; no optimizer state)")
    for note in import_notes(options.source):
        print(note)
    print(f"train on: sparsellm train --recipe RECIPE --set name=NEW --init-from {written}")
