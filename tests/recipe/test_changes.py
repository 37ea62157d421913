"""What changed between two recipes, in words, and whether the weights of one fit the other."""

import pytest

from sparsellm.recipe import load_recipe
from sparsellm.recipe.changes import check_shapes, recipe_changes


def test_changes_are_told_in_the_words_of_the_recipes_file():
    overrides = [
        "ffn.gated=false",
        "sparsity.target_nnz=30",
        "sparsity.target_schedule=[[0.1, 40]]",
    ]
    assert recipe_changes(load_recipe("debug"), load_recipe("debug", overrides)) == [
        "changed since the checkpoint: ffn.gated true → false",
        "changed since the checkpoint: sparsity.target_nnz null → 30.0",
        "changed since the checkpoint: sparsity.target_schedule [] → [[0.1, 40.0]]",
    ]


def test_other_shapes_are_refused_with_the_keys_that_make_them():
    saved = load_recipe("debug")
    same = load_recipe("debug", ["model.context_length=64", "ffn.activation=silu"])
    check_shapes("here", saved, same, "do that")
    other = load_recipe("debug", ["model.context_length=64", "model.vocab_multiple=4096"])
    text = r"^here .* shapes \(changed .*: model\.vocab_multiple 64 → 4096\): do that$"
    with pytest.raises(ValueError, match=text):
        check_shapes("here", saved, other, "do that")
