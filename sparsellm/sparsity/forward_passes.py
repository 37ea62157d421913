"""The FFNs of a model, and what they recorded of its last forward pass."""

from torch import nn

from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.ffn.training_path.recorded import Recorded
from sparsellm.words import listed

_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
# What PEFT's `modules_to_save` calls the frozen original of a module whose copy it trains.
_FROZEN_ORIGINAL = "original_module"


def named_ffns(model: nn.Module) -> dict[str, SparseFFN]:
    """The FFNs by their names in the model as it was before it was wrapped.

    If two would have one name, since a part of the model is called like a wrapper, all have theirs
    in the model as it is.

    Raises:
        ValueError: there are none.
    """
    ffns = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, SparseFFN) and _FROZEN_ORIGINAL not in name.split(".")
    }
    unwrapped = {
        ".".join(part for part in name.split(".") if part not in _WRAPPERS): module
        for name, module in ffns.items()
    }
    if len(unwrapped) == len(ffns):
        ffns = unwrapped
    if not ffns:
        raise ValueError(
            "the model has no SparseFFN: build it with sparsellm.SparseFFN, or call "
            "sparsellm.replace_ffns(model) first, which lists what it cannot replace"
        )
    return ffns


def take_recorded(ffns: dict[str, SparseFFN]) -> list[Recorded]:
    """What each FFN recorded of the last forward pass, which it then forgets.

    Raises:
        RuntimeError: there was no such pass, or not of all FFNs.
        ValueError: they computed different numbers of tokens.
    """
    recorded = [ffn.recorded for ffn in ffns.values()]
    # Forgotten first: an error must not leave the graph of a pass in memory.
    for ffn in ffns.values():
        ffn.recorded = None
    missing = [name for name, r in zip(ffns, recorded, strict=True) if r is None]
    if len(missing) == len(recorded):
        raise RuntimeError(
            "l1_loss() needs a forward pass before it: call it once after each, in training "
            "mode (model.train()) and with gradients; activation checkpointing needs "
            "use_reentrant=False"
        )
    if missing:
        raise RuntimeError(
            f"the FFNs {listed(missing)} took no part in the last forward pass, or were in "
            "evaluation mode; give the controller a part of the model in which all take part"
        )
    passes = [record for record in recorded if record is not None]
    tokens = {name: r.stats.nnz_M.numel() for name, r in zip(ffns, passes, strict=True)}
    fewest, most = min(tokens, key=tokens.__getitem__), max(tokens, key=tokens.__getitem__)
    if tokens[fewest] != tokens[most]:
        raise ValueError(
            f"{most} has computed {tokens[most]:,} tokens and {fewest} {tokens[fewest]:,}: "
            "give parts of the model with different tokens, such as encoder and decoder, a "
            "controller each"
        )
    return passes
