"""Generation: the same tokens as without a cache, whole characters, counted non-zeros."""

import dataclasses
import io
import itertools
import re

import pytest
import torch
from conftest import checkpoint_of, save_run
from runs.hf_models import write_chat_model
from tokenizers import Tokenizer, models, processors
from transformers import AutoTokenizer

from sparsellm.data.held_out import read_in_order
from sparsellm.data.text.corpus import load_corpus
from sparsellm.data.tokenizer import load_tokenizer
from sparsellm.generate import Sampling, _Streamer, count_non_zeros, generate
from sparsellm.processes.signals import StopRequest
from sparsellm.runs.huggingface.pretrained import load_pretrained
from sparsellm.training.step import train_step

GREEDY = Sampling(temperature=0)


@pytest.fixture
def checkpoint_path(tiny):
    return checkpoint_of(tiny("optimizer.warmup_steps=0", "optimizer.learning_rate=0.01"), steps=4)


@pytest.fixture
def pretrained(checkpoint_path):
    return load_pretrained(checkpoint_path)


def _generate(pretrained, *arguments, **options):
    pieces = []
    report = generate(pretrained, *arguments, write=pieces.append, **options)
    return "".join(pieces), report


@torch.no_grad()
def _without_cache(pretrained, prompt, count):
    """Greedy tokens and the non-zeros of all that went through the model, in one pass each."""
    tokenizer = pretrained.tokenizer
    ids = [tokenizer.eot_id, *tokenizer.encode_batch([prompt])[0].tolist()]
    for _ in range(count):
        with count_non_zeros(pretrained.model) as counts:
            logits = pretrained.model(torch.tensor([ids])).logits[0, -1, : tokenizer.vocab_size]
        ids.append(int(logits.argmax()))
        if ids[-1] == tokenizer.eot_id:
            break
    return ids, [int(nnz) / counts.tokens for nnz in counts.nnz_L], counts.tokens


def test_greedy_text_and_non_zeros_equal_full_passes(pretrained):
    text, report = _generate(pretrained, "def f", max_new_tokens=12, sampling=GREEDY)
    ids, nnz_L, tokens = _without_cache(pretrained, "def f", 12)
    new = [i for i in ids[6:] if i != 256]
    assert text == pretrained.tokenizer.decode(new)
    assert report.num_tokens == len(ids) - 6
    # The cache saves passes: each token went through the model once, the last one not at all.
    assert report.counted_tokens == tokens == len(ids) - 1
    assert report.nnz_L == pytest.approx(nnz_L, abs=0.5)
    assert re.match(r"\d+ tokens, [\d.]+ tok/s after the first \([\d.]+ s\) \|", report.line(64))
    _, report = _generate(pretrained, "def f", max_new_tokens=1, sampling=GREEDY)
    assert re.match(r"1 token, the first \([\d.]+ s\) \|", report.line(64))


def test_counting_ends_with_its_block(pretrained):
    model = pretrained.model
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        with count_non_zeros(model) as counts:
            assert torch.equal(model(tokens).logits, expected)
        before = [int(nnz) for nnz in counts.nnz_L]
        model(tokens)
    assert counts.tokens == 8
    assert [int(nnz) for nnz in counts.nnz_L] == before
    assert all("forward" not in vars(layer) for layer in model.model.layers)


def test_the_seed_decides_and_the_callers_state_stays(pretrained):
    hot = {"max_new_tokens": 20}
    state = torch.get_rng_state()
    first, _ = _generate(pretrained, "x", sampling=Sampling(2.0, 0, seed=1), **hot)
    assert torch.equal(torch.get_rng_state(), state)
    again, _ = _generate(pretrained, "x", sampling=Sampling(2.0, 0, seed=1), **hot)
    other, _ = _generate(pretrained, "x", sampling=Sampling(2.0, 0, seed=2), **hot)
    assert first == again != other
    one, _ = _generate(pretrained, "x", sampling=Sampling(2.0, 1), **hot)
    greedy, _ = _generate(pretrained, "x", sampling=GREEDY, **hot)
    assert one == greedy


def test_stops_at_end_of_text_and_does_not_print_it(pretrained):
    with torch.no_grad():  # its row of the tied embedding now outbids every other
        hidden = pretrained.model.model(torch.tensor([[256]])).last_hidden_state[0, -1]
        pretrained.model.lm_head.weight[256] = 100 * hidden
    text, report = _generate(pretrained, "", max_new_tokens=9, sampling=GREEDY)
    assert (text, report.num_tokens) == ("", 1) or report.num_tokens < 9
    assert "endoftext" not in text


def test_ids_beyond_the_vocabulary_are_never_chosen(pretrained):
    with torch.no_grad():
        pretrained.model.lm_head.weight[257:] *= 1000
    _, report = _generate(pretrained, "a", max_new_tokens=20, sampling=Sampling(5.0, 0))
    assert report.num_tokens >= 1  # decoding such an id would raise


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_characters_come_whole(name, request):
    if name == "gpt2":
        request.getfixturevalue("gpt2_cache")
    tokenizer = load_tokenizer(name)
    text = "naïve 日本語 🙂👩‍👩‍👧 \ufffd end"
    (ids,) = tokenizer.encode_batch([text])
    pieces = []
    streamer = _Streamer(tokenizer, pieces.append, [tokenizer.eot_id])
    streamer.put(torch.tensor([[tokenizer.eot_id]]))  # the prompt
    for token in ids.tolist():
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert "".join(pieces) == text
    for piece, rest in itertools.pairwise([*pieces, ""]):
        piece.encode("utf-8")
        rest.encode("utf-8")
    assert sum(piece.count("\ufffd") for piece in pieces) == 1  # the one that was meant


def test_half_a_character_at_the_end_is_marked(pretrained):
    pieces = []
    streamer = _Streamer(pretrained.tokenizer, pieces.append, [])
    streamer.put(torch.tensor([[256]]))
    for token in (0x61, 0xE6, 0x97):
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert "".join(pieces) == "a\ufffd"


def test_default_length_is_what_the_context_leaves(pretrained):
    _, report = _generate(pretrained, "abc", sampling=GREEDY)
    assert report.num_tokens <= 28
    with pytest.raises(ValueError, match=r"4 tokens .* leaves 28 of the context's 32.* is 29"):
        _generate(pretrained, "abc", max_new_tokens=29)
    for most in (None, 5):
        with pytest.raises(ValueError, match=r"leaves none of the context's 32 .*; shorten the p"):
            _generate(pretrained, "a" * 40, max_new_tokens=most)


def test_a_temperature_by_which_logits_overflow_takes_the_likeliest(pretrained):
    greedy, nearly = (_generate(pretrained, "abc", sampling=Sampling(t)) for t in (0, 1e-320))
    assert nearly[0] == greedy[0]


def test_command(checkpoint_path, cli_here):
    arguments = ["generate", str(checkpoint_path), "--prompt", "im", "--max-new-tokens", "5"]
    done = cli_here(*arguments, "--temperature", "0", "--device", "cpu")
    assert done.stdout.startswith("im")
    assert done.stdout.endswith("\n")
    assert " of 64 (" in done.stderr
    assert "tok/s" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "nonsense"], "--device nonsense: "),
        (["--temperature", "inf"], "--temperature inf must be finite"),
        (["--temperature", "nan"], "--temperature nan must be finite"),
        (["--seed", str(2**64)], f"--seed {2**64} must be from 0 to"),
        (["--max-new-tokens", "32"], "--max-new-tokens is 32"),
        (["--precision", "fp8", "--device", "cpu"], "precision fp8 needs a GPU"),
    ],
)
def test_mistakes(checkpoint_path, cli_here, arguments, message):
    done = cli_here("generate", checkpoint_path, "--prompt", "a", *arguments, status=1)
    (error,) = done.stderr.splitlines()
    assert done.stdout == ""
    assert message in error
    assert error.startswith("error: ")


def test_weights_that_are_not_finite_are_refused_by_name(build, error_of):
    run = build()
    train_step(run, StopRequest())
    with torch.no_grad():
        run.model.model.norm.weight[3] = torch.nan
    path = save_run(run)
    error = error_of("generate", path, "--prompt", "a")
    assert f"{path}/model.safetensors: model.norm.weight has NaN or infinite values" in error


def test_without_a_prompt_a_held_out_document_is_continued(
    checkpoint_path, pretrained, tmp_path, cli_here
):
    document = next(read_in_order(load_corpus("sample").validation, pretrained.tokenizer))
    (tmp_path / "text.jsonl").write_text('{"text": ""}\n{"text": "héllo wo€ld, it is"}\n')
    arguments = ["generate", str(checkpoint_path), "--max-new-tokens", "2", "--temperature", "0"]
    assert cli_here(*arguments).stdout.startswith(
        pretrained.tokenizer.decode(document[:16].tolist())
    )
    text = cli_here(*arguments, "--data", tmp_path / "text.jsonl").stdout
    assert text.startswith("héllo wo")
    assert "\ufffd" not in text[:9]


def test_interactive_continues_each_line(checkpoint_path, pretrained, cli_here, monkeypatch):
    lines = ["def f", "", "a" * 40, "im"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    arguments = ["generate", str(checkpoint_path), "--interactive", "--max-new-tokens", "3"]
    done = cli_here(*arguments, "--temperature", "0")
    expected = [
        _generate(pretrained, line, max_new_tokens=3, sampling=GREEDY)[0]
        for line in ("def f", "im")
    ]
    assert done.stdout == "".join(f"{text}\n" for text in expected)
    assert "error: the prompt has 41 tokens" in done.stderr
    assert done.stderr.count("tok/s") == 2


def test_a_text_begins_as_in_the_models_training(pretrained, tmp_path):
    """Training here has put the end-of-document token before a text, others what their tokenizer
    does; what that puts after a text is no beginning."""
    hf_tokenizer = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "a": 2}, []))
    hf_tokenizer.add_special_tokens(["<s>", "</s>"])
    templates = {None: [], "<s> $A": [0], "$A </s>": [], "<s> <s> $A </s>": [0, 0]}
    for number, (template, begin) in enumerate(templates.items()):
        if template:
            hf_tokenizer.post_processor = processors.TemplateProcessing(
                single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
            )
        folder = tmp_path / str(number)
        folder.mkdir()
        hf_tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        tokenizer = load_tokenizer(f"hf:{folder}")
        assert tokenizer.encode_batch(["aa"])[0].tolist() == [2, 2]
        ours = dataclasses.replace(pretrained, tokenizer=tokenizer)
        data = ours.recipe.data.model_copy(update={"tokenizer": tokenizer.name})
        recipe = ours.recipe.model_copy(update={"data": data})
        theirs = dataclasses.replace(ours, recipe=recipe, trainer=ours.trainer | {"step": 0})
        for model, ids in ((ours, [1]), (theirs, begin)):
            assert _first_input(model) == [[*ids, 2, 2]]
        assert theirs.prompt_ids("") == (begin or [1])


def test_a_model_from_elsewhere_is_sampled_as_the_options_say(tmp_path):
    """Its own penalty of repetitions and top-p stay out; it ends at each of its end tokens, which
    are not printed."""
    theirs = load_pretrained(write_chat_model(tmp_path / "theirs"))
    assert theirs.model.generation_config.repetition_penalty == 1.1
    text, report = _generate(theirs, "In 2024", max_new_tokens=40, sampling=GREEDY)
    ids = [0, *theirs.tokenizer.encode_batch(["In 2024"])[0].tolist()]
    begin = len(ids)
    for _ in range(report.num_tokens):
        with torch.no_grad():
            logits_V = theirs.model(torch.tensor([ids])).logits[0, -1]
            ids.append(int(logits_V[: theirs.tokenizer.vocab_size].argmax()))
    new = theirs.tokenizer.decode_bytes([i for i in ids[begin:] if i not in (1, 2)])
    assert text == new.decode("utf-8", "replace")
    assert theirs.model.generation_config.repetition_penalty == 1.1
    with torch.no_grad():
        theirs.model.lm_head.weight.zero_()
        theirs.model.model.norm.weight.zero_()  # all logits are equal: the first id but 0 and 1
    theirs.model.generation_config.suppress_tokens = [0, 1]
    assert _generate(theirs, "In", max_new_tokens=9, sampling=GREEDY)[0] == ""


def test_special_tokens_in_a_prompt_are_found_as_the_model_has_learnt_them(tmp_path, pretrained):
    folder = write_chat_model(tmp_path / "theirs")
    prompt = "<|im_end|>In<eos>"
    theirs = load_pretrained(folder)
    assert theirs.prompt_ids(prompt) == AutoTokenizer.from_pretrained(folder)(prompt).input_ids
    assert pretrained.prompt_ids("<|endoftext|>") == [256, *b"<|endoftext|>"]  # text in training


def _first_input(model):
    inputs = []
    hook = model.model.model.embed_tokens.register_forward_pre_hook(
        lambda _, args: inputs.append(args[0].tolist())
    )
    _generate(model, "aa", max_new_tokens=1, sampling=GREEDY)
    hook.remove()
    return inputs[0]
