"""Which checkpoint or folder of Hugging Face's a path means. Imports no torch."""

from pathlib import Path

import xxhash

from sparsellm.runs import checkpoint
from sparsellm.runs.huggingface import hf_folder
from sparsellm.runs.manifest import read_manifest


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path refers to.

    ``owner/name`` that does not exist locally is a model on the hub, which is downloaded. Otherwise
    it is the path itself if it is a checkpoint or a folder of Hugging Face's, or the latest
    checkpoint of a run or `checkpoints` folder.

    Raises:
        FileNotFoundError: there is none; the message says what was looked for.
    """
    path = hf_folder.local_copy(path)
    if hf_folder.is_hugging_face(path):
        return path
    if existing := checkpoint.checkpoint_at(path):
        return existing
    raise FileNotFoundError(
        f"{path} is not a checkpoint ({checkpoint.TRAINER_FILE} and {checkpoint.MODEL_FILE}), a "
        "run folder with checkpoints/ or a Hugging Face folder; give one such as runs/debug"
    )


def weights_id(path: Path) -> str:
    """An identity that changes if the model is trained again; it takes no time to compute.

    It is that of a checkpoint's manifest; of a folder of Hugging Face's a hash of names, sizes and
    samples of its weight files.

    Args:
        path: as `find_checkpoint` returns it.

    Raises:
        FileNotFoundError, ValueError: a file is missing or damaged.
    """
    if checkpoint.is_checkpoint(path):
        return read_manifest(path).id
    from sparsellm.data.text.identity import (
        content_identity,  # numpy: `sweep --list` answers sooner
    )

    digest = xxhash.xxh3_128()
    for file in sorted(path.glob("*.safetensors")):
        digest.update(f"{file.name} {content_identity(str(file))}\n".encode())
    return digest.hexdigest()
