"""Models on the Hugging Face hub, given in place of a folder: ``owner/name[@revision]``."""

from __future__ import annotations

import re
from pathlib import Path

_REPO = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
# What a model is read from; a repository may hold other frameworks' weights too.
_FILES = ["*.json", "*.safetensors", "*.yaml", "*.txt", "*.model"]


def hub_id(path: Path) -> str | None:
    """The path as the name of a model on the hub, if it cannot be a local one; else None."""
    text = path.as_posix()
    local = path.exists() or Path(path.parts[0] if path.parts else ".").exists()
    return text if not local and _REPO.fullmatch(text) else None


def results_place(given: Path, found: Path) -> Path:
    """Where results of a model belong: with what was found, but not in the hub's cache."""
    name = hub_id(given)
    return found if name is None else Path(name.replace("/", "--"))


def local_copy(path: Path) -> Path:
    """The path itself, or the folder of the cache that holds this model of the hub.

    Raises:
        FileNotFoundError: there is neither, or the hub cannot be reached.
    """
    name = hub_id(path)
    if name is None:
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    repo, _, revision = name.partition("@")
    try:
        folder = snapshot_download(repo, revision=revision or None, allow_patterns=_FILES)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise FileNotFoundError(
            f"{name}: no such folder here, and no such model on the Hugging Face hub (one that is "
            "private needs `hf auth login`)"
        ) from error
    except OSError as error:
        reason = str(error).partition("\n")[0]
        raise FileNotFoundError(
            f"{name}: no such folder here, and the Hugging Face hub cannot be read ({reason})"
        ) from error
    return Path(folder)
