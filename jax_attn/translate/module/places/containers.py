"""Name what containers, and modules whose attributes have odd names, hold in the file."""

import keyword
import re

from torch import nn

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
LISTS = (nn.Sequential, nn.ModuleList, nn.ParameterList)
DICTS = (nn.ModuleDict, nn.ParameterDict)


def has_own_class(module: nn.Module) -> bool:
    """Return whether a container is a class in the file, as it has tensors beside its members."""
    is_of_parameters = isinstance(module, (nn.ParameterList, nn.ParameterDict))
    return not is_of_parameters and bool(module._parameters or module._buffers)


def attribute_name(module: nn.Module, name: str) -> str:
    """Return the attribute for what a module holds, whose name in torch may be any string."""
    if name.isidentifier() and not keyword.iskeyword(name):
        return name
    made = re.sub(r"\W|^(?=\d)", "_", name)
    others = {*module._parameters, *module._buffers, *module._modules}
    while keyword.iskeyword(made) or made in others:
        made += "_"
    return made
