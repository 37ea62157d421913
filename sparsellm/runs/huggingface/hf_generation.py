"""Where a text ends and how it is sampled by default, as the weights' own folder says."""

from pathlib import Path

from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel as HFModel

from sparsellm.recipe.vocabulary import CONFIG_FILE, GENERATION_FILE
from sparsellm.runs.huggingface.hf_config import read_config
from sparsellm.runs.huggingface.hf_folder import REMEDY

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def set_generation(
    model: HFModel, eot_id: int, padding: list[int], source: Path | None, *, trained: bool
) -> None:
    """Gives a model its token ids and its defaults of generation.

    Args:
        model: with the ids of `model_config`.
        eot_id: the end-of-document token, at which generation ends.
        padding: ids that only pad the embedding, which are not generated.
        source: folder with a ``config.json`` and perhaps a ``generation_config.json`` of the
            weights' own, or only a license, see `hf_files.source_of`. None: they began here.
        trained: whether they were trained here since. Then a text begins and ends with ``eot_id``.

    Raises:
        ValueError: a file of ``source`` is damaged.
    """
    defaults = GenerationConfig() if source is None else _read(source)
    if source is not None and not trained:
        config = read_config(source)
        for name in _IDS:
            setattr(model.config, name, getattr(config, name, None))
    else:
        defaults.bos_token_id = eot_id
        other_ids = [i for i in _as_list(defaults.eos_token_id) if i != eot_id]
        defaults.eos_token_id = [eot_id, *other_ids] if other_ids else eot_id
    if defaults.eos_token_id is None:
        defaults.eos_token_id = eot_id
    if defaults.pad_token_id is None:
        defaults.pad_token_id = eot_id
    suppressed = [*(defaults.suppress_tokens or []), *padding]
    defaults.suppress_tokens = list(dict.fromkeys(suppressed)) or None
    model.generation_config = defaults


def _read(source: Path) -> GenerationConfig:
    if not (source / CONFIG_FILE).is_file():
        return GenerationConfig()
    config: PretrainedConfig = read_config(source)
    if not (source / GENERATION_FILE).is_file():
        return GenerationConfig.from_model_config(config)
    try:
        return GenerationConfig.from_pretrained(source)
    except Exception as error:  # transformers raises many kinds
        raise ValueError(
            f"{source / GENERATION_FILE} cannot be read ({error}); {REMEDY}"
        ) from error


def _as_list(ids: int | list[int] | None) -> list[int]:
    return ids if isinstance(ids, list) else [] if ids is None else [ids]
