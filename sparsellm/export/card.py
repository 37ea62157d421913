"""The model card: training, data, scores, and the programs that cannot load the model."""

import re
from statistics import fmean
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from sparsellm import __version__
from sparsellm.data.text.corpus import hub_sources
from sparsellm.evaluate.suite import load_suite
from sparsellm.export.drop_report import DROP_DEAD_FILE, DropReport, table
from sparsellm.recipe import Recipe
from sparsellm.recipe.estimate import active_parameters, count_parameters
from sparsellm.runs import checkpoint
from sparsellm.runs.history import records_of, run_of
from sparsellm.runs.huggingface.hf_folder import EXPORT_RECIPE_FILE
from sparsellm.runs.huggingface.pretrained import Pretrained
from sparsellm.runs.telemetry.evaluations import Evaluation, read_evaluations
from sparsellm.runs.telemetry.records import METRICS_FILE, l1_text, of_kind

CARD_FILE = "README.md"


def model_card(
    pretrained: Pretrained,
    dtype: str,
    dropped: DropReport | None = None,
    license_name: str | None = None,
    *,
    auto_tokenizer_agrees: bool = True,
) -> str:
    """The text of README.md, of exported weights of type ``bf16`` or ``fp32``.

    ``metrics.jsonl`` and every ``eval*.json`` of the checkpoint's run are read; facts missing from
    them are stated as unknown. Without records, non-zeros are from the checkpoint's own statistics.

    Raises:
        ValueError: one of these files is damaged.
    """
    records = records_of(pretrained.path, int(pretrained.trainer["step"]))
    evaluation = _evaluation_of(pretrained, records)
    width = pretrained.recipe.model.intermediate_size
    trained_width = dropped.intermediate_size_before if dropped else width
    trained = pretrained.trained  # else the recipe's data is not the model's
    parts = [
        f"---\n{metadata(pretrained.recipe, evaluation, license_name, trained=trained)}\n---",
        _head(pretrained, records, dtype),
        *([_dropped(dropped)] if dropped else []),
        _training(pretrained, records) if trained else _UNTRAINED,
        _sparsity(pretrained, records, trained_width),
        _evaluation(pretrained, evaluation),
        _caveats(pretrained, auto_tokenizer_agrees),
        *([_CITATION] if pretrained.recipe.activation.exact_zeros else []),
        f"## Recipe\n\n`{EXPORT_RECIPE_FILE}`:\n\n```yaml\n{pretrained.recipe.to_yaml()}```",
    ]
    return "\n\n".join(parts) + "\n"


def metadata(
    recipe: Recipe, evaluation: Evaluation | None, license_name: str | None, *, trained: bool = True
) -> str:
    """The YAML between the card's two ``---`` lines, in the hub's form.

    The recipe's data is named if the model was ``trained`` on it.
    """
    named = trained and not recipe.data.files
    sources = hub_sources(recipe.data.corpus) if named else []
    languages = sorted({source.language for source in sources if source.language})
    sparse = ["activation-sparsity"] if recipe.activation.exact_zeros else []
    data = ModelCardData(
        language=languages or None,
        license=license_name,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["sparsellm", *sparse, recipe.ffn.activation],
        datasets=[source.repo for source in sources] or None,
        model_name=recipe.name,
        eval_results=_results(evaluation) or None,
    )
    return str(data.to_yaml())


def _results(evaluation: Evaluation | None) -> list[EvalResult]:
    if evaluation is None or evaluation.limit is not None:  # such scores are not to be reported
        return []
    suite = load_suite().tasks
    results = []
    for (task, metric), score in evaluation.scores.items():
        suite_task = suite.get(task)
        if metric in ("acc", "acc_norm"):
            results.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=suite_task.dataset if suite_task else task,
                    dataset_revision=suite_task.revision if suite_task else None,
                    dataset_name=task,
                    metric_type="accuracy",
                    metric_name=metric,
                    metric_value=round(100 * score.value, 2),
                )
            )
    return results


def _head(pretrained: Pretrained, records: list[dict[str, Any]], dtype: str) -> str:
    recipe = pretrained.recipe
    shape = recipe.model
    formula, activation = recipe.architecture.formula, recipe.activation.title
    model_class = type(pretrained.model).__name__
    num_parameters = count_parameters(recipe).total
    train = _last(records, "train")
    nnz = train["sparsity"]["nnz_mean"] if train and recipe.activation.exact_zeros else []
    active = f" ({active_parameters(recipe, fmean(nnz)):,} active for a token)" if nnz else ""
    return f"""# {recipe.name}

{_text(recipe.description) or "A language model."}

`{model_class}` of {num_parameters:,} parameters{active} in {dtype}:
{shape.num_hidden_layers} layers of width {shape.hidden_size:,}, feedforward width
{shape.intermediate_size:,}, {activation} in `({formula}) W_d`,
context {shape.context_length:,} tokens, tokenizer `{recipe.data.tokenizer}`.
A base model: it continues text. Exported by sparsellm {__version__}.

```python
from transformers import pipeline

print(pipeline("text-generation", "THIS_FOLDER")("Once upon a time", max_new_tokens=40))
```"""


def _dropped(report: DropReport) -> str:
    text, earlier = report.text(), report.earlier
    while earlier:
        text, earlier = f"{earlier.text()}\n\nThen, from that model:\n\n{text}", earlier.earlier
    return f"""## Dead neurons left out

{text}

Figures of the training run below, its scores too, are the whole model's. In numbers:
`{DROP_DEAD_FILE}`."""


def _training(pretrained: Pretrained, records: list[dict[str, Any]]) -> str:
    recipe, trainer = pretrained.recipe, pretrained.trainer
    train = _last(records, "train")
    rows = [
        ("corpus", f"`{recipe.data.corpus_name}`"),
        ("steps", f"{trainer['step']:,} of {recipe.train.steps:,}"),
        ("tokens", f"{trainer['tokens']:,}"),
        ("L1 coefficient (on Σ over neurons)", l1_text(recipe.sparsity, train)),
    ]
    if origin := trainer.get("init_from"):
        # Of weights that sparsellm has not trained, the tokens are unknown.
        after = f" after {origin['tokens']:,} tokens" if origin["tokens"] else ""
        rows.append(("initial weights", f"`{origin['name']}`{after}, not counted above"))
    if parent := trainer.get("parent"):
        after = f"step {parent['step']:,} ({parent['tokens']:,} tokens) of `{parent['name']}`"
        rows.append(("goes on from", f"{after}, counted above"))
    if train:
        rows.append((f"training loss at step {train['step']:,}", f"{train['loss']:.4f} nats"))
    if held_out := _last(records, "validation"):
        label = f"validation loss at step {held_out['step']:,}"
        rows.append((label, f"{held_out['loss']:.4f} nats ({held_out['num_targets']:,} tokens)"))
    if not records:
        rows.append(("losses", f"unknown: no {METRICS_FILE} beside the checkpoint"))
    return "## Training\n\n" + table(("", ""), rows)


def _sparsity(pretrained: Pretrained, records: list[dict[str, Any]], width: int) -> str:
    title = "## Non-zeros per token\n\n"
    train = _last(records, "train")
    if train is None:
        return title + _last_window(pretrained, width)
    stats = train["sparsity"]
    columns = [stats[key] for key in ("nnz_mean", "nnz_p99", "nnz_max", "dead_fraction")]
    rows = [
        (layer, f"{mean:.1f}", f"{mean / width:.2%}", p99, most, f"{dead:.1%}")
        for layer, (mean, p99, most, dead) in enumerate(zip(*columns, strict=True))
    ]
    head = ("layer", "mean", f"of {width:,}", "99th percentile", "maximum", "dead neurons")
    return title + f"Over the tokens of step {train['step']:,}.\n\n" + table(head, rows)


def _last_window(pretrained: Pretrained, width: int) -> str:
    """The non-zeros by the checkpoint's own statistics."""
    path = pretrained.path
    stats = checkpoint.read_stats(path) if checkpoint.is_checkpoint(path) else {}
    tokens = int(stats.get("activity_tokens", 0))
    if not tokens:
        why = f"no {METRICS_FILE} beside the checkpoint, and no complete window of tokens in it"
        return f"Unknown: {why}."
    nnz_L = stats["activity_LN"].sum(1) / tokens
    is_dead_LN = stats["silent_tokens_LN"] >= pretrained.recipe.sparsity.dead_window_tokens
    rows = [
        (layer, f"{nnz:.1f}", f"{nnz / width:.2%}", f"{is_dead_N.float().mean():.1%}")
        for layer, (nnz, is_dead_N) in enumerate(zip(nnz_L.tolist(), is_dead_LN, strict=True))
    ]
    head = ("layer", "mean", f"of {width:,}", "dead neurons")
    return f"Over {tokens:,} tokens, the last complete window.\n\n" + table(head, rows)


def _evaluation(pretrained: Pretrained, evaluation: Evaluation | None) -> str:
    title = "## Evaluation\n\n"
    if evaluation is None:
        return f"{title}Unknown: no evaluation of step {pretrained.trainer['step']:,} was found."
    rows = [(task, name, score.text(name)) for (task, name), score in evaluation.scores.items()]
    if evaluation.mean:
        rows.append(("mean of the suite", "", evaluation.mean.text("acc")))
    caveat = f" {evaluation.caveat.capitalize()}." if evaluation.caveat else ""
    note = f"Accuracies in percent ± standard error; * enters the mean.{caveat}\n\n"
    return title + note + table(("task", "metric", "score"), rows)


def _evaluation_of(pretrained: Pretrained, records: list[dict[str, Any]]) -> Evaluation | None:
    run_path, step = run_of(pretrained.path), int(pretrained.trainer["step"])
    # Evaluations of weights outside of a run need not record a step.
    steps = {step} if run_path else {step, None}
    evaluations = read_evaluations(run_path or pretrained.path, records)
    return next((evaluation for evaluation in evaluations if evaluation.step in steps), None)


def _last(records: list[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    return next(reversed(of_kind(records, kind)), None)


def _text(words: str) -> str:
    """A recipe's text on one line, with Markdown and HTML escaped."""
    return re.sub(r"([\\`*_{}\[\]<>#|~!])", r"\\\1", " ".join(words.split()))


def _caveats(pretrained: Pretrained, auto_tokenizer_agrees: bool) -> str:
    lines = [_LOADS]
    recipe = pretrained.recipe
    if recipe.ffn.activation != recipe.architecture.usual_activation:
        lines.append(_OTHER_ACTIVATIONS)
    if not auto_tokenizer_agrees:
        lines.append(_OTHER_TOKENIZER)
    if pretrained.trained:
        lines.append(_TOKENS)
        if recipe.padded_vocab_size > pretrained.tokenizer.vocab_size:
            lines.append(_PADDING)
    return "\n".join(lines)


_UNTRAINED = "## Training\n\nUnknown: sparsellm has not trained these weights."

_LOADS = """## Where it loads

- **transformers**: `AutoModelForCausalLM` and `AutoTokenizer`, no remote code. The model runs
  densely there: the zeros cost as much as the rest."""

_OTHER_ACTIVATIONS = """\
- **llama.cpp** ignores `hidden_act` and computes the architecture's usual activation (SiLU in
  Llama, squared ReLU in Arcee): a converted model loads and gives wrong text. Do not use it.
- **vLLM** and **SGLang** refuse this activation in model code of their own;
  `--model-impl transformers` takes that of transformers instead. Tried in vLLM, not in SGLang."""

_OTHER_TOKENIZER = """\
- **AutoTokenizer** of transformers 5 gives other token ids than training did: it replaces the
  tokenizer of such a model by its family's usual one. Use
  `PreTrainedTokenizerFast.from_pretrained`, which reads `tokenizer.json` as it is."""

_CITATION = """\
## Citation

Sparsity by a ReLU gate and an L1 loss, as in:

```bibtex
@misc{arxiv260323198,
  title = {Sparser, Faster, Lighter Transformer Language Models},
  year = {2026},
  eprint = {2603.23198},
  archivePrefix = {arXiv}
}
```"""

_TOKENS = """\
- A literal end-of-document token in a text, such as `<|endoftext|>`, was ordinary text in
  training. Hugging Face's tokenizer makes it the special token;
  `tokenizer(text, split_special_tokens=True)` treats it as training did."""

_PADDING = """\
- The embedding is padded beyond the tokenizer's vocabulary; `generation_config.json` suppresses
  those ids."""
