"""Which examples a question with shots is shown: the same in every evaluation, on any ranks."""

import functools
from typing import Any

# lm-eval's own default (`simple_evaluate`): which examples a task with shots > 0 shows.
_FEWSHOT_SEED = 1234


def restart_examples(task: Any, rank: int, num_ranks: int) -> None:
    """The task's questions get the examples of a first evaluation by one process.

    lm-eval's task draws examples for one question after another, and goes on where the last
    evaluation stopped. Rank r of N asks the questions r, r + N, …: it draws for the others too.
    """
    task.set_fewshot_seed(_FEWSHOT_SEED)
    sampler = getattr(task, "sampler", None)
    if sampler is None:  # a task that is a class of its own
        return
    draw = functools.partial(type(sampler).sample, sampler)
    rows = functools.cache(lambda: task.eval_docs)
    row = 0

    def draw_as_one_process(n: int, eval_doc: Any = None) -> Any:
        nonlocal row
        while row % num_ranks != rank:
            draw(n, eval_doc=eval_doc and rows()[row])
            row += 1
        row += 1
        return draw(n, eval_doc=eval_doc)

    sampler.sample = draw_as_one_process
