"""Generation by one step for every token gives what transformers' own loop gives."""

import copy
import functools
import gc
import io
import weakref
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from runs.hf_models import MODELS, stock_model
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, LogitsProcessorList

import sparsellm
from sparsellm.decoding import captured, sample as loop
from sparsellm.decoding.decoder import Decoder, why_no_step
from sparsellm.decoding.sample import use_fast_generation
from sparsellm.ffn.token_order import TrainingOrder

GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 40, "top_p": 0.95}


@pytest.fixture(params=["Llama 3"])
def model(request):
    stock = stock_model(request.param)
    stock.generation_config.eos_token_id = None
    stock.generation_config.pad_token_id = 0
    use_fast_generation(stock)
    return stock


@pytest.fixture
def steps(monkeypatch):
    """The sizes of the batches of all steps."""
    sizes = []
    compute = Decoder.logits

    def logits(self, token_M, *rest):
        sizes.append(len(token_M))
        return compute(self, token_M, *rest)

    monkeypatch.setattr(Decoder, "logits", logits)
    return sizes


def prompts(batch=3, length=9, padding=(4, 0, 1)):
    """Ids, and a mask for padding on the left."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 256, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row, num in enumerate(padding[:batch]):
        mask[row, :num] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate_alike(model, *arguments, **options):
    """The tokens of this loop, which are those of transformers' own."""
    results = []
    for generate in (type(model).generate.__get__(model), model.generate):
        torch.manual_seed(0)
        result = generate(*arguments, **options)
        results.append(result if torch.is_tensor(result) else result.sequences)
    assert torch.equal(results[1], results[0])
    return results[1]


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_every_family_gives_the_same_tokens(model, steps):
    # Past the windows of 20 and 24 positions.
    generate_alike(model, **prompts(), **SAMPLED, max_new_tokens=20)
    assert steps == [3] * 19


def test_up_to_the_end_of_the_context(model, steps):
    tokens = generate_alike(model, **prompts(), **GREEDY, max_new_tokens=64 - 9)
    assert tokens.shape == (3, 64)
    assert steps == [3] * (64 - 9 - 1)


def test_logits_equal_those_of_a_forward_without_a_cache(model):
    inputs = prompts(padding=())
    tokens = inputs["input_ids"]
    sequences = loop.Sequences(model, tokens[:, :4], None, 9)
    with torch.no_grad():
        logits = [sequences.prompt_logits()]
        for at in range(4, 9):
            sequences.append(tokens[:, at])
            logits.append(sequences.step())
        expected = model(tokens).logits[:, 3:]
    torch.testing.assert_close(torch.stack(logits, 1), expected, rtol=1e-4, atol=1e-5)


def test_a_sequence_that_ends_is_padded_and_the_last_one_ends_the_text(model, steps):
    tokens = generate_alike(model, **prompts(), **SAMPLED, max_new_tokens=30)
    ends = [int(tokens[0, 14]), int(tokens[1, 17]), int(tokens[2, 11])]
    tokens = generate_alike(model, **prompts(), **SAMPLED, max_new_tokens=30, eos_token_id=ends)
    assert tokens.shape[1] < 39
    assert (tokens == 0).any()
    assert sum(steps) < 2 * 3 * 29


def test_batches_of_other_sizes_and_one_after_the_other(model, steps):
    for batch in (1, 3, 2):
        generate_alike(model, **prompts(batch), **SAMPLED, max_new_tokens=5)
    assert steps == [1] * 4 + [3] * 4 + [2] * 4


def test_several_sequences_for_each_prompt(model, steps):
    inputs = prompts(2, padding=(1, 0))
    generate_alike(model, **inputs, **SAMPLED, max_new_tokens=4, num_return_sequences=2)
    assert steps == [4] * 3


def test_processors_and_criteria_of_the_caller_are_used(model, steps):
    def never_five(_, scores):
        scores[:, 5] = -torch.inf
        return scores

    options = {
        "repetition_penalty": 1.7,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 3,
        "suppress_tokens": [1, 2, 3],
        "logits_processor": LogitsProcessorList([never_five]),
    }
    generate_alike(model, **prompts(), **GREEDY, **options, max_new_tokens=20)
    tokens = generate_alike(model, **prompts(), **GREEDY, max_new_tokens=20, max_time=1e-9)
    assert tokens.shape[1] == 10
    assert len(steps) == 19


class Pieces:
    """A streamer."""

    def __init__(self):
        self.ids, self.ended = [], 0

    def put(self, ids):
        self.ids.append(ids.tolist())

    def end(self):
        self.ended += 1


def test_tokens_are_streamed_one_by_one(model):
    inputs, streamer = prompts(1), Pieces()
    tokens = model.generate(**inputs, **GREEDY, max_new_tokens=6, streamer=streamer)
    assert streamer.ids == [tokens[:, :9].tolist(), *([i] for i in tokens[0, 9:].tolist())]
    assert streamer.ended == 1


def test_a_generation_config_is_used(model, steps):
    config = GenerationConfig(max_new_tokens=4, do_sample=True, top_k=7, pad_token_id=0)
    inputs = prompts()
    for arguments in ((inputs["input_ids"], config), (inputs["input_ids"],)):
        options = {"attention_mask": inputs["attention_mask"]}
        if len(arguments) == 1:
            options["generation_config"] = config
        generate_alike(model, *arguments, **options)
    assert len(steps) == 6


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"return_dict_in_generate": True},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"prompt_lookup_num_tokens": 2},
    ],
    ids=str,
)
def test_other_loops_are_those_of_transformers(model, steps, options):
    batch = 1 if "prompt_lookup_num_tokens" in options else 3
    generate_alike(model, **prompts(batch), **GREEDY, **options, max_new_tokens=5)
    # The model's own defaults count where a configuration leaves them open.
    model.generation_config.update(**options)
    config = GenerationConfig(max_new_tokens=5, pad_token_id=0)
    generate_alike(model, **prompts(batch), generation_config=config)
    assert steps == []


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_the_cache_has_the_name_of_transformers_before_and_since_5_24(
    model, steps, monkeypatch, name
):
    sample = loop.sample

    def renamed(*arguments, **inputs):
        [old] = inputs.keys() & {"past_key_values", "cache"}
        return sample(*arguments, **{name: inputs.pop(old)}, **inputs)

    monkeypatch.setattr(loop, "sample", renamed)
    model.generate(**prompts(), **GREEDY, max_new_tokens=3)
    assert steps == [3, 3]


def test_inputs_of_a_later_transformers_are_left_to_it_which_is_said_once(
    model, steps, monkeypatch
):
    monkeypatch.setattr(loop, "_EXPECTED", loop._EXPECTED - {"use_cache"})
    loop._say_once.cache_clear()
    with pytest.warns(UserWarning, match="eager loop: sparsellm does not know its inputs use_cac"):
        generate_alike(model, **prompts(), **GREEDY, max_new_tokens=5)
    assert steps == []


def test_a_mask_with_holes_is_left_to_transformers(model, steps):
    inputs = prompts()
    inputs["attention_mask"][1, 4] = 0
    generate_alike(model, **inputs, **GREEDY, max_new_tokens=5)
    assert steps == []


def test_under_autocast_another_type_than_the_models_is_left_to_transformers(model, steps):
    with torch.autocast("cpu", torch.bfloat16):
        generate_alike(model, **prompts(), **GREEDY, max_new_tokens=5)
        assert not steps
        model.bfloat16()
        generate_alike(model, **prompts(), **GREEDY, max_new_tokens=5)
    assert steps == [3] * 4


def test_a_model_that_has_changed_is_left_to_transformers(model, steps):
    layer = model.model.layers[1]
    handle = layer.self_attn.register_forward_hook(lambda *_: None)
    assert "model.layers.1.self_attn: it has hooks" in why_no_step(model)
    generate_alike(model, **prompts(), **GREEDY, max_new_tokens=3)
    handle.remove()
    layer.forward = layer.forward
    assert "model.layers.1: its forward was replaced" in why_no_step(model)
    generate_alike(model, **prompts(), **GREEDY, max_new_tokens=3)
    assert steps == []
    del layer.forward
    generate_alike(model, **prompts(), **GREEDY, max_new_tokens=3)
    assert len(steps) == 2


class ScaledEmbedding(torch.nn.Embedding):
    """As Gemma's."""

    def forward(self, ids):
        return 0.1 - 3 * super().forward(ids)


class Adapted(torch.nn.Module):
    """A layer with a low-rank adapter, as LoRA's: no `nn.Linear`, but it has one."""

    def __init__(self, base):
        super().__init__()
        self.base, self.weight, self.out_features = base, base.weight, base.out_features
        self.down = torch.nn.Linear(base.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def _scale_embedding(model):
    model.model.embed_tokens = ScaledEmbedding(
        *model.model.embed_tokens.weight.shape, _weight=model.model.embed_tokens.weight.data
    )


def _adapt_head(model):
    model.lm_head = Adapted(model.lm_head)


def _adapt(model):
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_scale_embedding, "model: its embed_tokens is ScaledEmbedding"),
        (
            lambda model: model.model.embed_tokens.register_forward_hook(lambda *a: 0.1 - 3 * a[2]),
            "model.embed_tokens: it has hooks",
        ),
        (
            lambda model: model.model.register_forward_hook(lambda *_: None),
            "model: it has hooks",
        ),
        (
            lambda model: model.register_forward_hook(
                lambda *a: a[2].__class__(a[2] | {"logits": -a[2].logits})
            ),
            "LlamaForCausalLM: it has hooks",
        ),
        (_adapt, "model.layers.0.self_attn: its q_proj is Adapted"),
        (_adapt_head, "LlamaForCausalLM: its lm_head is Adapted"),
    ],
)
def test_what_a_step_would_leave_out_is_left_to_transformers(model, steps, change, reason):
    change(model)
    generate_alike(model, **prompts(), **GREEDY, max_new_tokens=5)
    assert steps == []
    assert why_no_step(model) == reason


def test_hooks_that_compute_the_order_of_tokens_leave_steps_to_us():
    model = stock_model("ReLU, tied").bfloat16()
    sparsellm.accelerate(model)
    embedding = model.model.embed_tokens
    TrainingOrder(embedding)  # of training before
    assert len(embedding._forward_hooks) == 2
    assert why_no_step(model) is None


def test_weights_may_change_between_calls(model):
    before = generate_alike(model, **prompts(), **GREEDY, max_new_tokens=5)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.neg_()
    tokens = generate_alike(model, **prompts(), **GREEDY, max_new_tokens=5)
    assert not torch.equal(tokens, before)


def test_a_copy_and_a_saved_model_generate_with_their_own_weights(model, steps):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with torch.no_grad():
            other.model.layers[0].self_attn.v_proj.weight.neg_()
        generate_alike(other, **prompts(), **GREEDY, max_new_tokens=5)
    assert len(steps) == 8


def test_nan_is_an_error_in_sampling(model):
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(RuntimeError, match=r"probability tensor contains either `inf`, `nan`"):
        model.generate(**prompts(), **SAMPLED, max_new_tokens=3)


def test_another_model_keeps_its_own_loop_which_is_said_once():
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=257)).eval()
    loop._say_once.cache_clear()
    with pytest.warns(UserWarning, match="eager loop: GPT2LMHeadModel is none of ArceeForCausal"):
        use_fast_generation(model)
    assert "generate" not in vars(model)


def test_angles_that_depend_on_the_length_are_left_to_transformers(monkeypatch):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    monkeypatch.setitem(MODELS, "dynamic", ("Llama", {"rope_parameters": rope}))
    with pytest.warns(UserWarning, match=r"its RoPE \(dynamic\)"):
        use_fast_generation(stock_model("dynamic"))


@pytest.fixture
def streams(monkeypatch):
    """The streams that a GPU would have; its graphs are ones that cannot be captured."""

    class Graph:
        def capture_begin(self, **_):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    created = []

    def stream(_):
        created.append(SimpleNamespace(wait_stream=lambda _: None))
        return created[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    present = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: present)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: torch.no_grad())
    monkeypatch.setattr(captured, "_IDLE_STREAMS", defaultdict(list))
    captured._say_once.cache_clear()
    return created


def capturing():
    """A `Captured` that takes a CPU for a GPU."""
    captured_call = captured.Captured(torch.device("cpu"))
    captured_call._may_capture = True
    return captured_call


def test_a_capture_that_fails_goes_on_without_it(streams):
    calls = []
    captured_call = capturing()
    step = functools.partial(captured_call, lambda: calls.append(1) or len(calls))
    with pytest.warns(UserWarning, match="without a CUDA graph, more slowly: operation not perm"):
        assert [step(), step(), step()] == [1, 2, 3]
    assert not captured_call.is_graph


def test_two_captures_share_a_stream_one_after_the_other_and_not_at_once(streams):
    """Memory of cuBLAS does not grow with every text."""
    for _ in range(3):
        capturing()(lambda: 1)
    assert len(streams) == 1
    first, second = capturing(), capturing()
    first(lambda: 1)
    second(lambda: 1)
    assert len(streams) == 2
    assert first._stream is not second._stream


def test_memory_is_free_when_the_text_has_ended(model, monkeypatch):
    """Without Python's garbage collector, which may come many calls later."""
    caches = []
    create = Decoder.empty_caches

    def empty_caches(self, *arguments):
        memory = create(self, *arguments)
        caches.extend(weakref.ref(tensor) for layer in memory for tensor in layer)
        return memory

    monkeypatch.setattr(Decoder, "empty_caches", empty_caches)
    gc.collect()
    gc.disable()
    try:
        model.generate(**prompts(), **GREEDY, max_new_tokens=3)
        assert len(caches) > 0
        assert [cache for cache in caches if cache() is not None] == []
    finally:
        gc.enable()
