"""Build the pair of a checkpoint: its model in transformers and in jax_attn.models."""

import copy
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from jax_attn.bench.arrays import SEED
from jax_attn.bench.pair.pair import Cached, TimedPair
from jax_attn.environment import install_line, version
from jax_attn.models.inputs import longest
from jax_attn.parity.judge.result import Result
from jax_attn.parity.pair.errors import PairError
from jax_attn.porting.verify.model_pair import logits_of
from jax_attn.transfer import TransferError
from jax_attn.transfer.files.port_folder import read_config

LENGTH = 128
"""The number of tokens, unless lengths are given."""


def pair_of_checkpoint(path: Path, lengths: tuple[int, ...]) -> TimedPair:
    """Return the two models on one row of tokens, with the float32 check of `jax-attn verify`.

    torch is timed with `scaled_dot_product_attention`, if transformers supports it for the model;
    the check restores the attention implementation that `jax-attn verify` runs.

    Raises PairError if transformers is not installed, the model is unknown, or a length is too
    large.
    """
    if version("transformers") is None:
        raise PairError(f"a checkpoint's reference is transformers: {install_line('hf')}")
    from jax_attn.porting.verify.source_pair import pair_of

    config = read_config(path)
    if config is None:
        raise PairError(f"{path}: expected a config.json beside the tensors, got none")
    try:
        models = pair_of(path, config, "float32")
    except TransferError as error:
        raise PairError(str(error)) from error
    if models.traits.decoder:
        raise PairError(f"{path}: expected a model of one stack, got an encoder-decoder")
    reference: Any = models.reference
    written_out = reference.config._attn_implementation

    def check() -> Result:
        reference.set_attn_implementation(written_out)
        return models.check()

    _prefer_sdpa(reference)
    embedding = models.traits.embedding
    positions, reserved = embedding.positions, int(models.has_cache)
    most = None if positions is None else longest(positions) - reserved
    lengths = lengths or (min(LENGTH, most or LENGTH),)
    if most is not None and max(lengths) > most:
        why = " and one more for a step" * reserved
        raise PairError(f"--lengths: expected at most {most} tokens{why}, got {max(lengths)}")
    rng = np.random.default_rng(SEED)
    tokens = rng.integers(1, embedding.vocab_size, (1, max(lengths))).astype(np.int32)
    by_length = {length: {"tokens": tokens[:, :length]} for length in lengths}
    return TimedPair(
        reference,
        models.port,
        by_length[lengths[0]],
        layout=models.layout,
        reference_call=_torch_output,
        port_call=_port_output,
        by_length=by_length,
        cached=(_OF_TORCH, _OF_PORT) if models.has_cache else None,
        own_check=check,
    )


def _prefer_sdpa(module: Any) -> None:
    """Select the kernel that users of transformers run, if the model supports it."""
    try:
        module.set_attn_implementation("sdpa")
    except (ValueError, ImportError):  # the model does not support it
        return


def _torch_output(module: Any, tokens: torch.Tensor) -> torch.Tensor:
    no_cache = {"use_cache": False} if getattr(module.config, "use_cache", None) else {}
    return _first(module(tokens, **no_cache))


def _first(out: Any) -> torch.Tensor:
    """Return the logits, or the hidden states of a model without a head."""
    logits = logits_of(out)
    return out.last_hidden_state if logits is None else logits


def _torch_prefill(module: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
    out = module(tokens, use_cache=True)
    return _first(out), out.get(cache_name(module))


def _torch_step(module: Any, cache: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
    # A layer's cache replaces its tensors, so shallow copies leave the given cache unchanged.
    read = copy.copy(cache)
    read.layers = [copy.copy(layer) for layer in cache.layers]
    out = module(tokens, **{cache_name(module): read}, use_cache=True)
    return _first(out), cache


def cache_name(module: Any) -> str:
    """Return the name of the module's cache argument; "past_key_values" until transformers 5.23."""
    names = inspect.signature(module.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _port_output(model: Any, tokens: Any) -> jax.Array:
    return _read(model(tokens))


def _read(out: Any) -> jax.Array:
    return out.hidden if out.logits is None else out.logits


def _port_prefill(model: Any, tokens: Any) -> tuple[jax.Array, Any]:
    B, T = tokens.shape
    out = model(tokens, cache=model.empty_cache(B, T + 1))
    return _read(out), out.cache


def _port_step(model: Any, cache: Any, tokens: Any) -> tuple[jax.Array, Any]:
    out = model(tokens, cache=cache)
    pairs = zip(out.cache, cache, strict=True)
    return _read(out), tuple(replace(new, filled=old.filled) for new, old in pairs)


_OF_TORCH = Cached(_torch_prefill, _torch_step)
_OF_PORT = Cached(_port_prefill, _port_step)
