"""Big checkpoints: how fast they are read, and how much memory that takes beyond what is kept.

    python parity_tests/evidence/scripts/files.py [--gib 3] [--rounds 5]

writes a sharded checkpoint of that size (bfloat16 and float32) into a temporary folder, then
reads it, in interleaved rounds and each time in a fresh process that has just been through the
files' bytes: with safetensors itself into NumPy, tensor by tensor through our lazy mapping, and by
`transfer.load` into an NNX module, through a table that transposes and splits heads. All are given
memory in pages of one size. Anonymous memory is sampled from outside the process; the bound is the
largest tensor and 200 MiB. Writes profile/files.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Specs = dict[str, tuple[tuple[int, ...], str]]

D, N, K, H, WIDE, VOCAB = 2048, 16, 4, 128, 8192, 32000
GIB, MIB = 2**30, 2**20
SHARD_BYTES = GIB
BEYOND = 200 * MIB
"""What reading may take beyond what is kept and the largest tensor."""
SAMPLE_SECONDS = 1e-3
"""Between two looks at a process's memory."""


def shapes(gib: float) -> Specs:
    """Torch keys to shape and dtype: as many layers as make about `gib`."""
    projections = {"q_proj": (N * H, D), "k_proj": (K * H, D), "v_proj": (K * H, D)}
    specs = {"embed.weight": ((VOCAB, D), "bfloat16")}
    layer = 0
    while layer == 0 or sum(map(nbytes, specs.values())) < gib * GIB:
        mlp_dtype = ("bfloat16", "float32")[layer % 2]
        for name, shape in {**projections, "out_proj": (D, N * H)}.items():
            specs[f"layers.{layer}.attn.{name}.weight"] = (shape, "bfloat16")
        specs[f"layers.{layer}.up.weight"] = ((WIDE, D), mlp_dtype)
        specs[f"layers.{layer}.down.weight"] = ((D, WIDE), mlp_dtype)
        layer += 1
    return specs


def nbytes(spec: tuple[tuple[int, ...], str]) -> int:
    shape, dtype = spec
    return int(np.prod(shape)) * {"bfloat16": 2, "float32": 4}[dtype]


class Drawn(Mapping):
    """Random tensors, each made when it is asked for."""

    def __init__(self, specs: Specs):
        self.specs = specs

    def __getitem__(self, key: str) -> np.ndarray:
        import ml_dtypes  # noqa: F401  NumPy's bfloat16

        rng = np.random.default_rng(list(self.specs).index(key))
        raw = rng.integers(0, 256, nbytes(self.specs[key]), np.uint8)
        shape, dtype = self.specs[key]
        return raw.view(dtype).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def describe(self, key: str) -> Any:
        from jax_attn.transfer.arrays import Spec

        return Spec(*self.specs[key])


def abstract_module(layers: int) -> tuple[Any, Any]:
    """An NNX module of these shapes, without arrays, and the table that fills it."""
    import jax.numpy as jnp
    from flax import nnx

    import jax_attn
    from jax_attn.transfer import EMBEDDING, LAYOUTS, LINEAR

    bf16 = {"param_dtype": jnp.bfloat16}

    class Block(nnx.Module):
        def __init__(self, i, rngs):
            options = {"use_bias": False, "rngs": rngs}
            dtype = (jnp.bfloat16, jnp.float32)[i % 2]
            self.attn = jax_attn.GroupedQueryAttention(D, N, K, head_dim=H, **bf16, **options)
            self.up = nnx.Linear(D, WIDE, param_dtype=dtype, **options)
            self.down = nnx.Linear(WIDE, D, param_dtype=dtype, **options)

    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.embed = nnx.Embed(VOCAB, D, **bf16, rngs=rngs)
            self.layers = nnx.List([Block(i, rngs) for i in range(layers)])

    layout = EMBEDDING.under("embed", "embed")
    layout += LAYOUTS["gqa"].under("layers.{i}.attn", "layers.{i}.attn")
    for name in ("up", "down"):
        layout += LINEAR.under(f"layers.{{i}}.{name}", f"layers.{{i}}.{name}")
    return nnx.eval_shape(Model), layout


# --- in a process of its own: what is made ready, and what is timed --------------------------


def with_safetensors(folder: Path) -> Callable[[], dict]:
    import ml_dtypes  # noqa: F401  NumPy's bfloat16
    from safetensors import safe_open

    def read() -> dict:
        arrays = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="np") as file:
                arrays |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return arrays

    return read


def with_mapping(folder: Path) -> Callable[[], dict]:
    from jax_attn.transfer import load_checkpoint

    def read() -> dict:
        with load_checkpoint(folder) as checkpoint:
            return {key: checkpoint[key] for key in checkpoint}

    return read


def with_load(folder: Path) -> Callable[[], dict]:
    import jax

    from jax_attn import transfer

    with transfer.load_checkpoint(folder) as checkpoint:
        layers = sum(key.endswith("q_proj.weight") for key in checkpoint)
    module, layout = abstract_module(layers)
    jax.device_put(np.ones(2)).block_until_ready()  # the device is there

    def read() -> dict:
        with transfer.load_checkpoint(folder) as checkpoint:
            transfer.load(module, checkpoint, layout)
        return jax.block_until_ready(transfer.flatten(module))

    return read


READ = {"safetensors": with_safetensors, "mapping": with_mapping, "load": with_load}


def serve(way: str, folder: Path) -> None:
    """Get ready, say so, wait for a line, do it, say how long it took, wait again."""
    timed = READ[way](folder)
    for path in folder.glob("*.safetensors"):  # from the page cache, whoever comes next
        with path.open("rb", buffering=0) as file:
            while file.read(MIB):
                pass
    print("ready", flush=True)
    sys.stdin.readline()
    started = time.perf_counter()
    kept = timed()
    seconds = time.perf_counter() - started
    sizes = [array.nbytes for array in kept.values()]
    print(json.dumps({"seconds": seconds, "kept": sum(sizes)}), flush=True)
    sys.stdin.readline()


# --- from outside ---------------------------------------------------------------------------


def anonymous(pid: int) -> int:
    """Bytes of a process's memory that no file backs."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def measured(way: str, folder: Path) -> dict[str, float]:
    """seconds; kept, and the most beyond it and what the process had before, in bytes."""
    command = [sys.executable, __file__, "--alone", way, str(folder)]
    # NumPy alone asks for huge pages, of which a virtual machine may be slow to find one.
    same_pages = os.environ | {"NUMPY_MADVISE_HUGEPAGE": "0"}
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=same_pages) as process:
        assert process.stdout.readline() == "ready\n", way
        before = most = anonymous(process.pid)
        done = threading.Event()

        def watch() -> None:
            nonlocal most
            while not done.wait(SAMPLE_SECONDS):
                most = max(most, anonymous(process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        print(file=process.stdin, flush=True)
        timed = json.loads(process.stdout.readline())
        done.set()
        watcher.join()
        print(file=process.stdin, flush=True)
    return timed | {"beyond": most - before - timed["kept"]}


def compared(gib: float, rounds: int) -> dict:
    """Every way of reading, and the bound of what it may take."""
    from jax_attn.transfer import save_checkpoint

    specs = shapes(gib)
    size, largest = sum(map(nbytes, specs.values())), max(map(nbytes, specs.values()))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_checkpoint(folder / "model.safetensors", Drawn(specs), shard_bytes=SHARD_BYTES)
        runs = [{way: measured(way, folder) for way in READ} for _ in range(rounds)]
    ways = {}
    for way in READ:
        assert all(run[way]["kept"] == size for run in runs), way
        ratios = [run["safetensors"]["seconds"] / run[way]["seconds"] for run in runs]
        ways[way] = {
            "gib_per_second": size / GIB / statistics.median(r[way]["seconds"] for r in runs),
            "of_safetensors": statistics.median(ratios),
            "beyond_mib": max(run[way]["beyond"] for run in runs) / MIB,
        }
    return {
        "gib": size / GIB,
        "tensors": len(specs),
        "bound_mib": (largest + BEYOND) / MIB,
        "rounds": rounds,
        "read": ways,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        serve(options.alone[0], Path(options.alone[1]))
    else:
        from measuring import keep

        print(keep("files", compared(options.gib, options.rounds)))
