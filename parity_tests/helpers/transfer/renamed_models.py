"""One small transformer on both sides, the torch side under any names, for the tests of `infer`.

Torch's modules are named out of three pools: what projects call such a thing, what says only of
which kind it is, and what says nothing. Modules are missing at times, and strange ones are there.
"""

import random
from dataclasses import dataclass

import numpy as np
import torch
from flax import nnx

from jax_attn import transfer
from jax_attn.transfer import EMBEDDING, FROM_HEADS, LAYER_NORM, LINEAR, TO_HEADS, Layout
from jax_attn.transfer.table.rows import bindings

N, D, LAYERS = 6, 30, 2
# Vocabulary, positions, hidden width, key/value heads: shapes tell all apart, or none, or some.
SIZES = {
    "distinct": (11, 13, 37, 3),
    "square": (D, D, D, N),
    "as published": (11, 13, 37, N),
}


class Mlp(nnx.Module):
    def __init__(self, hidden, rngs):
        self.up = nnx.Linear(D, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, D, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, hidden, kv_heads, rngs):
        self.norm1 = nnx.LayerNorm(D, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(N, D, num_kv_heads=kv_heads, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(D, rngs=rngs)
        self.mlp = Mlp(hidden, rngs)


class Transformer(nnx.Module):
    def __init__(self, sizes="distinct", layers=LAYERS, embed_norm=True):
        vocabulary, positions, hidden, kv_heads = SIZES[sizes]
        rngs = nnx.Rngs(0)
        self.tokens = nnx.Embed(vocabulary, D, rngs=rngs)
        self.positions = nnx.Embed(positions, D, rngs=rngs)
        if embed_norm:
            self.embed_norm = nnx.LayerNorm(D, rngs=rngs)
        self.layers = nnx.List([Block(hidden, kv_heads, rngs) for _ in range(layers)])
        self.final_norm = nnx.LayerNorm(D, rngs=rngs)
        self.head = nnx.Linear(D, vocabulary, rngs=rngs)


def abstract(**options):
    return nnx.eval_shape(lambda: Transformer(**options))


@dataclass(frozen=True)
class Place:
    """A module of the torch side: where it goes, how it is made, and what it may be called."""

    flax: str
    table: Layout
    make: str
    telling: str
    vague: str


PLACES = {
    "token": Place("tokens", EMBEDDING, "vocabulary", "wte word_embeddings embed_tokens", "embed"),
    "position": Place("positions", EMBEDDING, "positions", "wpe pos_embed positions", "embed"),
    "embed_norm": Place("embed_norm", LAYER_NORM, "norm", "embed_norm embedding_ln", "norm ln"),
    "final_norm": Place("final_norm", LAYER_NORM, "norm", "ln_f final_norm norm_f", "norm ln"),
    "head": Place("head", LINEAR, "head", "head lm_head", "output proj dense linear"),
}
LAYERED = {
    "norm1": Place("norm1", LAYER_NORM, "norm", "norm1 ln_1", "norm input_layernorm attn_norm"),
    "norm2": Place("norm2", LAYER_NORM, "norm", "norm2 ln_2", "ln post_attention_layernorm"),
}
ATTENTION = {
    "q": Place("query", TO_HEADS, "query", "q_proj query wq W_Q to_q", "proj dense lin1"),
    "k": Place("key", TO_HEADS, "key", "k_proj key wk W_K to_k", "proj linear lin2"),
    "v": Place("value", TO_HEADS, "key", "v_proj value wv W_V to_v", "c_proj dense"),
    "o": Place("out", FROM_HEADS, "query", "o_proj out wo W_O to_out dense", "proj c_proj linear"),
}
MLP = {
    "up": Place("up", LINEAR, "up", "up up_proj", "fc1 c_fc fc dense proj wi"),
    "down": Place("down", LINEAR, "down", "down down_proj", "fc2 c_proj output dense wo"),
}
NEUTRAL = ["foo", "bar", "unit", "a", "b", "part3", "zip1", "zip2", "thing"]
STRANGERS = ["norm", "query", "key", "up", "down", "vocabulary"]


def made(kind, sizes):
    vocabulary, positions, hidden, kv_heads = SIZES[sizes]
    return {
        "vocabulary": lambda: torch.nn.Embedding(vocabulary, D),
        "positions": lambda: torch.nn.Embedding(positions, D),
        "norm": lambda: torch.nn.LayerNorm(D),
        "head": lambda: torch.nn.Linear(D, vocabulary),
        "query": lambda: torch.nn.Linear(D, D),
        "key": lambda: torch.nn.Linear(D, D // N * kv_heads),
        "up": lambda: torch.nn.Linear(D, hidden),
        "down": lambda: torch.nn.Linear(hidden, D),
    }[kind]()


def as_published(sizes="distinct"):
    """The torch side under its first names, and its table."""
    where = {"layers": "layers.{layer}", "attention": "attn", "mlp": "mlp", "prefix": ""}
    return _grown(sizes, where, lambda place: place.telling.split()[0], lambda places: places, ())


def renamed(seed, sizes):
    """The torch side under names drawn at random, with holes and strangers, and its table."""
    draw = random.Random(seed)
    pools = draw.choice([("telling",), ("telling", "vague"), ("telling", "vague", "neutral")])

    def name(place):
        pool = draw.choice(pools)
        return draw.choice(NEUTRAL if pool == "neutral" else getattr(place, pool).split())

    def some(places):
        kept = {key: place for key, place in places.items() if draw.random() < 0.85}
        return dict(draw.sample(list(kept.items()), len(kept)))

    where = {
        "layers": f"{draw.choice(['h', 'layers', 'block', 'stack'])}.{{layer}}",
        "attention": draw.choice(["attn", "self_attn", "attention", "unit", ""]),
        "mlp": draw.choice(["mlp", "ffn", "thing", ""]),
        "prefix": draw.choice(["", "model", "trunk"]),
    }
    strangers = [
        (draw.randrange(4), draw.choice(NEUTRAL), draw.choice(STRANGERS))
        for _ in range(draw.randrange(3))
    ]
    return _grown(sizes, where, name, some, strangers)


def _grown(sizes, where, name, some, strangers):
    """A module, and its table. strangers: which part of the model, called what, and made how."""
    tree, rows = {}, []
    parts = [
        (_dotted(where["prefix"]), "", PLACES),
        (_dotted(where["prefix"], where["layers"]), "layers.{layer}", LAYERED),
    ]
    parts += [
        (_dotted(parts[1][0], where[part]), f"layers.{{layer}}.{there}", places)
        for part, there, places in (("attention", "attn", ATTENTION), ("mlp", "mlp", MLP))
    ]
    for prefix, there, places in parts:
        for place in some(places).values():
            if (full := _dotted(prefix, name(place))) not in tree:
                tree[full] = place.make
                rows.append(place.table.under(full, _dotted(there, place.flax)))
    for part, called, kind in strangers:
        tree.setdefault(_dotted(parts[part][0], called), kind)
    return _module(tree, sizes), Layout(*rows)


def _dotted(*parts):
    return ".".join(part for part in parts if part)


def _module(tree, sizes):
    root = torch.nn.Module()
    for pattern, kind in tree.items():
        for layer in range(LAYERS if "{layer}" in pattern else 1):
            *parents, last = pattern.replace("{layer}", str(layer)).split(".")
            node = root
            for parent in parents:
                if not hasattr(node, parent):
                    node.add_module(parent, torch.nn.Module())
                node = getattr(node, parent)
            node.add_module(last, made(kind, sizes))
    for parameter in root.parameters():
        torch.nn.init.normal_(parameter)
    return root


def written(layout, tensors, flax_module):
    """Path to array, by the rows of a table that are whole; others are no concern here."""
    shapes = {path: array.shape for path, array in transfer.flatten(flax_module).items()}
    arrays = {}
    rows = (r for group in layout.groups for alternative in group.alternatives for r in alternative)
    for pattern in rows:
        for binding in bindings(pattern.keys, tensors) & bindings(pattern.paths, shapes):
            row = pattern.at(binding)
            sources = tuple(transfer.as_numpy(tensors[key]) for key in row.keys)
            targets = tuple(shapes[path] for path in row.paths)
            arrays |= zip(row.paths, row.to_flax(sources, targets), strict=True)
    return {path: np.ascontiguousarray(array) for path, array in arrays.items()}


def wrong_paths(ours, true):
    """Those of what one table wrote that the true one wrote otherwise, or not at all."""
    return [p for p, array in ours.items() if p not in true or array.tobytes() != true[p].tobytes()]
