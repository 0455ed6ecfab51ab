"""Whole models on eight devices: fine-tuned as on one."""

from itertools import product
from operator import attrgetter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import P
from jax.sharding import NamedSharding

from helpers.attention.meshes import assert_near, mesh, moved
from jax_attn import models, transfer

pytestmark = pytest.mark.filterwarnings("error")
V, D, N, M, LAYERS, B, T, STEPS = 31, 32, 8, 44, 2, 4, 7, 3
CONFIGS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "vocab_size": V, "hidden_size": D}
    | {"num_attention_heads": N, "num_key_value_heads": 4, "num_hidden_layers": LAYERS}
    | {"intermediate_size": M},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "vocab_size": V, "n_embd": D, "n_head": N}
    | {"n_layer": LAYERS, "n_positions": 16, "n_inner": M},
}
CONFIGS["mixtral"] = CONFIGS["llama"] | {"architectures": ["MixtralForCausalLM"]}
CONFIGS["gpt_oss"] = CONFIGS["llama"] | {"architectures": ["GptOssForCausalLM"], "head_dim": 4}
CONFIGS["gpt_oss"] |= {"num_local_experts": 8, "sliding_window": 3}
# In a pass: over features, keys, the MLP's features, the vocabulary and all tokens.
ADDITIONS = LAYERS * (4 * D + T + M) + V + B * T
COLUMNS, ROWS = P(None, "heads"), P("heads")
CUTS = {
    "layers.{layer}.attention.q_proj.kernel": COLUMNS,
    "layers.{layer}.attention.k_proj.kernel": COLUMNS,
    "layers.{layer}.attention.v_proj.kernel": COLUMNS,
    "layers.{layer}.attention.out_proj.kernel": ROWS,
}
MLP = {"layers.{layer}.mlp.up.kernel": COLUMNS, "layers.{layer}.mlp.down.kernel": ROWS}
CUTS_OF_MLP = {
    "gpt2": MLP,
    "llama": MLP | {"layers.{layer}.mlp.gate.kernel": COLUMNS},
    "mixtral": {f"layers.{{layer}}.mlp.experts.{x}.kernel": ROWS for x in ("gate", "up", "down")},
}
CUTS_OF_MLP["gpt_oss"] = CUTS_OF_MLP["mixtral"] | {
    path.replace("kernel", "bias"): ROWS for path in CUTS_OF_MLP["mixtral"]
}


def trained(model, place=jnp.asarray):
    """The losses of a few steps of AdamW to predict the next token, and the parameters then."""
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, tokens):
        def loss(model):
            logits = model(tokens[:, :-1]).logits
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    batches = np.random.default_rng(0).integers(1, V, (STEPS, B, T + 1))
    losses = [step(model, optimizer, place(tokens)) for tokens in batches]
    return losses, transfer.flatten(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("llama", "auto"), ("gpt2", "explicit"), ("mixtral", "auto"), ("mixtral", "explicit")),
        *(("gpt_oss", "auto"), ("gpt_oss", "explicit")),
    ],
)
def test_fine_tuning_is_that_of_one_device(family, kind, tmp_path):
    config = {"model_type": family, **CONFIGS[family]}
    with jax.enable_x64(True):
        untrained = models.from_config(config, dtype=np.float64, rngs=nnx.Rngs(0))
        models.save(untrained, tmp_path / "flax", to="flax")
        on = mesh(kind, rows=2, heads=4)
        cuts = CUTS | CUTS_OF_MLP[family]
        sharding = {path: NamedSharding(on, cut) for path, cut in cuts.items()}
        model = models.load(tmp_path / "flax", sharding=sharding)
        rows = NamedSharding(on, P("rows"))
        with jax.set_mesh(on):
            found = trained(model, lambda tokens: jax.device_put(tokens, rows))
        for layer, (path, at) in product(model.layers, sharding.items()):
            kernel = attrgetter(path.removeprefix("layers.{layer}."))(layer).get_value()
            assert kernel.sharding.is_equivalent_to(at, kernel.ndim)
        wanted, near = (trained(m) for m in (untrained, moved(models.load(tmp_path / "flax"))))
        assert_near(found, wanted, near, additions=ADDITIONS, passes=2 * STEPS)
