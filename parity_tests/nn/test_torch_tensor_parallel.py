"""A layer whose heads two processes of torch share equals torch's own, and ours on two devices."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.attention.meshes import KINDS, assert_near, mesh
from jax_attn import transfer
from jax_attn.nn import GroupedQueryAttention
from jax_attn.transfer import LAYOUTS
from torch_ref.gqa import GroupedQueryAttention as TorchAttention

B, T, D, N, K, H = 3, 7, 20, 8, 4, 5
RANK = Path(__file__).with_name("torch_ranks.py")
# Of the sums of a layer and of its gradients: over features, heads, keys, and all tokens.
ADDITIONS = D + N * H + T + B * T


def drawn(moved):
    """A layer, an input and a cotangent. moved: the input by its last bit."""
    torch.manual_seed(5)
    layer = TorchAttention(D, N, K, head_dim=H).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x, cotangent = torch.randn(2, B, T, D, dtype=torch.float64)
    if moved:
        x = x * (1 + 2.0**-53 * (4 * torch.randint(0, 2, x.shape) - 2).double())
    return layer, x, cotangent


def alone(moved):
    layer, x, cotangent = drawn(moved)
    output = layer(x, x, x, is_causal=True)
    output.backward(cotangent)
    grads = {name: p.grad.numpy() for name, p in layer.named_parameters()}
    return {"output": output.detach().numpy(), **grads}


@pytest.fixture(scope="module")
def wanted():
    return alone(moved=False), alone(moved=True)


@pytest.mark.slow
def test_two_processes_of_torch_give_what_one_gives(wanted, tmp_path):
    layer, x, cotangent = drawn(moved=False)
    torch.save({"layer": layer, "x": x, "cotangent": cotangent}, tmp_path / "layer.pt")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), str(tmp_path)], stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    for process in ranks:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error.decode()
    one, near = wanted
    for rank in range(2):
        found = np.load(tmp_path / f"rank{rank}.npz")
        assert_near(
            [found[name] for name in one],
            [*one.values()],
            [near[name] for name in one],
            additions=ADDITIONS,
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_devices_of_jax_give_what_torch_gives(kind, wanted):
    reference, x, cotangent = drawn(moved=False)
    one, near = wanted
    with jax.enable_x64(True), jax.set_mesh(mesh(kind, heads=2)):
        made = {"head_dim": H, "param_dtype": np.float64, "rngs": nnx.Rngs(0)}
        layer = GroupedQueryAttention(D, N, K, sharding={"heads": "heads"}, **made)
        transfer.load(layer, reference.state_dict(), LAYOUTS["gqa"])

        @nnx.jit
        def step(layer, x, cotangent):
            def loss(layer):
                output = layer(x, is_causal=True)
                return (output * cotangent).sum(), output

            return nnx.grad(loss, has_aux=True)(layer)

        grads, output = step(layer, x.numpy(), cotangent.numpy())
        found = transfer.export(grads, LAYOUTS["gqa"])
        found = [output if name == "output" else found[name] for name in one]
        assert_near(found, [*one.values()], [near[name] for name in one], additions=ADDITIONS)
        assert layer.q_proj.kernel[...].sharding.spec[1] == "heads"
