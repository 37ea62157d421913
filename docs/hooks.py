"""Pages made from what lies elsewhere: README, changelog, recipe keys, metrics, commands.

Each fact has one place; the site shows it where a reader looks for it.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from sparsellm.cli import make_parser
from sparsellm.recipe import Recipe
from sparsellm.recipe.keys import describe_keys
from sparsellm.runs.telemetry.metrics import LAYER_METRICS, METRICS

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "records.md",
    "benchmarks/LOG.md": "log.md",
}
# A link of such a page, and where it leads to on the site.
_TARGETS = {"docs/": "", "../docs/": ""}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    for source, page in PAGES.items():
        text = _with_links_of_the_site((ROOT / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "LICENSE", abs_src_path=str(ROOT / "LICENSE")))
    files.append(File.generated(config, "recipe.md", content=_recipe_page()))
    files.append(File.generated(config, "metrics.md", content=_metrics_page()))
    files.append(File.generated(config, "commands.md", content=_commands_page()))
    return files


def _with_links_of_the_site(text: str) -> str:
    targets = _TARGETS | {f"{source})": f"{page})" for source, page in PAGES.items()}
    for source, page in targets.items():
        text = text.replace(f"]({source}", f"]({page}").replace(f'="{source}', f'="{page}')
    return text


def _recipe_page() -> str:
    lines = [
        "# Recipe keys",
        "",
        "A recipe is a YAML file of these keys, and `--set KEY=VALUE` overrides one. An unknown "
        "key is refused, with the nearest one that exists. `sparsellm recipe keys` prints this "
        "list, and `sparsellm recipe show 0.5b` the values of a recipe.",
    ]
    section = None
    for key in describe_keys(Recipe):
        head = key.name.partition(".")[0] if "." in key.name else "the run"
        if head != section:
            section = head
            lines += ["", f"## {section}", "", "| key | default | meaning |"]
            lines += ["| --- | --- | --- |"]
        default = "required" if key.default is None else f"`{key.default}`"
        description = _escaped(key.description)
        lines.append(f"| `{key.name}` | {default} | {description}. *{_prose(key.type)}* |")
    return "\n".join(lines) + "\n"


def _metrics_page() -> str:
    lines = [
        "# Metrics",
        "",
        "The numbers of a training step, over all ranks. `metrics.jsonl` has those that are not "
        "derived, wandb and `sparsellm report` have all.",
        "",
        "| name | in wandb | meaning | unit |",
        "| --- | --- | --- | --- |",
    ]
    rows = [(m.name, f"{m.wandb}/{m.name}", m.title, m.unit) for m in METRICS]
    for m in LAYER_METRICS:
        rows.append((m.name, f"layers/{m.name}/LAYER", f"{m.title}, one number a layer", m.unit))
    for name, in_wandb, title, unit in rows:
        lines.append(f"| `{name}` | `{in_wandb}` | {_escaped(title)} | {_escaped(unit)} |")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    for sign in "|<{*":  # marks of Markdown and of its extensions
        text = text.replace(sign, f"&#{ord(sign)};")
    return text


def _prose(kind: str) -> str:
    return kind.replace("|", "or").replace("<", "&lt;")


def _commands_page() -> str:
    lines = ["# Commands", "", "What `sparsellm COMMAND --help` prints."]
    for name, parser in _parsers("sparsellm", make_parser()):
        parser.formatter_class = _Wide
        lines += ["", f"## {name}", "", "```text", parser.format_help().rstrip(), "```"]
    return "\n".join(lines) + "\n"


class _Wide(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=88)


def _parsers(name: str, parser: Any) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A parser and those of its subcommands that do something."""
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not groups:
        yield name, parser
    for group in groups:
        for word, below in group.choices.items():
            yield from _parsers(f"{name} {word}", below)
