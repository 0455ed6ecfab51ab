"""Meta's Llama against its definition, its files against transformers': pairs side by side."""

import math
from functools import cache

import numpy as np
import pytest
import torch

from helpers.dtype_rows import in_dtypes
from helpers.families.decoder_cases import Turned, drawn, turning
from helpers.families.family_mistakes import assert_seen, but, otherwise, swapped
from helpers.same_arrays import assert_same
from jax_attn import transfer
from jax_attn.families import family_of
from jax_attn.families.llama import LLAMA, LLAMA_META
from jax_attn.families.traits import RotaryTraits
from jax_attn.transfer import heads, linear, row

N, K, H = 6, 2, 10
D, V, F = N * H, 17, 37
PARAMS = {"dim": D, "n_heads": N, "n_kv_heads": K, "n_layers": 2, "norm_eps": 1e-5}
# Fast pairs, one between (1.3 turns in 8192 positions), and one slow.
SCALED = {"rope_theta": 1e5, "use_scaled_rope": True}
CASES = {"llama 1 and 2": {}, "llama 3.1": SCALED}
PLACE = "layers.1.attention"


class Params(dict):
    """As the helpers of transformers' families take a config."""

    def to_dict(self):
        return dict(self)


class Attention(torch.nn.Module):
    """As Meta's code has it: features 2m and 2m + 1 are a complex number, turned by its angle."""

    def __init__(self, params):
        super().__init__()
        self.params = params
        for name, out in (("wq", N * H), ("wk", K * H), ("wv", K * H), ("wo", D)):
            setattr(self, name, torch.nn.Linear(D, out, bias=False))

    def frequencies(self):
        fast = self.params.get("rope_theta", 1e4) ** -(torch.arange(0, H, 2).float() / H)
        if not self.params.get("use_scaled_rope"):
            return fast
        turns = 8192 * fast / (2 * math.pi)
        smooth = (turns - 1) / (4 - 1)
        between = (1 - smooth) * fast / 8 + smooth * fast
        return torch.where(turns < 1, fast / 8, torch.where(turns > 4, fast, between))

    def turned(self, x, positions):
        angles = (positions[..., None] * self.frequencies())[:, :, None]
        a, b = x[..., ::2], x[..., 1::2]
        pairs = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
        return torch.stack(pairs, -1).flatten(-2).to(x.dtype)

    def forward(self, x, mask, positions):
        q, k, v = (w(x).unflatten(-1, (-1, H)) for w in (self.wq, self.wk, self.wv))
        q, k = self.turned(q, positions), self.turned(k, positions)
        k, v = (y.repeat_interleave(N // K, dim=2) for y in (k, v))
        scores = torch.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(H) + mask
        probabilities = scores.float().softmax(-1).type_as(q)
        return self.wo(torch.einsum("bnts,bsnh->btnh", probabilities, v).flatten(2))


@cache
def block(name, dtype="float32") -> Turned:
    params = Params(PARAMS, **CASES[name])

    def theirs(module, x, mask, positions):
        return module(x, mask, positions)

    return Turned.of(drawn(Attention(params)), params, PLACE, theirs, dtype)


@pytest.mark.slow
@in_dtypes("name", CASES)
def test_a_block_agrees_with_its_definition(name, dtype):
    block(name, dtype).check().raise_for_status()


MISTAKES = {
    "pairs left as they lie": (
        "llama 1 and 2",
        but(
            row("wq.weight", "q_proj.kernel", linear, heads),
            row("wk.weight", "k_proj.kernel", linear, heads),
        ),
    ),
    "halves turned as neighbours": ("llama 1 and 2", turning(interleaved=True)),
    "key and value swapped": ("llama 1 and 2", swapped("k_proj", "v_proj")),
    "another base": ("llama 1 and 2", turning(base=1.01e4)),
    "another scale": ("llama 1 and 2", otherwise(scale=11**-0.5)),
    "the scaling forgotten": ("llama 3.1", turning(scaling=None)),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake):
    name, mistaken = MISTAKES[mistake]
    assert_seen(mistaken, block(name))


# --- whole files ----------------------------------------------------------------------------------


def file() -> dict[str, np.ndarray]:
    """A consolidated.00.pth of two layers."""
    shapes = {"tok_embeddings.weight": (V, D), "norm.weight": (D,), "output.weight": (V, D)}
    for layer in range(2):
        shapes |= {
            f"layers.{layer}.{key}.weight": shape
            for key, shape in {
                "attention.wq": (N * H, D),
                "attention.wk": (K * H, D),
                "attention.wv": (K * H, D),
                "attention.wo": (D, N * H),
                "feed_forward.w1": (F, D),
                "feed_forward.w2": (D, F),
                "feed_forward.w3": (F, D),
                "attention_norm": (D,),
                "ffn_norm": (D,),
            }.items()
        }
    rng = np.random.default_rng(0)
    return {key: rng.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}


def flax_of(tensors):
    layout = LLAMA_META.model(PARAMS, tensors)
    sizes = LLAMA_META.traits(PARAMS, PLACE).sizes
    return layout, layout.to_flax(
        tensors, layout.shapes({key: a.shape for key, a in tensors.items()}, sizes)
    )


@pytest.mark.parametrize("dtype", [np.float32, transfer.as_numpy(torch.ones(1).bfloat16()).dtype])
def test_a_file_goes_there_and_back(dtype):
    tensors = {key: a.astype(dtype) for key, a in file().items()}
    layout, flax = flax_of(tensors)
    assert_same(layout.to_torch(flax), tensors)
    assert [place.flax for place in LLAMA_META.blocks(PARAMS, tensors)] == [
        f"layers.{i}.attention" for i in range(2)
    ]


def test_through_both_tables_a_file_becomes_transformers_own():
    """As transformers' conversion script permutes it: rows (pairs, 2) of a head to (2, pairs)."""

    def permuted(weight, heads):
        return weight.reshape(heads, H // 2, 2, D).swapaxes(1, 2).reshape(-1, D)

    theirs = file()
    config = {"model_type": "llama", "hidden_size": D, "num_attention_heads": N}
    config |= {"num_key_value_heads": K}
    names = ["model.layers.0.self_attn.q_proj.weight"]
    made = LLAMA.model(config, names).to_torch(flax_of(theirs)[1])
    names = {
        "tok_embeddings": "model.embed_tokens",
        "norm": "model.norm",
        "output": "lm_head",
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    want = {}
    for key, array in theirs.items():
        layer, part = key[:9], key[9:-7]
        whole = f"model.{layer}{names[part]}" if key[:7] == "layers." else names[key[:-7]]
        turned = {"attention.wq": N, "attention.wk": K}.get(part)
        want[f"{whole}.weight"] = permuted(array, turned) if turned else array
    assert_same(made, want)


def test_frequencies_in_old_files_are_passed_over():
    layout = LLAMA_META.model(PARAMS, file())
    assert layout.to_flax({"rope.freqs": np.ones(H // 2)}, {}) == {}


# --- params.json ----------------------------------------------------------------------------------


def test_params_without_a_model_type_are_known_by_their_keys():
    assert family_of(PARAMS) is LLAMA_META
    assert family_of({"dim": D, "heads": N, "n_layers": 2}) is None
    assert family_of({**PARAMS, "model_type": "another"}) is None


def test_what_params_say():
    traits = LLAMA_META.traits({**PARAMS, "n_kv_heads": None}, PLACE)
    assert (traits.sizes, traits.rotary) == ((N, N, H), RotaryTraits())
    scaled = LLAMA_META.traits({**PARAMS, **SCALED}, PLACE).rotary
    assert (scaled.base, scaled.scaling[1]["original_length"]) == (1e5, 8192)
