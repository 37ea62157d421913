"""A model as lm-eval sees it: its Hugging Face class, with nothing re-implemented.

Splitting, truncation, batching and scoring are lm-eval's (`HFLM`), so scores are those of its
``--model hf``. Imported only where lm-eval is installed (`suite.require_lm_eval`).
"""

import math
from pathlib import Path
from typing import Any, Protocol

import torch
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedModel as HFModel, PreTrainedTokenizerBase as HFTokenizer

from sparsellm.runs.huggingface.hf_tokenizer import without_end

_TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"

Request = tuple[tuple[str, str], list[int], list[int]]  # (context, continuation), their tokens


class Agreement(Protocol):
    """How ranks that score different rows agree to end: if one fails or must stop, all do."""

    def interrupted(self) -> bool:
        """Whether this rank was asked to stop; called before each batch."""

    def agree(self, error: Exception | None) -> None:
        """Raises on every rank if one has an error or was interrupted; every rank calls it."""


class InterruptedHere(Exception):
    """This rank does not go on with its rows, in order to agree with the others."""


class SparseLM(HFLM):
    """A model in memory, one copy per rank; the ranks divide the rows among them.

    As in lm-eval, requests longer than `max_position_embeddings` of the model lose their beginning,
    and the tokenizer's beginning-of-text token, else its end-of-text token, stands before a text
    without context. What a tokenizer puts after every text is left out: a question does not end
    before its answer.

    Args:
        model: in evaluation mode, on its device.
        tokenizer: that it is used with.
        batch_size: requests that are scored at once.
        softmax_dtype: type of the log-softmax; None: the model's.
        accelerator: of the ranks; None: one process.
        show_progress: draw lm-eval's progress bar.
        agreement: of the ranks; without one, a rank does not tell the others of its error.

    Raises:
        ValueError: the tokenizer has no token to put before a text without context.
    """

    def __init__(
        self,
        model: HFModel,
        tokenizer: HFTokenizer,
        *,
        batch_size: int,
        softmax_dtype: torch.dtype | None,
        accelerator: Any = None,
        show_progress: bool = False,
        agreement: Agreement | None = None,
    ) -> None:
        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            raise ValueError(
                f"{tokenizer.name_or_path}: the tokenizer has neither a beginning-of-text nor an "
                "end-of-text token, one of which lm-eval puts before a text without context: name "
                f"it as eos_token in {Path(tokenizer.name_or_path) / 'tokenizer_config.json'}"
            )
        tokenizer = without_end(tokenizer)
        # lm-eval cuts what is too long: no warning of transformers.
        tokenizer.deprecation_warnings[_TOO_LONG] = True
        super().__init__(
            pretrained=model,
            backend="causal",
            tokenizer=tokenizer,
            batch_size=batch_size,
            softmax_dtype=softmax_dtype,
        )
        # HFLM assumes a single process if the model is in memory.
        if accelerator is not None and accelerator.num_processes > 1:
            self.accelerator = accelerator
            self._rank = accelerator.process_index
            self._world_size = accelerator.num_processes
        self._show_progress = show_progress
        self._agreement = agreement
        self.num_requests = 0  # distinct, of this rank
        self.num_cut = 0  # of them, longer than the context
        self.num_answers_cut = 0  # of these, with an answer that alone is longer

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        """(log-likelihood, is the greedy choice) of each request.

        Raises:
            ValueError: a log-likelihood is NaN.
        """
        silent = disable_tqdm or not self._show_progress or self.rank > 0
        if self._agreement is None:
            return self._loglikelihood(requests, silent)
        error, likelihoods = None, []
        try:
            likelihoods = self._loglikelihood(requests, silent)
        except InterruptedHere:
            pass
        except Exception as met:
            error = met.with_traceback(None)
        self._agreement.agree(error)
        return likelihoods

    def _loglikelihood(self, requests: list[Any], silent: bool) -> list[Any]:
        likelihoods = super().loglikelihood(requests, silent)
        for request, (likelihood, _) in zip(requests, likelihoods, strict=True):
            # lm-eval takes the first answer where all are NaN, so some tasks would score 100%.
            if math.isnan(likelihood):
                raise ValueError(
                    f"the model's log-likelihood of the answer {request.args[1]!r} is NaN: its "
                    "numbers overflow or its weights are broken; try --dtype fp32"
                )
        return likelihoods

    def _model_call(self, *args: Any, **kwargs: Any) -> Any:
        if self._agreement is not None and self._agreement.interrupted():
            raise InterruptedHere
        return super()._model_call(*args, **kwargs)

    def _loglikelihood_tokens(self, requests: list[Request], *args: Any, **kwargs: Any) -> Any:
        # Counted once each: on several ranks lm-eval fills up the shorter lists with repeats.
        lengths = {request[0]: (len(request[1]), len(request[2])) for request in requests}
        self.num_requests += len(lengths)
        self.num_cut += sum(sum(pair) > self.max_length + 1 for pair in lengths.values())
        self.num_answers_cut += sum(answer > self.max_length for _, answer in lengths.values())
        fitted = [self._fit(request) for request in requests]
        return super()._loglikelihood_tokens(fitted, *args, **kwargs)

    def _fit(self, request: Request) -> Request:
        """Truncates answers longer than the context, which HFLM refuses, to their last tokens."""
        text, context, continuation = request
        over = len(continuation) - self.max_length
        if over <= 0:
            return request
        return text, context + continuation[:over], continuation[over:]
