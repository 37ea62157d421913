"""The loop of ``model.generate`` for greedy and sampled text, with a step that a GPU replays.

transformers prepares everything, such as logits processors, stopping criteria and the streamer;
this takes the place of its own loop, and gives the same tokens.

Shapes: M sequences; T tokens of the prompts; V vocabulary.
"""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel as HFModel

from sparsellm.decoding.captured import Captured
from sparsellm.decoding.decoder import Decoder, why_no_step
from sparsellm.decoding.kv_cache import Positions
from sparsellm.decoding.prompt import Prompt

# transformers' names of its cache, until 5.23 and since.
_CACHE = ("past_key_values", "cache")
# Options of generate that ask for another loop than greedy decoding and sampling, for more than the
# tokens, or for another start than a prompt.
_OTHER_LOOPS = (
    *("custom_generate", "assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit"),
    *("penalty_alpha", "dola_layers", "constraints", "force_words_ids", "negative_prompt_ids"),
    *("return_dict_in_generate", "synced_gpus", "cache_implementation", "prefill_chunk_size"),
    *(*_CACHE, "position_ids", "inputs_embeds", "stop_strings", "tokenizer"),
)
# What transformers hands to a loop.
_EXPECTED = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", *_CACHE}


def use_fast_generation(model: HFModel) -> None:
    """Makes ``model.generate`` decode by `Decoder` wherever it can; else it is transformers' own.

    A model that cannot is left as it is; why is said once.
    """
    if reason := why_no_step(model):
        _say_once(reason)
        return
    # Not a bound method, which `torch.save` writes as an attribute of the model's class.
    vars(model)["generate"] = functools.partial(generate, model)


@functools.cache
def _say_once(reason: str) -> None:
    warnings.warn(f"generation runs transformers' eager loop: {reason}", stacklevel=4)


def generate(model: HFModel, *arguments: Any, **options: Any) -> Any:
    """transformers' ``generate``; greedy decoding and sampling by `sample`."""
    generate = type(model).generate
    config = arguments[1] if len(arguments) > 1 else options.get("generation_config")
    # transformers takes what a given configuration leaves open from that of the model.
    configs = (config or model.generation_config, model.generation_config)

    def option(name: str) -> Any:
        values = (options.get(name), *(getattr(each, name, None) for each in configs))
        return next((value for value in values if value is not None), None)

    other = any(option(name) is not None and option(name) is not False for name in _OTHER_LOOPS)
    other = other or (option("num_beams") or 1) > 1 or option("use_cache") is False
    if other or len(arguments) > 2 or _is_cast(model) or why_no_step(model):
        return generate(model, *arguments, **options)
    # Some versions of transformers do not hand the streamer on to a loop that is not theirs.
    loop = functools.partial(sample, streamer=options.get("streamer"))
    return generate(model, *arguments, custom_generate=loop, **options)


def _is_cast(model: HFModel) -> bool:
    """Whether autocast computes in another type than that of the weights, and of our cache."""
    device = model.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != model.dtype


def sample(
    model: Any,
    input_ids: Tensor,
    *,
    logits_processor: Callable[[Tensor, Tensor], Tensor],
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    **inputs: Any,
) -> Tensor:
    """Tokens after ``input_ids``, as transformers' own loop of the same arguments returns them."""
    mask_MT, most = inputs.get("attention_mask"), stopping_criteria.max_length
    if mask_MT is not None and mask_MT.all():
        mask_MT = None  # there is no padding
    unexpected = set(inputs) - _EXPECTED
    if unexpected:
        _say_once(f"sparsellm does not know its inputs {', '.join(sorted(unexpected))}")
    # What this loop does not know, transformers' own does.
    if unexpected or most is None or not _is_left_padded(mask_MT):
        options = {"streamer": streamer, **inputs}
        tokens: Tensor = type(model)._sample(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            **options,
        )
        return tokens
    input_ids = input_ids.to(model.device)
    sequences = Sequences(model, input_ids, mask_MT, most)
    draws = _Draws(generation_config, stopping_criteria, logits_processor)
    reports = _Reports(input_ids, streamer)
    logits_MV = sequences.prompt_logits()
    while True:
        reports.remember_generator(draws.samples)
        token_M, probability = draws.next_tokens(sequences.token_MT, logits_MV)
        sequences.append(token_M)
        unfinished_M = draws.unfinished(sequences.token_MT)
        # On a GPU this is the end of one step ago, so that the host is a step ahead.
        length = reports.add(token_M, unfinished_M, probability, sequences.length)
        if length is not None or sequences.length >= most:
            break
        logits_MV = sequences.step()
    return sequences.tokens(reports.end(length))


def _is_left_padded(mask_MT: Tensor | None) -> bool:
    """Whether each sequence of a mask is padding and then text."""
    if mask_MT is None:
        return True
    is_text = mask_MT.bool()
    return bool(is_text[:, -1:].all() & (is_text[:, 1:] | ~is_text[:, :-1]).all())


class Sequences:
    """Tokens of all sequences, and what the model keeps of them."""

    def __init__(self, model: Any, prompt_MT: Tensor, mask_MT: Tensor | None, most: int) -> None:
        m, self.length = prompt_MT.shape
        self._decoder = Decoder(model)
        self._token_MT = prompt_MT.new_empty(m, most)
        self._token_MT[:, : self.length] = prompt_MT
        self._last_M = prompt_MT[:, -1].clone()
        self._is_padded = mask_MT is not None
        if mask_MT is None:
            text_M = prompt_MT.new_full((m,), self.length)
        else:
            text_M = mask_MT.to(prompt_MT.device, torch.long).sum(1)
        self._caches = self._decoder.empty_caches(m, most)
        rotary = self._decoder.rotary(most)
        self._at = Positions(text_M, self.length - text_M, self.length, rotary)
        self._captured: Captured[Tensor] = Captured(prompt_MT.device)

    @property
    def token_MT(self) -> Tensor:
        """All tokens up to now."""
        return self._token_MT[:, : self.length]

    def prompt_logits(self) -> Tensor:
        """(M, V) for the first new tokens."""
        prompt = Prompt(self.token_MT.shape, self._at, is_padded=self._is_padded)
        return self._decoder.prompt_logits(self.token_MT, self._caches, prompt)

    def append(self, token_M: Tensor) -> None:
        """Adds a token to every sequence."""
        self._token_MT[:, self.length] = token_M
        self._last_M.copy_(token_M)
        self.length += 1

    def step(self) -> Tensor:
        """(M, V) for the tokens after the last ones."""
        return self._captured(self._compute)

    def _compute(self) -> Tensor:
        logits_MV = self._decoder.logits(self._last_M, self._caches, self._at)
        self._at.advance()
        return logits_MV

    def tokens(self, length: int | None) -> Tensor:
        """The first tokens, or all of them."""
        return self._token_MT[:, : length or self.length].clone()


class _Draws:
    """How the next token is chosen, and when a sequence has ended."""

    def __init__(self, config: Any, criteria: Any, processor: Callable[..., Tensor]) -> None:
        self.samples: bool = config.do_sample
        self._criteria, self._processor = criteria, processor
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self._pad = config._pad_token_tensor
        self._unfinished_M: Tensor | None = None

    def next_tokens(self, token_MT: Tensor, logits_MV: Tensor) -> tuple[Tensor, Tensor | None]:
        """The tokens, and a sum of probabilities that is NaN where they are."""
        scores_MV = self._processor(token_MT, logits_MV.to(torch.float32, copy=True))
        probability = None
        if self.samples:
            # As `torch.multinomial` draws, which waits for the GPU to check the probabilities.
            chance_MV = scores_MV.softmax(-1)
            probability = chance_MV.sum()
            token_M = (chance_MV / torch.empty_like(chance_MV).exponential_(1)).argmax(-1)
        else:
            token_M = scores_MV.argmax(-1)
        if self._pads and self._unfinished_M is not None:
            token_M = torch.where(self._unfinished_M, token_M, self._pad.to(token_M.device))
        return token_M, probability

    def unfinished(self, token_MT: Tensor) -> Tensor:
        """(M,) bool: the sequences that go on."""
        unfinished_M = ~self._criteria(token_MT, None)
        if self._unfinished_M is not None:
            unfinished_M &= self._unfinished_M
        self._unfinished_M = unfinished_M
        return unfinished_M


class _Report(NamedTuple):
    """What the host reads of a step."""

    token_M: Tensor
    goes_on: Tensor  # () bool
    probability: Tensor  # () fp32
    arrived: torch.cuda.Event | None

    @classmethod
    def empty(cls, like_M: Tensor) -> "_Report":
        """Pinned memory for a GPU to write to."""
        pinned = like_M.is_cuda
        return cls(
            torch.empty(like_M.shape, dtype=like_M.dtype, pin_memory=pinned),
            torch.empty((), dtype=torch.bool, pin_memory=pinned),
            torch.ones((), dtype=torch.float32, pin_memory=pinned),
            torch.cuda.Event() if pinned else None,
        )


class _Reports:
    """Hands tokens to the streamer and finds the end, on a GPU one step late.

    So the host queues a step while the GPU computes the one before. The step after the end is
    computed in vain, and leaves no trace: the generator gets its state back. Only the first token
    is streamed at once: queueing the first step, which is no graph yet, takes milliseconds.
    """

    def __init__(self, like_MT: Tensor, streamer: Any) -> None:
        self._device, self._streamer = like_MT.device, streamer
        self._memory = [_Report.empty(like_MT[:, 0]) for _ in range(2)]
        self._pending: tuple[_Report, int] | None = None
        self._waits_for_first = streamer is not None
        self._generator: Tensor | None = None

    def remember_generator(self, samples: bool) -> None:
        """Called before tokens are drawn."""
        if samples and self._device.type == "cuda":
            self._generator = torch.cuda.get_rng_state(self._device)

    def add(
        self, token_M: Tensor, unfinished_M: Tensor, probability: Tensor | None, length: int
    ) -> int | None:
        """Reports a step; returns the length of the text if it has ended, as far as is known."""
        earlier, report = self._pending, self._memory[length % 2]
        report.token_M.copy_(token_M, non_blocking=True)
        report.goes_on.copy_(unfinished_M.any(), non_blocking=True)
        if probability is not None:
            report.probability.copy_(probability, non_blocking=True)
        self._pending = report, length
        if report.arrived is not None:
            report.arrived.record(torch.cuda.current_stream(self._device))
        if report.arrived is None or self._waits_for_first:
            self._waits_for_first = False
            return None if self._read() else length
        if earlier is None:
            return None
        self._pending = earlier
        if not self._read():
            if self._generator is not None:
                torch.cuda.set_rng_state(self._generator, self._device)
            return earlier[1]
        self._pending = report, length
        return None

    def _read(self) -> bool:
        """Waits for the pending step; returns whether any sequence goes on."""
        assert self._pending is not None
        report, _ = self._pending
        self._pending = None
        if report.arrived is not None:
            report.arrived.synchronize()
        if not math.isfinite(report.probability.item()):
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        if self._streamer is not None:
            self._streamer.put(report.token_M.clone())
        return bool(report.goes_on)

    def end(self, length: int | None) -> int | None:
        """Streams what is still to come."""
        if self._pending is not None:
            self._read()
        if self._streamer is not None:
            self._streamer.end()
        return length
