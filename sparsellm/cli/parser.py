"""The command line's parser: argparse with suggestions for misspelt names."""

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from sparsellm.paths import closest

# Names that other frameworks use for the recipe's keys.
_SYNONYMS = {
    "lr": ("optimizer.learning_rate",),
    "l1": ("sparsity.l1_coefficient",),
    "lambda": ("sparsity.l1_coefficient",),
    "batch_size": ("train.micro_batch_size", "train.global_batch_tokens"),
    "global_batch_size": ("train.global_batch_tokens",),
    "max_steps": ("train.steps",),
    "layers": ("model.num_hidden_layers",),
    "num_layers": ("model.num_hidden_layers",),
    "output_dir": ("logging.run_dir", "name"),
    "bf16": ("runtime.precision",),
    "dataset": ("data.corpus",),
}
_MOST_SUGGESTIONS = 4


class Parser(argparse.ArgumentParser):
    """`ArgumentParser` with "did you mean" for commands, choices, options and recipe keys.

    Subcommands are made of the same class. One that has ``--recipe`` may declare that the recipe
    can be given without the flag, see `recipe_first`.
    """

    recipe_first = False

    def add_subparsers(self, **options: Any) -> Any:
        """As argparse does, but a command given alone prints its help."""
        self.set_defaults(run=lambda _: self.print_help())
        return super().add_subparsers(**options)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuses unknown arguments here, where the subcommand and its options are known."""
        options, rest = super().parse_known_args(args, namespace)
        if self.recipe_first:
            rest = self._take_recipe(options, rest)
        if rest:
            self.error(self._unknown(rest))
        return options, []

    def _take_recipe(self, options: argparse.Namespace, rest: list[str]) -> list[str]:
        # Where options come first, argparse leaves the positional among the unknown arguments.
        if options.recipe_name is None and rest and not rest[0].startswith("-"):
            options.recipe_name, *rest = rest
        named = options.recipe_name
        if named is not None and options.recipe is not None:
            self.error(f"{named} and --recipe {options.recipe}: give one recipe")
        options.recipe = options.recipe or named
        if options.recipe is None and not rest:
            self.error(f"which recipe? For example: {self.prog} 0.5b (see: sparsellm recipe list)")
        return rest

    def _print_message(self, message: str, file: Any = None) -> None:
        """As argparse does, but an error of the stream is raised: see `cli.command`."""
        if message:
            (file or sys.stderr).write(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        message = f"{value!r} is not one of {', '.join(choices)}{_did_you_mean(value, choices)}"
        raise argparse.ArgumentError(action, message)

    def _unknown(self, rest: list[str]) -> str:
        option, equals, value = rest[0].partition("=")
        options = [name for action in self._actions for name in action.option_strings]
        if not option.startswith("-"):
            is_key = equals and "--set" in options
            remedy = f"; every key needs its own --set: --set {rest[0]}" if is_key else ""
            return f"unexpected argument {rest[0]!r}{remedy}"
        if not equals:
            value = next((word for word in rest[1:2] if not word.startswith("-")), "VALUE")
        name = option.lstrip("-").replace("-", "_")
        keys = recipe_keys() if "--set" in options else []
        meant = _keys_named(name, keys)
        if not meant:
            meant = difflib.get_close_matches(option, options, n=1, cutoff=0.7)
        if not meant:
            leaves = {key.rsplit(".", 1)[-1] for key in keys}
            close = difflib.get_close_matches(name, sorted(leaves), n=1, cutoff=0.75)
            meant = _keys_named(close[0], keys) if close else []
        text = [word if word.startswith("-") else f"--set {word}={value}" for word in meant]
        help_too = f"; see {self.prog} --help" if not text else ""
        did_you_mean = f"; did you mean {_either(text)}?" if text else ""
        return f"there is no option {option}{did_you_mean}{help_too}"


def recipe_keys() -> list[str]:
    """The full names of a recipe's keys; imports what reads recipes."""
    from sparsellm.recipe import Recipe
    from sparsellm.recipe.keys import describe_keys

    return [key.name for key in describe_keys(Recipe)]


def _keys_named(name: str, keys: list[str]) -> list[str]:
    """Recipe keys with this full name or last part; else those of a name in other frameworks."""
    exact = [key for key in keys if name in (key, key.rsplit(".", 1)[-1], key.replace(".", "_"))]
    return exact or [key for key in _SYNONYMS.get(name, ()) if key in keys]


def _did_you_mean(value: object, choices: Iterable[str]) -> str:
    close = closest(str(value), choices)
    return f"; did you mean {close!r}?" if close else ""


def _either(words: list[str]) -> str:
    words = words[:_MOST_SUGGESTIONS]
    return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)
