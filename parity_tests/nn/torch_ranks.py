"""One of two processes of torch that share a layer's heads: run as `torch_ranks.py RANK FOLDER`."""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 2


def main(rank: int, folder: Path) -> None:
    """Read the layer and its input from the folder, and write what this process has of a step."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    torch.set_num_threads(1)
    saved = torch.load(folder / "layer.pt", weights_only=False)
    layer, x, cotangent = saved["layer"], saved["x"], saved["cotangent"]
    plan = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel())
    plan["out_proj"] = RowwiseParallel()
    parallelize_module(layer, init_device_mesh("cpu", (RANKS,)), plan)
    layer.num_heads //= RANKS
    layer.num_kv_heads //= RANKS
    output = layer(x, x, x, is_causal=True)
    output.backward(cotangent)
    grads = {name: p.grad.full_tensor() for name, p in layer.named_parameters()}
    arrays = {name: x.numpy() for name, x in {"output": output.detach(), **grads}.items()}
    np.savez(folder / f"rank{rank}.npz", **arrays)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
