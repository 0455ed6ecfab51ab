"""The NNX modules under every transform, nnx's and jax's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers.attention import attention_definition as definition
from helpers.attention.small_attention import B, S, build, by_definition, inputs
from jax_attn.attention import Mask

pytestmark = pytest.mark.filterwarnings("error")


def split_state(run):
    """run(module, x) as a jax function of the module's state."""

    def call(module, x):
        graph, state = nnx.split(module)
        return run(lambda state, x: nnx.merge(graph, state)(*x, Mask.lengths(LENGTHS)))(state, x)

    return call


def exported(f):
    platforms = ("cpu", "cuda", "tpu")

    # The state is a pytree of its own kind: an exported function takes plain leaves.
    def call(state, x):
        leaves, structure = jax.tree.flatten((state, x))
        flat = jax.jit(lambda *leaves: f(*jax.tree.unflatten(structure, leaves)))
        return jax.export.export(flat, platforms=platforms)(*leaves).call(*leaves)

    return call


LENGTHS = np.array([4, 6])
TRANSFORMS = {
    "nnx.jit": lambda m, x: nnx.jit(lambda m, x, mask: m(*x, mask))(m, x, Mask.lengths(LENGTHS)),
    "nnx.remat": lambda m, x: nnx.jit(nnx.remat(lambda m, x: m(*x, Mask.lengths(LENGTHS))))(m, x),
    "nnx.vmap": lambda m, x: nnx.jit(
        nnx.vmap(lambda m, x, n: m(*x, Mask.lengths(n)), in_axes=(None, 1, 0), out_axes=1)
    )(m, [y[:, None] for y in x], jnp.asarray(LENGTHS)[None])[:, 0],
    "jax.jit on split state": split_state(jax.jit),
    "jax.checkpoint on split state": split_state(lambda f: jax.jit(jax.checkpoint(f))),
    "jax.vmap over a batch of states": split_state(
        lambda f: (
            lambda state, x: jax.jit(jax.vmap(f, in_axes=(0, None)))(
                jax.tree.map(lambda p: np.stack([p, p]), state), x
            )[1]
        )
    ),
    "jax.export on split state": split_state(exported),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_under_transforms(name):
    module, x = build(), inputs()
    allowed = np.arange(S) < LENGTHS.reshape(B, 1, 1, 1)
    out, budget, _, _ = by_definition(module, *x, allowed=allowed)
    assert definition.worst(TRANSFORMS[name](module, x), out, budget) <= 1
