"""Families of checkpoints: the traits of their models, and the transfer tables of their weights."""

from jax_attn.families.bert import BERT
from jax_attn.families.config import Config
from jax_attn.families.falcon import BLOOM, FALCON
from jax_attn.families.family import Family
from jax_attn.families.gemma import GEMMA
from jax_attn.families.gpt2 import GPT2, GPT_BIGCODE
from jax_attn.families.gpt_neox import GPT_NEOX
from jax_attn.families.gpt_oss import GPT_OSS
from jax_attn.families.llama import LLAMA, LLAMA_META
from jax_attn.families.opt import OPT
from jax_attn.families.phi import PHI
from jax_attn.families.t5 import T5
from jax_attn.families.vit import VIT
from jax_attn.transfer.problems import Problem, TransferError, nearest

_ALL = (
    *(BERT, BLOOM, FALCON, GEMMA, GPT2, GPT_BIGCODE, GPT_NEOX, GPT_OSS, LLAMA, LLAMA_META, OPT),
    *(PHI, T5, VIT),
)
FAMILIES = {family.name: family for family in _ALL}
"""name -> family."""


def known_types() -> list[str]:
    """Return the model_types of all families, in alphabetical order."""
    return sorted(name for family in _ALL for name in family.model_types)


def model_family(config: Config) -> Family:
    """Return the family of a config with a whole model here, or raise TransferError."""
    if (family := family_of(config)) is not None:
        return family
    known = sorted({name for f in _ALL for name in f.types_of_models})
    text = f"expected one of {', '.join(known)}, got {said_type(config)}"
    hint = nearest(str(config.get("model_type")), known)
    problem = Problem("refused", "config.json model_type", text, hint)
    raise TransferError("reading the config", [problem])


def said_type(config: Config) -> str:
    """Say which model_type a config of an unknown family has, or which classes if it has none."""
    kind, classes = config.get("model_type"), config.get("architectures")
    if kind is not None:
        return repr(kind)
    return f"none, and architectures {classes!r}" if classes else "none, and no architectures"


def model_problems(config: Config) -> list[Problem]:
    """List the reasons why a config has no whole model here; empty if it has one."""
    try:
        model_family(config).model_traits(config, ())
    except TransferError as error:
        return error.problems
    return []


def family_of(config: Config) -> Family | None:
    """Return the family of a config.json or a params.json; None if it is unknown.

    The family is found by model_type or, in a config without one, by the class in `architectures`,
    or by the config's keys. A nested text_config does not count: the model around it spells the
    text model's keys in its own way, and has other keys that no table here handles.
    """
    by_type = next((f for f in _ALL if f.model_type(config) in f.model_types), None)
    if by_type is not None or config.get("model_type") is not None:
        return by_type
    return next((f for f in _ALL if f.known_by and all(key in config for key in f.known_by)), None)
