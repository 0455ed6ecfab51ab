"""The NNX modules under every transform, nnx's and jax's, and their gradients."""

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


def test_gradients_are_finite_differences_in_float64():
    with jax.enable_x64(True):
        module, x = build(param_dtype="float64", softcap=1.5), inputs(dtype="float64")
        graph, state = nnx.split(module)

        def loss(state, x):
            return (nnx.merge(graph, state)(*x, mask=Mask.causal(-1)) ** 2).sum()

        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        _, gradient = run(state, x)
        through_nnx = nnx.jit(nnx.grad(lambda m, x: (m(*x, mask=Mask.causal(-1)) ** 2).sum()))
        through_nnx = through_nnx(module, x)
        gradient, through_nnx = (
            [np.asarray(leaf) for leaf in jax.tree.leaves(made)] for made in (gradient, through_nnx)
        )
        of_parameters = gradient[: -len(x)]
        for a, b in zip(of_parameters, through_nnx, strict=True):
            # Both are the chain rule in float64; each may sum in another order.
            assert np.abs(a - b).max() <= 1e3 * definition.ROUNDOFF["float64"] * np.abs(a).max()
        rng = np.random.default_rng(7)
        leaves, structure = jax.tree.flatten((state, x))
        leaves = [np.asarray(leaf) for leaf in leaves]
        for leaf in range(len(leaves)):
            direction, step = rng.standard_normal(leaves[leaf].shape), 1e-5

            def at(t, leaf=leaf, direction=direction):
                moved = [*leaves[:leaf], leaves[leaf] + t * direction, *leaves[leaf + 1 :]]
                return float(run(*jax.tree.unflatten(structure, moved))[0])

            want = (at(step) - at(-step)) / (2 * step)
            got = float((gradient[leaf] * direction).sum())
            # Truncation step²·f''' and rounding u·f/step, a hundredfold each.
            slack = 100 * (step**2 + definition.ROUNDOFF["float64"] / step) * abs(at(0))
            assert abs(got - want) <= slack
