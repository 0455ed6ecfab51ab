"""The one table of rules: its names are torch's, and each stands in one file."""

import collections
import importlib
import pkgutil

import torch

from helpers.rules.operators import operator
from jax_attn.translate import rules
from jax_attn.translate.rules.table import RULES


def tables():
    for module in pkgutil.walk_packages(rules.__path__, f"{rules.__name__}."):
        name = module.name.rpartition(".")[2].upper()
        table = getattr(importlib.import_module(module.name), name, None)
        if isinstance(table, dict):
            yield table


def test_each_operator_stands_in_one_file():
    counts = collections.Counter(name for table in tables() for name in table)
    assert {name: count for name, count in counts.items() if count > 1} == {}
    assert set(counts) == set(RULES)


def test_each_name_is_an_operator_of_torch():
    named = [name for name in RULES if name.startswith("aten.")]
    assert all(isinstance(operator(name), torch._ops.OpOverload) for name in named)
