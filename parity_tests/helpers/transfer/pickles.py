"""Files as torch writes them: a state dict of tensors of every kind."""

from collections import OrderedDict

import torch

torch.manual_seed(0)
PACKED = torch.randn(6, 5)
STATE = OrderedDict(
    {
        "plain": torch.randn(3, 5),
        "bf16": torch.randn(7).to(torch.bfloat16),
        "f16": torch.randn(2, 3).half(),
        "f64": torch.randn(2).double(),
        "ids": torch.arange(4),
        "scalar": torch.tensor(3.0),
        "none": torch.zeros(0, 5),
        "transposed": torch.randn(5, 3).T,
        "upper": PACKED[:3],
        "lower": PACKED[3:, ::2],
        "tied": PACKED[:3],
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "expanded": torch.randn(1, 3).expand(2, 3),
    }
)
FORMS = {"zip": True, "legacy": False}


def saved(path, what, zipped=True):
    torch.save(what, path, _use_new_zipfile_serialization=zipped)
    return path
