"""Put all rules into one table, by the operator's name with its overload."""

from jax_attn.translate.rules.layers.activations import ACTIVATIONS
from jax_attn.translate.rules.layers.attention import ATTENTION
from jax_attn.translate.rules.layers.convolutions import CONVOLUTIONS
from jax_attn.translate.rules.layers.losses import LOSSES
from jax_attn.translate.rules.layers.norms import NORMS
from jax_attn.translate.rules.layers.pools import POOLS
from jax_attn.translate.rules.layers.recurrent import RECURRENT
from jax_attn.translate.rules.layers.resizing import RESIZING
from jax_attn.translate.rules.operators.creation import CREATION
from jax_attn.translate.rules.operators.fourier import FOURIER
from jax_attn.translate.rules.operators.indexing import INDEXING
from jax_attn.translate.rules.operators.logical import LOGICAL
from jax_attn.translate.rules.operators.parts import PARTS
from jax_attn.translate.rules.operators.pointwise import POINTWISE
from jax_attn.translate.rules.operators.products import PRODUCTS
from jax_attn.translate.rules.operators.random import RANDOM
from jax_attn.translate.rules.operators.reductions import REDUCTIONS
from jax_attn.translate.rules.operators.scattering import SCATTERING
from jax_attn.translate.rules.operators.shapes import SHAPES
from jax_attn.translate.rules.rule import Rule

RULES: dict[str, Rule] = {
    **POINTWISE,
    **LOGICAL,
    **ACTIVATIONS,
    **REDUCTIONS,
    **PRODUCTS,
    **SHAPES,
    **PARTS,
    **CREATION,
    **INDEXING,
    **SCATTERING,
    **CONVOLUTIONS,
    **POOLS,
    **RESIZING,
    **NORMS,
    **RECURRENT,
    **FOURIER,
    **ATTENTION,
    **RANDOM,
    **LOSSES,
}
