"""``sparsellm recipe …``, and the arguments by which commands take a recipe."""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING, Any

from sparsellm.arguments import add_overrides, positive_int
from sparsellm.cli.parser import recipe_keys

if TYPE_CHECKING:  # pydantic is imported where it is needed: `sparsellm --help` is quick
    from sparsellm.recipe.keys import Key

_OWN_SIZE = """\
Your own recipe is a YAML file that names another recipe as its base, and sets the keys that differ:

  base: 0.5b                 # a bundled name, or another file
  name: wide                 # the run folder is runs/wide
  model:
    intermediate_size: 8192
  train:
    steps: 2000

  sparsellm recipe show wide.yaml      # all values, parameters, memory, FLOPs
  sparsellm train wide.yaml
"""


def add_recipe_parser(commands: Any) -> None:
    """Adds ``recipe`` to the ``sparsellm`` command."""
    recipe = commands.add_parser(
        "recipe",
        help="list recipes, show one with all its values, or describe the keys",
        epilog=_OWN_SIZE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = recipe.add_subparsers(metavar="ACTION")
    bundled = actions.add_parser(
        "list",
        help="list the bundled recipes",
        description="Lists the bundled recipes by size, each with its number of parameters and a "
        "sentence about what it trains.",
    )
    bundled.set_defaults(run=_list)
    show = actions.add_parser(
        "show",
        help="show a recipe with all its values, and its parameters, FLOPs and memory",
        epilog=_OWN_SIZE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_recipe_arguments(show)
    show.add_argument(
        "--gpus",
        type=positive_int,
        help="number of GPUs (default: all of this machine, or 8 if it has none; fewer if the "
        "global batch cannot be divided among so many)",
    )
    show.set_defaults(run=_show)
    keys = actions.add_parser(
        "keys",
        help="describe each key of a recipe, with its unit and default",
        description="Lists the keys of a recipe with their type, default, meaning and unit.",
    )
    keys.add_argument(
        "prefix",
        nargs="?",
        default="",
        metavar="PREFIX",
        help="show only keys that begin with PREFIX, such as train",
    )
    keys.set_defaults(run=_keys)


def add_recipe_arguments(parser: Any) -> None:
    """RECIPE (or ``--recipe RECIPE``) and ``--set``."""
    parser.recipe_first = True
    name = parser.add_argument(
        "recipe_name",
        nargs="?",
        metavar="RECIPE",
        help="a bundled recipe (`sparsellm recipe list`) or a YAML file; --recipe RECIPE is the "
        "same",
    )
    flag = parser.add_argument("--recipe", metavar="RECIPE", help=argparse.SUPPRESS)
    name.completer = flag.completer = _complete_recipe
    add_overrides(parser).completer = _complete_key  # type: ignore[attr-defined]


def _complete_recipe(prefix: str, **_: object) -> list[str]:
    """For shells, by argcomplete: bundled names and YAML files."""
    from argcomplete.completers import FilesCompleter

    from sparsellm.recipe import bundled_recipes

    files = FilesCompleter(("yaml", "yml"))(prefix)
    return [name for name in bundled_recipes() if name.startswith(prefix)] + list(files)


def _complete_key(prefix: str, **_: object) -> list[str]:
    """For shells, by argcomplete."""
    return [f"{key}=" for key in recipe_keys() if key.startswith(prefix)]


def _list(options: argparse.Namespace) -> None:
    from sparsellm.recipe import bundled_recipes, load_recipe
    from sparsellm.recipe.estimate import count_parameters
    from sparsellm.runs.telemetry.metrics import short

    recipes = {name: load_recipe(name) for name in bundled_recipes()}
    sizes = {name: count_parameters(recipe).total for name, recipe in recipes.items()}
    for name in sorted(recipes, key=lambda name: ("/" in name, sizes[name], name)):
        size = short(sizes[name]).replace("G", "B")
        print(f"{name:24} {size:>6}  {recipes[name].description}")


def _show(options: argparse.Namespace) -> None:
    from sparsellm.processes.banner import Machine, short_on_gpus
    from sparsellm.recipe import load_recipe
    from sparsellm.recipe.estimate import most_gpus, summary

    recipe = load_recipe(options.recipe, options.overrides)
    machine = Machine.present()
    num_gpus = options.gpus or most_gpus(recipe, len(machine.gpus) or 8)
    print(summary(recipe, num_gpus))
    if not machine.gpus and options.gpus is None:
        print(f"# this machine has no GPU; the above is for {num_gpus} GPUs (--gpus N: for N)")
    for line in short_on_gpus(recipe, machine, num_gpus):
        print(f"# warning: {line}")
    print(f"\n{recipe.to_yaml()}", end="")


def _keys(options: argparse.Namespace) -> None:
    from sparsellm.recipe import Recipe
    from sparsellm.recipe.keys import describe_keys, nearest

    keys = describe_keys(Recipe)
    matches = [key for key in keys if f"{key.name}.".startswith(options.prefix)]
    matches = matches or [key for key in keys if options.prefix in key.name]
    if not matches:
        raise ValueError(f"no key begins with {options.prefix!r}{nearest(Recipe, options.prefix)}")
    print("\n".join(line for key in matches for line in _describe(key)))


def _describe(key: Key) -> list[str]:
    heading = f"{key.name}: {key.type}" + ("" if key.default is None else f" = {key.default}")
    return [
        heading,
        *textwrap.wrap(key.description, 96, initial_indent=" " * 4, subsequent_indent=" " * 4),
    ]
