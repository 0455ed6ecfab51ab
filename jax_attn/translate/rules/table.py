"""The one table of rules, by the operator's name with its overload."""

from jax_attn.translate.rules.pointwise import POINTWISE
from jax_attn.translate.rules.rule import Rule

RULES: dict[str, Rule] = {**POINTWISE}
