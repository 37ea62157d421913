"""In which keys two recipes differ, and whether one's weights fit the other's model."""

from sparsellm.recipe.estimate import model_shape
from sparsellm.recipe.keys import flatten
from sparsellm.recipe.schema import Recipe
from sparsellm.recipe.strict import yaml_line

CHANGED = "changed since the checkpoint: "
# Keys that decide which function the weights compute.
_MODEL_KEYS = ("model.", "ffn.activation ", "ffn.gated ", "data.tokenizer ")
CHANGED_MODEL = tuple(f"{CHANGED}{key}" for key in _MODEL_KEYS)
CHANGED_DATA = f"{CHANGED}data."
_CHANGED_LENGTH = f"{CHANGED}model.context_length "  # on which no shape depends


def check_shapes(source: str, saved: Recipe, recipe: Recipe, remedy: str) -> None:
    """Checks that weights of the model of ``saved`` fit that of ``recipe``.

    Args:
        source: where the weights are.
        saved: the recipe that they were trained with.
        recipe: that of the run.
        remedy: the end of the message.

    Raises:
        ValueError: they have other shapes.
    """
    if not _same_shapes(saved, recipe):
        raise shapes_differ(source, recipe_changes(saved, recipe), remedy)


def shapes_differ(source: str, changes: list[str], remedy: str) -> ValueError:
    """The error for weights of other shapes; ``changes`` are those of the recipe."""
    changes = [change for change in changes if not change.startswith(_CHANGED_LENGTH)]
    cause = cause_in(changes, CHANGED_MODEL)
    return ValueError(f"{source} holds a model of other shapes{cause}: {remedy}")


def _same_shapes(saved: Recipe, recipe: Recipe) -> bool:
    """As far as it is known without the tensors."""
    if model_shape(saved) != model_shape(recipe):
        return False
    try:
        return saved.padded_vocab_size == recipe.padded_vocab_size
    except (FileNotFoundError, ValueError):  # a tokenizer that is out of reach
        return True


def recipe_changes(saved: Recipe, recipe: Recipe) -> list[str]:
    """A sentence for each key whose value differs, beginning with `CHANGED`."""
    before, now = (flatten(r.model_dump(mode="json")) for r in (saved, recipe))
    return [
        f"{CHANGED}{key} {yaml_line(before.get(key))} → {yaml_line(now.get(key))}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]


def cause_in(changes: list[str], begins: str | tuple[str, ...]) -> str:
    """The changes of some keys, from `recipe_changes`, for the end of an error message."""
    named = [change.removeprefix(CHANGED) for change in changes if change.startswith(begins)]
    return f" ({CHANGED}{', '.join(named)})" if named else ""
