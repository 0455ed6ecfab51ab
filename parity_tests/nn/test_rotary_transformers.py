"""Rotary positions against transformers' own, of every scaling, and whole modules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import GPTNeoXConfig, LlamaConfig
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama

from jax_attn import transfer
from jax_attn.attention import Rotary, rotate
from jax_attn.attention.rotary import DynamicNTK, Linear, Llama3, Yarn
from torch_ref import rotary as torch_rotary

B, T, N, K, H = 2, 13, 6, 3, 20
BASE, LONGEST, ORIGINAL = 1e4, 4096, 64
U = 2.0**-24

# transformers' words, ours. Llama's config takes its length for DynamicNTK's original one.
SCALINGS = {
    "default": ({}, None),
    "linear": ({"factor": 4.0}, Linear(4.0)),
    "dynamic": ({"factor": 4.0}, DynamicNTK(4.0, LONGEST)),
    "llama3": (
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
        Llama3(8.0, 1.0, 4.0, ORIGINAL),
    ),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
        Yarn(4.0, ORIGINAL),
    ),
    "yarn, not truncated": (
        {
            "factor": 4.0,
            "original_max_position_embeddings": LONGEST // 4,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
        Yarn(4.0, LONGEST // 4, beta_fast=16.0, beta_slow=2.0, truncate=False),
    ),
    "yarn of two scales": (
        {
            "factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
            "mscale": 0.7,
            "mscale_all_dim": 0.3,
        },
        Yarn(4.0, ORIGINAL, mscale=0.7, mscale_all_dim=0.3),
    ),
    "yarn of given growth": (
        {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "attention_factor": 1.3},
        Yarn(4.0, ORIGINAL, attention_factor=1.3),
    ),
}
PARTS = {"llama": 1.0, "gpt_neox": 0.5}
CASES = [(model, scaling) for model in PARTS for scaling in SCALINGS]


def config(model, scaling, **options):
    words = SCALINGS[scaling][0]
    kind = scaling.split(",")[0].split(" ")[0]
    parameters = {"rope_type": kind, "rope_theta": BASE, **words}
    made = {"hidden_size": N * H, "num_attention_heads": N, "max_position_embeddings": LONGEST}
    if model == "gpt_neox":
        parameters["partial_rotary_factor"] = PARTS[model]
        return GPTNeoXConfig(**made, rope_parameters=parameters, **options)
    made |= {"num_key_value_heads": K}
    return LlamaConfig(**made, rope_parameters=parameters, **options)


def ours(model, scaling) -> Rotary:
    dim = None if PARTS[model] == 1 else int(H * PARTS[model])
    return Rotary(BASE, dim, scaling=SCALINGS[scaling][1])


def theirs(model, scaling):
    """(frequencies, x (B, T, N, H), positions (B, T) -> rotated): built anew, as it keeps state."""
    room = {"llama": llama, "gpt_neox": gpt_neox}[model]
    kind = {"llama": "LlamaRotaryEmbedding", "gpt_neox": "GPTNeoXRotaryEmbedding"}[model]
    embedding = getattr(room, kind)(config(model, scaling))

    def rotated(x, positions):
        x = torch.from_numpy(x)
        cos, sin = embedding(x, torch.from_numpy(positions))
        return room.apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)[0].numpy()

    return embedding, rotated


TEXTS = {
    "short": np.stack([np.arange(T), np.arange(T)[::-1]]),
    "beyond the original length": np.linspace(0, LONGEST - 1, B * T, dtype=int).reshape(B, T),
    "beyond every length": np.linspace(0, 2**20 - 1, B * T, dtype=int).reshape(B, T),
}
X = np.random.default_rng(0).standard_normal((B, T, N, H)).astype(np.float32)


def ulps(scaling) -> int:
    """By how many units in the last place frequencies may lie apart.

    Both sides make DynamicNTK's when they run, of several roundings, which XLA and torch do not
    share; the others are to be transformers' own, bit for bit.
    """
    return 4 if scaling == "dynamic" else 0


def over_budget(model, scaling, text, rotate) -> float:
    """Our largest error over what rounding allows.

    Both sides round cosine, sine, two products, their sum, and the growth: 12u of a pair's size.
    Where frequencies lie apart, angles do as many times so as the position says.
    """
    positions = TEXTS[text]
    embedding, rotated = theirs(model, scaling)
    want, frequencies = rotated(X, positions), embedding.inv_freq.numpy()
    dim, size = 2 * len(frequencies), np.abs(X)
    pair = np.hypot(X[..., : dim // 2], X[..., dim // 2 : dim])
    size[..., :dim] = np.concatenate([pair, pair], axis=-1) * embedding.attention_scaling
    apart = np.zeros(H)
    apart[:dim] = np.tile(ulps(scaling) * np.spacing(frequencies), 2)
    budget = size * (12 * U + positions[..., None, None] * apart)
    return float((np.abs(np.asarray(rotate(X, positions)) - want) / budget).max())


@pytest.mark.parametrize(("model", "scaling"), CASES)
def test_rotates_as_transformers_does(model, scaling):
    rotary = ours(model, scaling)
    turn = jax.jit(lambda x, at: rotate(x, at, rotary))
    for text in TEXTS:
        assert over_budget(model, scaling, text, turn) <= 1, text


@pytest.mark.parametrize(("model", "scaling"), CASES)
def test_frequencies_and_growth_are_transformers_own(model, scaling):
    embedding, rotated = theirs(model, scaling)
    for text in TEXTS.values():
        rotated(X, text)
        want = embedding.inv_freq.numpy()
        length = jnp.asarray(text.max() + 1)
        got, growth = ours(model, scaling).frequencies(2 * len(want), np.dtype("float32"), length)
        assert (np.abs(np.asarray(got) - want) <= ulps(scaling) * np.spacing(want)).all()
        assert growth == pytest.approx(embedding.attention_scaling, rel=4 * 2.0**-53)


@pytest.mark.parametrize(("model", "scaling"), CASES)
def test_the_torch_side_rotates_as_transformers_does(model, scaling):
    mine = ours(model, scaling)
    words = None if mine.scaling is None else vars(mine.scaling)
    scaled = words and getattr(torch_rotary, type(mine.scaling).__name__)(**words)
    rotary = torch_rotary.Rotary(mine.base, mine.dim, scaling=scaled)

    def turn(x, at):
        return torch_rotary.rotate(torch.from_numpy(x), torch.from_numpy(at), rotary).numpy()

    for text in ("short", "beyond the original length"):
        assert over_budget(model, scaling, text, turn) <= 1, text


MISTAKES = {
    "the other convention": ("default", lambda r: Rotary(r.base, r.dim, interleaved=True)),
    "the scaling forgotten": ("llama3", lambda r: Rotary(r.base, r.dim)),
    "scores not sharpened": (
        "yarn",
        lambda r: Rotary(r.base, r.dim, scaling=Yarn(4.0, ORIGINAL, attention_factor=1.0)),
    ),
    "bounds truncated": (
        "yarn, not truncated",
        lambda r: Rotary(r.base, r.dim, scaling=Yarn(4.0, LONGEST // 4, 16.0, 2.0)),
    ),
    "its length 1% off": (
        "dynamic",
        lambda r: Rotary(r.base, r.dim, scaling=DynamicNTK(4.0, LONGEST - 41)),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("model", PARTS)
def test_the_check_sees_a_mistake(model, mistake):
    scaling, wrong = MISTAKES[mistake]
    rotary = wrong(ours(model, scaling))
    text = "beyond the original length"
    assert over_budget(model, scaling, text, lambda x, at: rotate(x, at, rotary)) > 100


@pytest.mark.slow
def test_interleaved_pairs_are_gpt_j_s():
    at = np.arange(T)
    table = gptj.create_sinusoidal_positions(T, H)
    sin, cos = (half[None] for half in table.chunk(2, dim=-1))
    want = gptj.apply_rotary_pos_emb(torch.from_numpy(X), sin, cos).numpy()
    got = rotate(X, at, Rotary(BASE, interleaved=True))
    # Angles of up to T, a unit in the last place of their frequencies apart.
    assert np.abs(got - want).max() <= (12 + T) * U * np.abs(X).max() * 2
    assert np.abs(rotate(X, at, Rotary(BASE)) - want).max() > 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_half_precision_we_are_nearer_to_float32_than_transformers(dtype):
    """transformers rounds cosine, sine and both products; we round once."""
    x = torch.from_numpy(X).to(getattr(torch, dtype))
    embedding, rotated = theirs("llama", "default")
    wide = rotated(x.float().numpy(), TEXTS["short"])
    cos, sin = embedding(x, torch.from_numpy(TEXTS["short"]))
    want = llama.apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)[0].float().numpy()
    got = rotate(transfer.as_numpy(x), TEXTS["short"], Rotary(BASE))
    assert got.dtype == dtype
    ours, others = (np.abs(np.float32(made) - wide) for made in (got, want))
    u = float(jnp.finfo(dtype).eps) / 2
    assert (ours <= (u + 12 * U) * np.abs(wide) + 12 * U).all()
    assert others.mean() > ours.mean()
