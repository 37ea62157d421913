"""Everything that a recipe can say: keys, model families, vocabulary sizes, estimates of its cost.

Needs no torch.
"""

from sparsellm.recipe.schema import Recipe, bundled_recipes, load_recipe

__all__ = ["Recipe", "bundled_recipes", "load_recipe"]
