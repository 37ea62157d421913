"""One evaluation: tasks, built once and scored for any number of models."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel as HFModel, PreTrainedTokenizerBase as HFTokenizer

from sparsellm.evaluate.examples import restart_examples
from sparsellm.evaluate.lm_eval_tasks import build_other_tasks
from sparsellm.evaluate.scores import Scores, from_lm_eval
from sparsellm.evaluate.suite import Suite, build_tasks, load_suite, quiet, templates_compiled_once

if TYPE_CHECKING:  # it needs lm-eval
    from sparsellm.evaluate.lm import Agreement


@dataclass
class Evaluator:
    """What is evaluated and how; every rank builds the same one.

    Raises:
        FileNotFoundError, ValueError: see `build_tasks` and `build_other_tasks`; or a rank would
            have no row.
    """

    names: list[str] | None = None  # tasks of the suite or of lm-eval; None: the whole suite
    data_dir: Path | None = None  # has the suite's rows; None: they are read from the hub
    limit: int | None = None  # rows of each task that are scored, the first ones; None: all
    batch_size: int = 32  # requests that each rank scores at once
    accelerator: Any = None  # of the ranks; None: one process
    show_progress: bool = False
    log_samples: bool = False  # keep each row's questions, answers and log-likelihoods in `samples`
    suite: Suite = field(default_factory=load_suite)

    def __post_init__(self) -> None:
        self.samples: dict[str, list[dict[str, Any]]] = {}  # of the last run, by task
        suite_names, other_names = self.suite.split(self.names)
        other, self.groups = build_other_tasks(other_names, self.suite.tasks)
        self.tasks = build_tasks(self.suite, suite_names, self.data_dir) | other
        ranks = 1 if self.accelerator is None else self.accelerator.num_processes
        for name, task in self.tasks.items():
            rows = min(len(task.eval_docs), self.limit or len(task.eval_docs))
            if rows < ranks:
                raise ValueError(
                    f"{name}: {rows} rows for {ranks} processes, and each needs one; raise the "
                    "limit or start fewer processes"
                )

    def run(
        self, model: HFModel, tokenizer: HFTokenizer, agreement: Agreement | None = None
    ) -> Scores | None:
        """Scores a model of which every rank holds a copy; returns None except on the main rank.

        With an ``agreement``, an error or an interruption of one rank ends the evaluation on all.
        """
        from lm_eval import evaluate

        from sparsellm.evaluate.lm import SparseLM

        with quiet(), templates_compiled_once():
            lm = SparseLM(
                model,
                tokenizer,
                batch_size=self.batch_size,
                softmax_dtype=torch.float32 if self.suite.log_softmax == "float32" else None,
                accelerator=self.accelerator,
                show_progress=self.show_progress,
                agreement=agreement,
            )
            for task in self.tasks.values():
                restart_examples(task, lm.rank, lm.world_size)
            # `evaluate`, not `simple_evaluate`: that one seeds every generator of the process.
            results = evaluate(
                lm,
                {"tasks": self.tasks, "groups": self.groups},
                limit=self.limit,
                log_samples=self.log_samples,
            )
            counts = lm.gather_object((lm.num_requests, lm.num_cut, lm.num_answers_cut))
        if results is None:
            return None
        self.samples = results.get("samples", {})
        return from_lm_eval(results, self.suite, *map(sum, zip(*counts, strict=True)))
