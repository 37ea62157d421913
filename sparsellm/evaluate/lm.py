"""A model as lm-eval sees it: its Hugging Face class, with nothing re-implemented.

Splitting, truncation, batching and scoring are lm-eval's (`HFLM`), so scores are those of its
``--model hf``. Imported only where lm-eval is installed (`suite.require_lm_eval`).
"""

import math
from pathlib import Path
from typing import Any, Protocol

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor
from transformers import (
    LogitsProcessor,
    PreTrainedModel as HFModel,
    PreTrainedTokenizerBase as HFTokenizer,
)

from sparsellm.runs.huggingface.hf_tokenizer import without_end

_IS_NAN = "is NaN: its numbers overflow or its weights are broken; try --dtype fp32"
_TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"

# (context, continuation), or None for a window of a text that is scored whole; their tokens
Request = tuple[tuple[str, str] | None, list[int], list[int]]


class Agreement(Protocol):
    """How ranks that score different rows agree to end: if one fails or must stop, all do."""

    def interrupted(self) -> bool:
        """Whether this rank was asked to stop; called before each batch."""

    def agree(self, error: Exception | None) -> None:
        """Raises on every rank if one has an error or was interrupted; every rank calls it."""


class _NotNan(LogitsProcessor):
    """Changes no logits; greedy decoding would take the first NaN for the likeliest token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if scores.isnan().any():
            raise ValueError(f"a logit of the model {_IS_NAN}")
        return scores


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
        self.num_requests = 0  # of this rank
        self.num_cut = 0  # of them, longer than the context
        self.num_answers_cut = 0  # of these, with an answer that alone is longer
        self._prompts: dict[str, bool] = {}  # of texts that are generated: whether it was cut

    def all_gather(self, tensor: Tensor) -> Tensor:
        """This rank's number of requests, for each rank.

        lm-eval repeats requests until all ranks have equally many, and keeps their answers several
        times. With a copy of the model on each rank, none waits for another.
        """
        return tensor.repeat(self.world_size)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        """(log-likelihood, is the greedy choice) of each request.

        Raises:
            ValueError: a log-likelihood is NaN.
        """
        silent = disable_tqdm or not self._show_progress or self.rank > 0
        if self._agreement is None:
            return super().loglikelihood(requests, silent)
        error, likelihoods = None, []
        try:
            likelihoods = super().loglikelihood(requests, silent)
        except InterruptedHere:
            pass
        except Exception as met:
            error = met.with_traceback(None)
        self._agreement.agree(error)
        return likelihoods

    def _model_call(self, *args: Any, **kwargs: Any) -> Any:
        if self._agreement is not None and self._agreement.interrupted():
            raise InterruptedHere
        return super()._model_call(*args, **kwargs)

    def _loglikelihood_tokens(self, requests: list[Request], *args: Any, **kwargs: Any) -> Any:
        lengths = [(len(context), len(answer)) for _, context, answer in requests]
        self.num_requests += len(lengths)
        self.num_cut += sum(sum(pair) > self.max_length + 1 for pair in lengths)
        self.num_answers_cut += sum(answer > self.max_length for _, answer in lengths)
        fitted = [self._fit(request) for request in requests]
        likelihoods = super()._loglikelihood_tokens(fitted, *args, **kwargs)
        for (_, _, answer), (likelihood, _) in zip(requests, likelihoods, strict=True):
            # lm-eval takes the first answer where all are NaN, so some tasks would score 100%.
            if math.isnan(likelihood):
                text = self.tok_decode(answer)
                raise ValueError(f"the model's log-likelihood of the text {text!r} {_IS_NAN}")
        return likelihoods

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each prompt; a prompt that leaves it no room loses its beginning.

        Raises:
            ValueError: a task asks for as many new tokens as the context has.
        """
        silent = disable_tqdm or not self._show_progress or self.rank > 0
        for request in requests:
            most = normalize_gen_kwargs(request.args[1], self.max_gen_toks)["max_gen_toks"]
            if most >= self.max_length:
                raise ValueError(
                    f"the task asks for {most} new tokens (max_gen_toks), and the model's context "
                    f"has {self.max_length}, which leaves none for the prompt; lower max_gen_toks "
                    "under generation_kwargs in a copy of the task's YAML"
                )
        self._prompts = {}
        texts: list[str] = super().generate_until(requests, silent)
        self.num_requests += len(self._prompts)
        self.num_cut += sum(self._prompts.values())
        return texts

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """As lm-eval's; notes which prompts lose their beginning, of which that only warns."""
        ids_BT, mask_BT = super().tok_batch_encode(strings, padding_side, None, truncation)
        if not left_truncate_len:
            return ids_BT, mask_BT
        cut_B = (mask_BT.sum(1) > left_truncate_len).tolist()
        self._prompts |= dict(zip(strings, cut_B, strict=True))
        return ids_BT[:, -left_truncate_len:], mask_BT[:, -left_truncate_len:]

    def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
        return super()._model_generate(*args, **kwargs, logits_processor=[_NotNan()])

    def _fit(self, request: Request) -> Request:
        """Truncates answers longer than the context, which HFLM refuses, to their last tokens."""
        text, context, continuation = request
        over = len(continuation) - self.max_length
        if over <= 0:
            return request
        return text, context + continuation[:over], continuation[over:]
