"""``sparsellm analyze``: statistics and traces of a model's activations on real text."""

import argparse
import json
from pathlib import Path
from typing import Any

from sparsellm.arguments import add_model, check_device, check_out, positive_int
from sparsellm.waiting import waiting

# In a run's folder, or with the name of a checkpoint beside it: a checkpoint may be pruned.
ANALYSIS_FOLDER = "analysis"
STATISTICS_FILE = "statistics.json"
TRACES_FILE = "traces.npz"


def add_analyze_parser(commands: Any) -> None:
    """Adds ``analyze`` to the ``sparsellm`` command."""
    parser = commands.add_parser(
        "analyze",
        help="count which neurons are active on real text",
        description="Runs held-out text through a model. Writes statistics.json, and the active "
        "neurons of the first tokens as traces.npz.",
    )
    add_model(parser, "source")
    text = "text files of the recipe's format to read (default: the recipe's corpus)"
    parser.add_argument("--data", nargs="+", metavar="GLOB", help=text)
    text = "number of tokens to read (default: 1,048,576)"
    parser.add_argument("--tokens", type=positive_int, default=2**20, metavar="N", help=text)
    text = "store the active neurons of the first N tokens (default: 16,384)"
    parser.add_argument("--trace-tokens", type=positive_int, default=16_384, metavar="N", help=text)
    text = "store the active neurons only of these layers, counted from 0"
    parser.add_argument("--trace-layers", type=int, nargs="+", metavar="LAYER", help=text)
    text = "sequences per forward pass (default: 4)"
    parser.add_argument("--micro-batch-size", type=positive_int, default=4, metavar="N", help=text)
    text = "folder to write (default: analysis_<checkpoint>/ beside it)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)
    parser.add_argument("--device", help="cpu, cuda:1, … (default: a GPU if there is one)")
    parser.set_defaults(run=_analyze)


@waiting("analyzing")
def _analyze(options: argparse.Namespace) -> None:
    from sparsellm.runs.files import write_atomically
    from sparsellm.runs.huggingface.find import find_checkpoint
    from sparsellm.runs.huggingface.hf_folder import results_place

    check_device(options.device)
    path = find_checkpoint(options.source)
    place = results_place(options.source, path)
    out = options.out or place.with_name(f"{ANALYSIS_FOLDER}_{place.name}")
    check_out(out, is_folder=True)
    from sparsellm.analyze.activity import analyze, held_out_corpora
    from sparsellm.analyze.trace import save_traces
    from sparsellm.device import default_dtype, pick_device
    from sparsellm.runs.huggingface.pretrained import load_pretrained

    device = pick_device(options.device)
    pretrained = load_pretrained(path, device, default_dtype(device))
    count = pretrained.recipe.model.num_hidden_layers
    traced_layers = range(count) if options.trace_layers is None else options.trace_layers
    if any(not 0 <= layer < count for layer in traced_layers):
        raise ValueError(f"--trace-layers: {path} has layers 0 to {count - 1}")
    corpora = held_out_corpora(pretrained.recipe, options.data)
    statistics, traces, ids_BT = analyze(
        pretrained, corpora, options.tokens, options.micro_batch_size, options.trace_tokens
    )
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / STATISTICS_FILE, json.dumps(statistics, indent=1) + "\n")
    save_traces(out / TRACES_FILE, [traces[layer] for layer in traced_layers], ids_BT)
    print(table(statistics))
    print(f"wrote {out / STATISTICS_FILE} and {out / TRACES_FILE}")


_LEGEND = (
    "mean, p50, p99, max: neurons active for a token; tile: the most of 256 adjacent ones",
    "union 64, 128, 256: neurons active for at least one of so many neighbouring tokens",
    "top 256, 512: share of all activations that so many neurons have; never: neurons without any",
)


def table(statistics: dict[str, Any]) -> str:
    """The layers of `statistics.json`, a line each, for a terminal."""
    heading = (
        f"{'layer':>5} {'mean':>7} {'p50':>5} {'p99':>5} {'max':>5} {'tile':>5} "
        f"{'union 64':>9} {'128':>7} {'256':>7} {'top 256':>8} {'512':>6} {'never':>6}"
    )
    lines = [
        f"{statistics['tokens']:,} tokens, {statistics['intermediate_size']:,} neurons per layer",
        heading,
    ]
    for number, layer in enumerate(statistics["layers"]):
        union, share = layer["union"], layer["hot_share"]
        lines.append(
            f"{number:>5} {layer['nnz_mean']:>7.1f} {layer['nnz_p50']:>5} {layer['nnz_p99']:>5} "
            f"{layer['nnz_max']:>5} {layer['tile_max']:>5} {union['64']:>9.0f} "
            f"{union['128']:>7.0f} {union['256']:>7.0f} {share['256']:>8.1%} {share['512']:>6.1%} "
            f"{layer['never_fired_fraction']:>6.1%}"
        )
    lines += _LEGEND
    for end, which in (("lowest", "fewest"), ("highest", "most")):
        tokens = ", ".join(
            f"{t['text']!r} {t['nnz_mean']:.1f}" for t in statistics["tokens_by_nnz"][end][:8]
        )
        label = f"frequent tokens for which the {which} neurons are active, on average"
        lines.append(f"{label}: {tokens or 'no token is frequent enough'}")
    return "\n".join(lines)
