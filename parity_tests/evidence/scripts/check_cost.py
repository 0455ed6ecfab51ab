"""What `parity.check` costs: time and memory by the model's size and by the length of its input.

    python parity_tests/evidence/scripts/check_cost.py

checks a BERT of transformers against ours, with layout and gradients, eager and jitted: of 1 to 109
million parameters at T = 64, and of the smallest at other lengths; each in its own process. Beside
it the floor: one forward and backward pass of torch in float64, and one compilation of ours.
Writes profile/check_cost.json. `check_cost.py 17M 64` measures one alone and prints it.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np
import torch
from measuring import keep, seconds
from transformers import BertConfig, BertModel

from jax_attn import models as whole_models
from jax_attn import parity, transfer
from jax_attn.families import BERT
from jax_attn.models import Model
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.port import Port
from jax_attn.parity.run.reference import Reference
from jax_attn.parity.run.transforms import forward_and_gradients

# name -> D, N, layers, the perceptron's width, words.
SIZES = {
    "1M": (128, 2, 4, 512, 3000),
    "6M": (256, 4, 4, 1024, 10000),
    "17M": (384, 6, 6, 1536, 17000),
    "109M": (768, 12, 12, 3072, 30522),
}
LENGTHS = (32, 128, 256, 512, 1024)
B, T, LONGEST = 2, 64, 1024
ROWS = [*((size, T) for size in SIZES), *(("1M", length) for length in LENGTHS)]


def models(size: str) -> tuple[BertModel, Model, transfer.Layout]:
    """The same weights on both sides."""
    D, N, layers, width, words = SIZES[size]
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=words,
        hidden_size=D,
        num_hidden_layers=layers,
        num_attention_heads=N,
        intermediate_size=width,
        max_position_embeddings=LONGEST,
        attn_implementation="eager",
    )
    reference = BertModel(config, add_pooling_layer=False).eval()
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        port = whole_models.load(folder)
    return reference, port, BERT.model(config.to_dict(), reference.state_dict())


def theirs(model: BertModel, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    own_BT = torch.arange(tokens.shape[1]) < lengths[:, None]
    hidden_BTD = model(tokens, attention_mask=own_BT.long()).last_hidden_state
    return hidden_BTD * own_BT[..., None].to(hidden_BTD.dtype)


def ours(model: Model, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    own_BT = jax.numpy.arange(tokens.shape[1]) < lengths[:, None]
    return model(tokens, lengths).hidden * own_BT[..., None]


def peak() -> float:
    """GiB, the most that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def floor(reference: BertModel, port: Model, inputs: dict[str, np.ndarray]) -> dict:
    """Seconds of what no check does without; after the check, whose memory it does not add to."""
    given = Inputs.of(inputs, np.dtype(np.float32))
    called = Reference(reference, theirs, given)
    rng = np.random.default_rng(1)
    shape = called.outputs("float32")["output"].shape
    cotangents = {"output": rng.standard_normal(shape).astype(np.float32)}
    forward, *args = Port(port, ours, given).bind()
    step = jax.jit(lambda *args: forward_and_gradients(forward, *args))
    return {
        "one run in float64, seconds": seconds(lambda: called.exact(cotangents)),
        "one compilation, seconds": seconds(lambda: step.lower(*args, cotangents).compile()),
    }


def measured(size: str, length: int) -> dict[str, Any]:
    """One check, in this process."""
    reference, port, layout = models(size)
    rng = np.random.default_rng(0)
    inputs = {
        "tokens": rng.integers(0, SIZES[size][-1], (B, length)).astype(np.int32),
        "lengths": np.array([length, length - 5], np.int32),
    }
    before, begun = peak(), time.perf_counter()
    processor = time.process_time()
    result = parity.check(
        reference, port, inputs, layout=layout, reference_call=theirs, port_call=ours
    )
    return {
        "parameters": sum(p.numel() for p in reference.parameters()),
        "B, T": [B, length],
        "seconds": time.perf_counter() - begun,
        "processor seconds": time.process_time() - processor,
        "GiB above the models": peak() - before,
        "threads of torch": torch.get_num_threads(),
        "verdict": str(result.verdict),
        "tensors": len(result.tensors),
        **floor(reference, port, inputs),
    }


def alone(size: str, length: int) -> dict[str, Any]:
    """One check, in a process of its own: a peak is that of a process."""
    command = [sys.executable, __file__, size, str(length)]
    row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    print(row, file=sys.stderr, flush=True)
    return row


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(measured(sys.argv[1], int(sys.argv[2]))))
    else:
        print(keep("check_cost", {"checks": [alone(*row) for row in ROWS]}))
