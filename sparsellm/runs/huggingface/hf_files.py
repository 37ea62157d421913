"""What a Hugging Face folder holds besides weights, and goes with them unchanged.

A checkpoint has ``tokenizer/`` if its tokenizer is Hugging Face's or was imported with the weights:
the tokenizer's files. It has ``source/`` if its weights come from a Hugging Face folder or began
there: the model's own token ids, its defaults of generation, and its license; only the license if
they were trained with another tokenizer. So both stay what they were, even if that folder changes
or is deleted.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from sparsellm.recipe import Recipe
from sparsellm.recipe.vocabulary import (
    CONFIG_FILE,
    GENERATION_FILE,
    HF_PREFIX,
    TOKENIZER_FILE,
    TOKENIZER_FILES,
    tokenizer_file,
    tokenizer_folder,
)
from sparsellm.runs import checkpoint
from sparsellm.runs.manifest import read_manifest

TOKENIZER, SOURCE = "tokenizer", "source"  # folders in a checkpoint
LICENSE_FILES = ("LICENSE*", "NOTICE*")
# A tokenizer's class and its end-of-text token may follow from the model's configuration.
_OF_TOKENIZER = (*TOKENIZER_FILES, CONFIG_FILE, GENERATION_FILE)
_OF_SOURCE = (CONFIG_FILE, GENERATION_FILE, *LICENSE_FILES)
# Weights, what `sparsellm export` writes, and what belongs to git.
_KNOWN = ("*.safetensors", "*.bin", "*.index.json", "sparsellm_*", "drop_dead.json", ".*")


def files_like(folder: Path, patterns: Iterable[str]) -> dict[str, bytes]:
    """The content of the files that match, by their path in the folder."""
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in paths if path.is_file()
    }


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Writes files by their path in the folder."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def carried_files(
    tokenizer: Path | None, source: Path | None, *, same_ids: bool = True
) -> dict[str, bytes]:
    """What a checkpoint has in `TOKENIZER` and `SOURCE`, by its path in the checkpoint.

    Args:
        tokenizer: the folder of a tokenizer of Hugging Face's.
        source: the folder of the weights' own settings, see `source_of`.
        same_ids: whether the tokenizer is that of the weights; else the token ids in their settings
            are other tokens.
    """
    files: dict[str, bytes] = {}
    for place, folder, patterns in (
        (TOKENIZER, tokenizer, _OF_TOKENIZER),
        (SOURCE, source, _OF_SOURCE if same_ids else LICENSE_FILES),
    ):
        if folder is not None:
            files |= {f"{place}/{n}": data for n, data in files_like(folder, patterns).items()}
    return files


def carried_names(path: Path) -> list[str]:
    """The names of a checkpoint's `carried_files`."""
    return [n for n in read_manifest(path).files if n.startswith((f"{TOKENIZER}/", f"{SOURCE}/"))]


def source_of(path: Path) -> Path | None:
    """The folder with the own settings of the weights of a checkpoint or Hugging Face folder."""
    if checkpoint.is_checkpoint(path):
        return folder if (folder := path / SOURCE).is_dir() else None
    return path if (path / CONFIG_FILE).is_file() else None


def tokenizer_of(path: Path) -> Path | None:
    """The folder of the tokenizer that a checkpoint or Hugging Face folder holds, if it does."""
    folder = path / TOKENIZER if checkpoint.is_checkpoint(path) else path
    return folder if (folder / TOKENIZER_FILE).is_file() else None


def with_own_tokenizer(recipe: Recipe, path: Path) -> Recipe:
    """The recipe of what lies at ``path`` with the tokenizer that lies there, if one of Hugging
    Face's does. A checkpoint may be pruned: its copy counts where the recorded place has other
    files now, or none.
    """
    folder, name = tokenizer_of(path), recipe.data.tokenizer
    if folder is None or not name.startswith(HF_PREFIX):
        return recipe
    if checkpoint.is_checkpoint(path):
        with suppress(FileNotFoundError, ValueError):
            if files_like(tokenizer_folder(name), _OF_TOKENIZER) == files_like(
                folder, _OF_TOKENIZER
            ):
                return recipe
    data = recipe.data.model_copy(update={"tokenizer": f"{HF_PREFIX}{folder.resolve()}"})
    return recipe.model_copy(update={"data": data})


def with_tokenizer_at_hand(recipe: Recipe, run_path: Path | None = None) -> Recipe:
    """The recipe of a run that resumes, also where its tokenizer of Hugging Face's is out of reach:
    a folder that is gone, or was named as seen from another one. Its checkpoint has a copy.

    Args:
        recipe: of the run.
        run_path: the run's folder, if it is not at the recipe's `run_path`.
    """
    newest = checkpoint.latest((run_path or recipe.run_path) / "checkpoints")
    if newest is None or not recipe.data.tokenizer.startswith(HF_PREFIX):
        return recipe
    try:
        tokenizer_file(recipe.data.tokenizer)
    except (FileNotFoundError, ValueError):
        return with_own_tokenizer(recipe, newest)
    return recipe


def has_own_tokenizer(recipe: Recipe) -> bool:
    """Whether a recipe's tokenizer is the copy in a checkpoint of its own run."""
    return recipe.data.tokenizer.startswith(f"{HF_PREFIX}{recipe.run_path.resolve()}/")


def not_carried(folder: Path) -> list[str]:
    """The names of a Hugging Face folder's files that are neither weights nor carried."""
    carried = files_like(folder, (*_OF_TOKENIZER, *_OF_SOURCE))
    recognised = {name.partition("/")[0] for name in carried}
    recognised |= {path.name for pattern in _KNOWN for path in folder.glob(pattern)}
    return sorted({path.name for path in folder.iterdir()} - recognised)
