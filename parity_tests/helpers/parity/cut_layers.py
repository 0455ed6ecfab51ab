"""Layers whose arrays are cut over eight devices: right ones, and what goes wrong on meshes."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from jax import P, lax

from helpers.attention.meshes import mesh
from jax_attn import parity
from jax_attn.transfer import Layout, row

B, T, D, F, K, G = 2, 12, 5, 8, 2, 2
H = D


class Torch(torch.nn.Module):
    """Parameters of all the references below; what each is, `call` says."""

    def __init__(self, **shapes):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=generator)
            self.register_parameter(name, torch.nn.Parameter(value))


class Jax(nnx.Module):
    """The same parameters."""

    def __init__(self, reference):
        for name, value in reference.named_parameters():
            setattr(self, name, nnx.Param(jnp.array(value.detach().numpy())))


def cut(body, in_specs, out_specs, *, checked=True):
    """body, on each device of the mesh that is set."""
    return jax.shard_map(body, in_specs=in_specs, out_specs=out_specs, check_vma=checked)


# --- a feed-forward layer whose hidden features are cut -------------------------------------------

FEED = {"scale": (D,), "up": (D, F), "down": (F, D)}
OF_FEED = (P("data"), P(), P(None, "model"), P("model"))


def torch_feed(module, x):
    return torch.nn.functional.silu((x * module.scale) @ module.up) @ module.down


def hidden(x, scale, up, down):
    return jax.nn.silu((x * scale) @ up) @ down


def of_feed(body, **options):
    def call(module, x):
        parameters = (module.scale[...], module.up[...], module.down[...])
        return cut(body, OF_FEED, P("data"), **options)(x, *parameters)

    return call


def twice(x, *parameters):
    return lax.psum(lax.psum(hidden(x, *parameters), "model"), "model")


def local_gradient(module, x):
    """Each device's gradient of `scale` is of its own rows and features alone."""
    forward = cut(lambda *a: lax.psum(hidden(*a), "model"), OF_FEED, P("data"))

    def backward(x, scale, up, down, cotangent):
        dx, dscale, dup, ddown = jax.vjp(hidden, x, scale, up, down)[1](cotangent)
        return lax.psum(dx, "model"), dscale, lax.psum(dup, "data"), lax.psum(ddown, "data")

    @jax.custom_vjp
    def feed(*arrays):
        return forward(*arrays)

    feed.defvjp(
        lambda *arrays: (forward(*arrays), arrays),
        lambda arrays, cotangent: cut(backward, (*OF_FEED, P("data")), OF_FEED, checked=False)(
            *arrays, cotangent
        ),
    )
    return feed(x, module.scale[...], module.up[...], module.down[...])


# --- a mean over tokens, some of which are padding ------------------------------------------------

LENGTHS = np.array([11, 2], np.int32)


def torch_mean(module, x, lengths):
    counts = torch.arange(T)[None] < lengths[:, None]
    return ((x * module.scale) ** 2).sum(-1)[counts].sum() / counts.sum()


def of_tokens(x, scale, lengths):
    counts = jnp.arange(T)[None] < lengths[:, None]
    return jnp.where(counts, ((x * scale) ** 2).sum(-1), 0).sum(), counts.sum().astype(x.dtype)


def mean(x, scale, lengths):
    total, count = of_tokens(x, scale, lengths)
    return lax.psum(total, "data") / lax.psum(count, "data")


def mean_of_means(x, scale, lengths):
    total, count = of_tokens(x, scale, lengths)
    return lax.pmean(total / count, "data")


def of_mean(body):
    def call(module, x, lengths):
        specs = (P("data"), P(), P("data"))
        return cut(body, specs, P())(x, module.scale[...], lengths)

    return call


# --- heads that share weights ---------------------------------------------------------------------


def torch_shared(module, x):
    return x * module.shared.repeat_interleave(G, dim=0)


def of_shared(group):
    """group: from a device's place and the number of its heads to the groups that they read."""

    def body(x, shared):
        return x * shared[group(lax.axis_index("model"), x.shape[2])]

    def call(module, x):
        specs = (P("data", None, "model"), P())
        return cut(body, specs, specs[0])(x, module.shared[...])

    return call


# --- a sum of neighbours, whose sequence is cut ---------------------------------------------------


def torch_neighbours(module, x):
    return module.here * x + module.before * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


def of_neighbours(edge):
    """edge: from a device's tokens to the one that it sends to the next device."""

    def body(x, here, before):
        last = lax.axis_size("model") - 1  # the first device receives 0
        first = lax.ppermute(edge(x), "model", [(i, i + 1) for i in range(last)])
        return here * x + before * jnp.concatenate([first, x[:, :-1]], axis=1)

    def call(module, x):
        specs = (P("data", "model"), P(), P())
        return cut(body, specs, specs[0])(x, module.here[...], module.before[...])

    return call


# name -> (parameters, torch's call, shape of x, how it is cut, the port's call)
FEED_ROW = (FEED, torch_feed, (B, T, D), P("data"))
_MEAN = ({"scale": (D,)}, torch_mean, (B, T, D), P("data"))
_SHARED = ({"shared": (K, H)}, torch_shared, (B, T, K * G, H), P("data", None, "model"))
_NEIGHBOURS = ({"here": (D,), "before": (D,)}, torch_neighbours, (B, T, D), P("data", "model"))
RIGHT = {
    "a sum over features": (*FEED_ROW, of_feed(lambda *a: lax.psum(hidden(*a), "model"))),
    "a mean over tokens": (*_MEAN, of_mean(mean)),
    "shared heads": (*_SHARED, of_shared(lambda place, n: (place * n + jnp.arange(n)) // G)),
    "neighbours": (*_NEIGHBOURS, of_neighbours(lambda x: x[:, -1:])),
}
SCALE_NOT_SUMMED = "a replicated parameter's gradient not summed"
WRONG = {
    "no sum": (*FEED_ROW, of_feed(hidden, checked=False)),
    "summed twice": (*FEED_ROW, of_feed(twice, checked=False)),
    "a mean for a sum": (*FEED_ROW, of_feed(lambda *a: lax.pmean(hidden(*a), "model"))),
    SCALE_NOT_SUMMED: (*FEED_ROW, local_gradient),
    "a mean of the devices' means": (*_MEAN, of_mean(mean_of_means)),
    "shared heads in another order": (
        *_SHARED,
        of_shared(lambda place, n: (place + jnp.arange(n) // G) % K),
    ),
    "a neighbour off by one": (*_NEIGHBOURS, of_neighbours(lambda x: x[:, -2:-1])),
}


def checked(kind, rows, **options):
    """One check of several rows, each an output with parameters and inputs of its own."""
    shapes, inputs, specs = {}, {}, {}
    for i, (of_row, torch_call, shape, spec, _) in enumerate(rows.values()):
        shapes |= {f"{name}_{i}": of_row[name] for name in of_row}
        inputs[f"x_{i}"] = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        specs[f"x_{i}"] = spec
        if torch_call is torch_mean:
            inputs[f"lengths_{i}"] = np.roll(LENGTHS, i)  # two equal inputs could be swapped
            specs[f"lengths_{i}"] = P("data")
        if "up" in of_row:
            specs |= {f"up_{i}": P(None, "model"), f"down_{i}": P("model")}

    def call(side, module, **inputs):
        outputs = {}
        for i, (name, case) in enumerate(rows.items()):
            own = SimpleNamespace(**{of: getattr(module, f"{of}_{i}") for of in case[0]})
            given = {of: inputs[f"{of}_{i}"] for of in ("x", "lengths") if f"{of}_{i}" in inputs}
            outputs[name] = case[side](own, **given)
        return outputs

    reference = Torch(**shapes)
    return parity.check(
        reference,
        Jax(reference),
        inputs,
        layout=Layout(*(row(name, name) for name in shapes)),
        reference_call=partial(call, 1),
        port_call=partial(call, -1),
        mesh=mesh(kind, data=2, model=4),
        specs=specs,
        **{"transforms": ("jit",), **options},
    )
