"""``sparsellm generate``: prints text from a checkpoint as it is computed, and its sparsity."""

from __future__ import annotations

import argparse
import codecs
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsellm.arguments import add_model, check_device, positive_int
from sparsellm.waiting import waiting
from sparsellm.words import counted

if TYPE_CHECKING:  # torch and transformers take seconds to import; `sparsellm --help` must not
    from torch import Tensor

    from sparsellm.data.tokenizer import Tokenizer
    from sparsellm.ffn.types import FFNStats
    from sparsellm.model import HFModel
    from sparsellm.runs.huggingface.pretrained import Pretrained

DEFAULT_NEW_TOKENS = 128
HELD_OUT_TOKENS = 64  # of a document that is continued


def add_generate_parser(commands: Any) -> None:
    """Adds ``generate`` to the ``sparsellm`` command."""
    parser = commands.add_parser(
        "generate",
        help="generate text from a checkpoint, and count its non-zeros per token",
        description="Continues a prompt, which the model sees as the beginning of a document. The "
        "text goes to stdout; the non-zeros per token and the throughput go to stderr.",
    )
    add_model(parser, "source")
    prompt = parser.add_mutually_exclusive_group()
    text = "text to continue (default: the beginning of a held-out document)"
    prompt.add_argument("--prompt", help=text)
    text = "continue each line of stdin independently, until stdin ends (Ctrl-D)"
    prompt.add_argument("--interactive", action="store_true", help=text)
    text = (
        "continue the first document of these text files (default: held-out text of the "
        "recipe's corpus)"
    )
    prompt.add_argument("--data", nargs="+", metavar="GLOB", help=text)
    text = f"at most N new tokens (default: {DEFAULT_NEW_TOKENS}, or fewer if the context is full)"
    parser.add_argument("--max-new-tokens", type=positive_int, metavar="N", help=text)
    text = "sampling temperature; 0 always takes the likeliest token (default: 0.8)"
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help=text)
    text = "sample among the K likeliest tokens; 0 keeps all (default: 50)"
    parser.add_argument("--top-k", type=int, default=50, metavar="K", help=text)
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    text = "model: its own dtype; fp8: faster on an Ada, Hopper or newer GPU (default: model)"
    parser.add_argument("--precision", choices=("model", "fp8"), default="model", help=text)
    parser.add_argument("--device", help="such as cpu or cuda:1 (default: a GPU if there is one)")
    parser.set_defaults(run=_generate)


def _generate(options: argparse.Namespace) -> None:
    sampling = Sampling(options.temperature, options.top_k, options.seed)
    check_device(options.device)
    with waiting("loading PyTorch and the checkpoint"):
        from sparsellm.runs.huggingface.find import find_checkpoint

        find_checkpoint(options.source)  # raises before torch is loaded
        from sparsellm.device import default_dtype, pick_device
        from sparsellm.runs.huggingface.pretrained import load_pretrained, make_fast

        device = pick_device(options.device)
        pretrained = load_pretrained(options.source, device, default_dtype(device))
        make_fast(pretrained.model, options.precision)

    length, width = options.max_new_tokens, pretrained.recipe.model.intermediate_size

    def answer(prompt: str, *, echo: bool) -> None:
        report = generate(pretrained, prompt, show, length, sampling, echo=echo)
        show("\n")
        print(report.line(width), file=sys.stderr)

    if not options.interactive:
        text = options.prompt
        answer(_held_out(pretrained, options.data) if text is None else text, echo=True)
        return
    for line in _lines():
        try:
            answer(line, echo=False)
        except ValueError as error:  # such as a line longer than the context
            print(f"error: {error}", file=sys.stderr)


def show(text: str) -> None:
    """Writes a piece of text to stdout, at once."""
    print(text, end="", flush=True)


def _lines() -> Iterator[str]:
    """Lines of stdin that are not empty."""
    sign = "> " if sys.stdin.isatty() else ""
    with suppress(EOFError):
        while True:
            if line := input(sign):
                yield line


def _held_out(pretrained: Pretrained, files: list[str] | None) -> str:
    """The beginning of the first held-out document."""
    from sparsellm.analyze.activity import held_out_corpora
    from sparsellm.data.held_out import read_in_order

    corpus = held_out_corpora(pretrained.recipe, files)[0]
    for document in read_in_order(corpus.validation, pretrained.tokenizer):
        most = min(HELD_OUT_TOKENS, len(document) // 2, pretrained.recipe.model.context_length // 2)
        # A token may end inside a character.
        text = pretrained.tokenizer.decode_bytes(document[:most].tolist()).decode("utf-8", "ignore")
        if text:
            return text
    raise ValueError(f"corpus {corpus.name} has no held-out document; give --prompt TEXT")


# Below it the likeliest token is as good as certain, and logits divided by it overflow in fp32.
_GREEDY = 1e-6


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.8  # 0 takes the likeliest
    top_k: int = 50  # 0 keeps every token
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf or self.top_k < 0:
            raise ValueError(
                f"--temperature {self.temperature:g} must be finite, and neither it nor --top-k "
                f"{self.top_k} may be negative"
            )
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"--seed {self.seed} must be from 0 to 2**64 - 1")

    def arguments(self) -> dict[str, Any]:
        """For `transformers`' generate."""
        if self.temperature < _GREEDY:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k}


@dataclass(frozen=True)
class Report:
    """How much text was generated, how fast, and how many neurons were active."""

    num_tokens: int  # new ones, <|endoftext|> included
    first_seconds: float  # until the first of them: the prompt's pass
    other_seconds: float  # for all others
    counted_tokens: int  # prompt and new tokens that went through the model
    nnz_L: list[float]  # each layer's mean non-zeros per counted token

    def line(self, intermediate_size: int) -> str:
        """One line of text."""
        nnz = sum(self.nnz_L) / len(self.nnz_L)
        num_other = self.num_tokens - 1
        speed = f"{num_other / self.other_seconds:.1f} tok/s after " if num_other else ""
        return (
            f"{counted(self.num_tokens, 'token')}, {speed}the first "
            f"({self.first_seconds:.2f} s) | nnz {nnz:.1f} of {intermediate_size:,} "
            f"({nnz / intermediate_size:.2%}) per token, mean over {len(self.nnz_L)} layers and "
            f"{self.counted_tokens} tokens (prompt and new)"
        )


def generate(
    pretrained: Pretrained,
    prompt: str,
    write: Callable[[str], None],
    max_new_tokens: int | None = None,
    sampling: Sampling | None = None,
    *,
    echo: bool = False,
) -> Report:
    """Continues ``prompt`` with a KV cache; calls ``write`` with each new piece of text.

    With ``echo`` it calls ``write`` with the prompt first.

    The prompt follows an ``<|endoftext|>``, as every document does in training; that of a model
    which was not trained here, what its tokenizer puts before a text, if anything; special tokens
    that are spelt in it are then not ordinary text. Generation ends at
    ``<|endoftext|>`` or another token that the model's own folder names, or after
    ``max_new_tokens`` (default: 128, or what is left of the context).

    Raises:
        ValueError: the prompt and ``max_new_tokens`` do not fit the context.
    """
    import torch

    model, tokenizer = pretrained.model, pretrained.tokenizer
    sampling = sampling or Sampling()
    tokens_1T = torch.tensor([pretrained.prompt_ids(prompt)], device=model.device)
    context = pretrained.recipe.model.max_position_embeddings
    limit = _limit(tokens_1T.shape[1], max_new_tokens, context)
    if echo:
        write(prompt)
    eos = model.generation_config.eos_token_id
    ends = {tokenizer.eot_id, *(eos if isinstance(eos, list) else [eos])}
    streamer = _Streamer(tokenizer, write, ends)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), _options_alone(model):
        torch.manual_seed(sampling.seed)
        generated_1T = model.generate(
            tokens_1T,
            attention_mask=torch.ones_like(tokens_1T),
            max_new_tokens=limit,
            streamer=streamer,
            **sampling.arguments(),
        )
    # One pass over all tokens that the model has processed: the kernels of a step do not count.
    with count_non_zeros(model) as counts, torch.no_grad():
        model(generated_1T[:, :-1], use_cache=False, logits_to_keep=1)
    first, last = streamer.times[0], streamer.times[-1]
    return Report(
        num_tokens=len(streamer.times),
        first_seconds=first - streamer.began,
        other_seconds=last - first,
        counted_tokens=counts.tokens,
        nnz_L=[int(nnz) / counts.tokens for nnz in counts.nnz_L],
    )


@contextmanager
def _options_alone(model: HFModel) -> Iterator[None]:
    """Within this context the model has no defaults of sampling, such as a penalty of repetitions,
    which would be added to the arguments of its ``generate``."""
    from transformers import GenerationConfig

    defaults = model.generation_config
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "suppress_tokens")
    model.generation_config = GenerationConfig(**{name: getattr(defaults, name) for name in names})
    try:
        yield
    finally:
        model.generation_config = defaults


@dataclass
class NonZeros:
    """Sums of non-zeros over the tokens that the model has processed."""

    nnz_L: list[Tensor]  # () int64 each, left on the device
    tokens: int = 0


@contextmanager
def count_non_zeros(model: HFModel) -> Iterator[NonZeros]:
    """Within this context, every forward of the model adds its FFNs' non-zeros."""
    import torch

    layers = model.model.layers
    zero = torch.zeros((), dtype=torch.int64, device=model.device)
    counts = NonZeros([zero.clone() for _ in layers])

    def ask(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {"return_stats": True}

    def counting(index: int) -> Callable[..., Tensor]:
        def count(_: Any, args: Any, output: tuple[Tensor, FFNStats]) -> Tensor:
            out, stats = output
            counts.nnz_L[index] += stats.nnz_M.sum()
            counts.tokens += stats.nnz_M.numel() if index == 0 else 0
            return out

        return count

    with ExitStack() as hooks:
        for index, layer in enumerate(layers):
            hooks.enter_context(layer.register_forward_pre_hook(ask, with_kwargs=True))
            hooks.enter_context(layer.register_forward_hook(counting(index)))
        yield counts


class _Streamer:
    """Receives ids from transformers' generate and writes text up to the last whole character."""

    def __init__(
        self, tokenizer: Tokenizer, write: Callable[[str], None], ends: Collection[int]
    ) -> None:
        self._tokenizer, self._write, self._ends = tokenizer, write, ends
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._before: list[int] | None = None  # the last id, on whose text that of the next depends
        self.began = time.perf_counter()
        self.times: list[float] = []  # when each new token was known

    def put(self, ids: Tensor) -> None:
        """Called with the prompt's ids first (the caller writes those), then with each new id."""
        last = [i for i in ids.flatten().tolist() if i not in self._ends][-1:]
        if self._before is not None:
            self.times.append(time.perf_counter())
            before = self._tokenizer.decode_bytes(self._before)
            two_tokens = self._tokenizer.decode_bytes(self._before + last)
            self._emit(self._decoder.decode(two_tokens[len(before) :]))
        self._before = last

    def end(self) -> None:
        """Writes the rest: a character that the last token did not complete."""
        self._emit(self._decoder.decode(b"", final=True))

    def _emit(self, text: str) -> None:
        if text:
            self._write(text)


def _limit(num_prompt: int, max_new_tokens: int | None, context: int) -> int:
    left = context - num_prompt
    num_new = min(DEFAULT_NEW_TOKENS, left) if max_new_tokens is None else max_new_tokens
    prompt = (
        f"the prompt has {num_prompt} tokens (including what every text begins with) and leaves"
    )
    if left < 1:
        raise ValueError(f"{prompt} none of the context's {context} tokens; shorten the prompt")
    if not 0 < num_new <= left:
        raise ValueError(
            f"{prompt} {left} of the context's {context} tokens, but --max-new-tokens is "
            f"{num_new}; shorten the prompt or lower --max-new-tokens"
        )
    return num_new
