"""What `jax-attn verify CHECKPOINT` costs, of whole models and of single layers of a large one.

    python parity_tests/evidence/scripts/whole_models.py [--folder FOLDER] [--output FILE] [ROW ...]

writes checkpoints of BERT's base size, GPT-2's small size and Llama's 7B size (14 GB; bfloat16, the
same random numbers in every layer) below FOLDER, verifies each as a user does, in a process of its
own, and writes profile/whole_models.json: seconds, the most memory, and the verdicts.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from measuring import PROFILE, as_text
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig

from jax_attn.transfer import save_checkpoint
from jax_attn.transfer.arrays import LazyMapping, Spec

SHARD = 5 * 10**9
LAYER = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    *("input_layernorm", "post_attention_layernorm"),
)
# name -> its checkpoint, and what else `verify` is told
ROWS = {
    "BERT, base": ("bert", ()),
    "GPT-2, small": ("gpt2", ()),
    "one layer of Llama, 7B": ("llama", ("--layers", "31")),
}


class SevenBillion(LazyMapping[np.ndarray]):
    """Tensors of a Llama of 7B, drawn when they are read; those of one shape are the same."""

    def __init__(self, config: LlamaConfig):
        D, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
        shapes = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
        self._shapes = {"model.embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}
        self._shapes |= {"model.norm.weight": (D,)}
        for i in range(config.num_hidden_layers):
            for name in LAYER:
                usual = (D,) if name.endswith("norm") else (D, D)
                shape = shapes.get(name.rpartition(".")[2], usual)
                self._shapes[f"model.layers.{i}.{name}.weight"] = shape
        self._drawn: dict[tuple[int, ...], np.ndarray] = {}
        super().__init__(self._shapes)

    def __getitem__(self, key: str) -> np.ndarray:
        shape = self._shapes[key]
        if shape not in self._drawn:
            rng = np.random.default_rng(math.prod(shape))
            drawn = rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5
            drawn = 1 + 0.1 * drawn * shape[-1] ** 0.5 if len(shape) == 1 else drawn
            self._drawn[shape] = drawn.astype(ml_dtypes.bfloat16)
        return self._drawn[shape]

    def describe(self, key: str) -> Spec:
        return Spec(self._shapes[key], "bfloat16")


def write(name: str, folder: Path) -> None:
    torch.manual_seed(0)
    if name == "bert":
        BertForMaskedLM(BertConfig()).save_pretrained(folder)
    elif name == "gpt2":
        GPT2LMHeadModel(GPT2Config()).save_pretrained(folder)
    else:
        folder.mkdir(parents=True)
        config = LlamaConfig(architectures=["LlamaForCausalLM"])
        config.save_pretrained(folder)
        save_checkpoint(folder / "model.safetensors", SevenBillion(config), shard_bytes=SHARD)


def verified(folder: Path, options: tuple[str, ...]) -> dict[str, Any]:
    """Seconds and GiB of one command, and its verdicts."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "jax_attn", "verify", str(folder), "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    document = json.loads(process.stdout.read())
    _, _, usage = os.wait4(process.pid, 0)
    return {
        "seconds": time.perf_counter() - begun,
        "GiB": usage.ru_maxrss / 2**20,
        "GB of the file": sum(f.stat().st_size for f in folder.glob("*.safetensors")) / 1e9,
        "verdicts": {case["name"]: case["verdict"] for case in document["cases"]},
        "largest": {
            case["name"]: max(t["fraction"] for t in case["tensors"].values())
            for case in document["cases"]
        },
    }


def main(folder: Path, output: Path, names: list[str]) -> None:
    rows = {}
    for name in names:
        kind, options = ROWS[name]
        if not (folder / kind).exists():
            write(kind, folder / kind)
        rows[name] = verified(folder / kind, options)
        print(name, rows[name], flush=True)
        output.write_text(as_text({"rows": rows}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--output", type=Path, default=PROFILE / "whole_models.json")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="; ".join(ROWS))
    given = parser.parse_args()
    if unknown := [name for name in given.rows if name not in ROWS]:
        parser.error(f"ROW: expected some of {'; '.join(ROWS)}, got {'; '.join(unknown)}")
    with tempfile.TemporaryDirectory() as temporary:
        main(given.folder or Path(temporary), given.output, given.rows or list(ROWS))
