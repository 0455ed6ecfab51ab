"""Where optax keeps its moments and what it counts; dtypes, memory and names of either side."""

import jax
import numpy as np
import optax
import pytest
import torch

from helpers.transfer.optimizer_runs import (
    BETAS,
    DECAY,
    EPS,
    LAYOUT,
    LR,
    MOMENTUM,
    H,
    N,
    drawn,
    export,
    go_on_in_optax,
    load,
    names_of,
    to_flax,
    torch_module,
)
from jax_attn import transfer

SCHEDULE = optax.cosine_decay_schedule(LR, 11)


def is_kernel(params):
    return {path: path.endswith("kernel") for path in params}


KINDS = {
    "alone": optax.scale_by_adam(*BETAS, EPS),
    "clipped, scheduled": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE)),
    "chains in chains": optax.chain(optax.chain(optax.adam(LR))),
    "decay masked": optax.adamw(LR, weight_decay=DECAY, mask=is_kernel),
    "decay scheduled": optax.chain(optax.add_decayed_weights(SCHEDULE), optax.adam(LR)),
    "injected": optax.inject_hyperparams(optax.adamw)(SCHEDULE, weight_decay=DECAY),
    "partitioned": optax.partition({True: optax.adam(SCHEDULE), False: optax.adam(LR)}, is_kernel),
    "accumulated": optax.MultiSteps(optax.adam(SCHEDULE), 2).gradient_transformation(),
    "skipped where not finite": optax.apply_if_finite(optax.adam(LR), 2),
    "momentum, scheduled": optax.sgd(SCHEDULE, MOMENTUM),
    "momentum, injected": optax.inject_hyperparams(optax.sgd)(SCHEDULE, MOMENTUM),
}
WEIGHTS = drawn(1, dtype=np.float32)
GRADIENTS = [to_flax(drawn(seed, dtype=np.float32)) for seed in range(2, 8)]
UPDATES = 4


def adam(module):
    return torch.optim.Adam(module.parameters())


def sgd(module):
    return torch.optim.SGD(module.parameters(), LR, MOMENTUM)


@pytest.fixture(scope="module")
def module():
    return torch_module(WEIGHTS).float()


def stepped(module, optimizer):
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        for p in module.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
    return optimizer


def bits(tree):
    return [(a.dtype, a.shape, np.asarray(a).tobytes()) for a in jax.tree.leaves(tree)]


def torch_bits(state):
    return {
        (i, name): (t.dtype, t.shape, t.reshape(-1).view(torch.uint8).tolist())
        for i, kept in state["state"].items()
        for name, t in kept.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_by_way_of_torch_a_run_in_optax_goes_on_to_the_bit(kind, module):
    tx, optimizer = KINDS[kind], (sgd if "momentum" in kind else adam)(module)
    names, made = names_of(module, optimizer), UPDATES // (2 if kind == "accumulated" else 1)
    params = to_flax(WEIGHTS)
    middle, state = go_on_in_optax(tx, params, tx.init(params), GRADIENTS[:UPDATES])
    want = go_on_in_optax(tx, middle, state, GRADIENTS[UPDATES:])

    optimizer.load_state_dict(export(state, optimizer.state_dict(), LAYOUT, names))
    carried = load(tx.init(params), optimizer.state_dict(), LAYOUT, names, step=made)
    got = go_on_in_optax(tx, middle, carried, GRADIENTS[UPDATES:])
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert bits(got) == bits(want)
    anew = go_on_in_optax(tx, middle, tx.init(params), GRADIENTS[UPDATES:])
    assert bits(anew) != bits(want)


def bare(params):
    return optax.adam(LR).init(params)


def test_bfloat16_stays_bfloat16():
    module = torch_module(WEIGHTS).bfloat16()
    optimizer = stepped(module, adam(module))
    here, names = optimizer.state_dict(), names_of(module, optimizer)
    params = {path: array.astype("bfloat16") for path, array in to_flax(WEIGHTS).items()}
    state = load(bare(params), here, LAYOUT, names)
    assert {array.dtype.name for array in jax.tree.leaves(state)} == {"bfloat16", "int32"}
    assert torch_bits(export(state, here, LAYOUT, names)) == torch_bits(here)


def test_a_first_moment_kept_in_bfloat16_widens_in_torch_without_loss(module):
    tx = optax.adam(LR, mu_dtype="bfloat16")
    _, state = go_on_in_optax(tx, to_flax(WEIGHTS), tx.init(to_flax(WEIGHTS)), GRADIENTS[:1])
    optimizer = adam(module)
    made = export(state, optimizer.state_dict(), LAYOUT, names_of(module, optimizer))
    optimizer.load_state_dict(made)
    for i, kept in optimizer.state_dict()["state"].items():
        assert made["state"][i]["exp_avg"].dtype == torch.bfloat16
        assert made["state"][i]["exp_avg_sq"].dtype == kept["exp_avg"].dtype == torch.float32
        assert torch.equal(kept["exp_avg"], made["state"][i]["exp_avg"].float())


def test_neither_side_sees_what_the_other_does_later(module):
    optimizer = stepped(module, adam(module))
    names = names_of(module, optimizer)
    state = load(bare(to_flax(WEIGHTS)), optimizer.state_dict(), LAYOUT, names)
    before = bits(state)
    optimizer.load_state_dict(export(state, optimizer.state_dict(), LAYOUT, names))
    stepped(module, optimizer)
    assert bits(state) == before


def test_arrays_lie_where_those_lay_that_they_replace(module):
    optimizer = stepped(module, adam(module))
    state = jax.device_put(bare(to_flax(WEIGHTS)), jax.devices()[0])
    filled = load(state, optimizer.state_dict(), LAYOUT, names_of(module, optimizer))
    assert all(array.committed for array in jax.tree.leaves(filled))
    free = load(bare(to_flax(WEIGHTS)), optimizer.state_dict(), LAYOUT, names_of(module, optimizer))
    assert not any(array.committed for array in jax.tree.leaves(free))


def test_moments_of_a_packed_weight_go_to_the_kernels_it_holds():
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(N * H, N)
    optimizer, layout = stepped(module, adam(module)), transfer.LAYOUTS["torch_mha"]
    packed = {key: p.detach() for key, p in module.named_parameters()}
    kernel, out, bias = (N * H, N, H), (N, H, N * H), (N, H)
    shapes = {f"{x}_proj.kernel": kernel for x in "qkv"} | {"out_proj.kernel": out}
    shapes |= {f"{x}_proj.bias": bias for x in "qkv"} | {"out_proj.bias": (N * H,)}
    here, names = optimizer.state_dict(), names_of(module, optimizer)
    state = load(bare(layout.to_flax(packed, shapes)), here, layout, names)
    keys = optimizer.state[module.in_proj_weight]["exp_avg_sq"][N * H : 2 * N * H]
    assert np.array_equal(state[0].nu["k_proj.kernel"], keys.T.reshape(kernel))
    assert torch_bits(export(state, here, layout, names)) == torch_bits(here)


def numpy_state(state):
    numpy = {i: {n: t.numpy() for n, t in kept.items()} for i, kept in state["state"].items()}
    return state | {"state": numpy}


def whole_steps(state):
    whole = {i: kept | {"step": int(kept["step"])} for i, kept in state["state"].items()}
    return state | {"state": whole}


SPELLINGS = {"NumPy arrays": numpy_state, "steps that are ints": whole_steps}


@pytest.mark.parametrize("spelt", SPELLINGS.values(), ids=SPELLINGS)
def test_other_spellings_of_a_state_dict(spelt, module):
    optimizer = stepped(module, adam(module))
    here, names = optimizer.state_dict(), names_of(module, optimizer)
    state = bare(to_flax(WEIGHTS))
    assert bits(load(state, spelt(here), LAYOUT, names)) == bits(load(state, here, LAYOUT, names))


def test_names_are_a_list_or_the_optimizer_s_own(module):
    optimizer = stepped(module, torch.optim.Adam(module.named_parameters()))
    here, state = optimizer.state_dict(), bare(to_flax(WEIGHTS))
    want = bits(load(state, here, LAYOUT))
    assert bits(load(state, here, LAYOUT, dict(module.named_parameters()))) == want
    assert bits(load(state, here, LAYOUT, [name for name, _ in module.named_parameters()])) == want
    assert torch_bits(export(load(state, here, LAYOUT), here, LAYOUT)) == torch_bits(here)


@pytest.mark.parametrize("t", [1, 4, 100])
def test_at_the_default_b2_an_update_of_optax_is_a_little_smaller(t):
    second = optax.tree.bias_correction(np.ones(1, np.float32), 0.999, np.int32(t))
    exact = 1 / (1 - 0.999**t)
    assert 5e-6 < 1 - np.sqrt(exact / float(second[0])) < 1.1e-5


SPELLINGS_OF_A_TABLE = {
    "tied, under the other name": transfer.Layout(
        transfer.row("head.weight", "embedding"), transfer.tied("embed.weight", "head.weight")
    ),
    "another spelling": transfer.spellings(
        transfer.Layout(transfer.row("word.weight", "embedding")),
        transfer.Layout(transfer.row("embed.weight", "embedding")),
    ),
}


@pytest.mark.parametrize("name", SPELLINGS_OF_A_TABLE)
def test_a_moment_has_the_name_by_which_torch_knows_its_parameter(name):
    layout = SPELLINGS_OF_A_TABLE[name]
    embed = torch.nn.Embedding(11, 5)
    optimizer = stepped(embed, adam(embed))
    here, names = optimizer.state_dict(), ["embed.weight"]
    state = load(bare({"embedding": np.zeros((11, 5), np.float32)}), here, layout, names)
    assert torch_bits(export(state, here, layout, names)) == torch_bits(here)
