"""The traits of a model, as its config states them: plain data that needs no framework.

`Traits` describe one attention block, `BlockTraits` the block around it, `ModelTraits` a whole
model. A family reads them from a config; `jax_attn.models` builds a model from them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jax_attn.transfer.table.steps import Sizes


class RotaryTraits(NamedTuple):
    """Rotary positions, as in `jax_attn.attention.Rotary`; dim is None if all of H is rotated.

    scaling: the name and the fields of one of its scalings: ("Linear", {"factor": 4.0}).
    """

    base: float = 10000.0
    dim: int | None = None
    interleaved: bool = False
    scaling: tuple[str, Mapping[str, Any]] | None = None

    @property
    def stretches(self) -> bool:
        """True if the frequencies depend on the sequence length."""
        return self.scaling is not None and self.scaling[0] == "DynamicNTK"


class NormTraits(NamedTuple):
    """A norm. kind: "rms" or "layer". adds_one: the scale is 1 + the weight, as in Gemma."""

    kind: Literal["rms", "layer"]
    epsilon: float
    adds_one: bool = False


class BiasTraits(NamedTuple):
    """A bias added to the scores, by the positions of query and key.

    kind: "alibi" (fields: factor, which multiplies the slopes) or "relative" (T5's, from a table;
        fields: buckets, max_distance, bidirectional). rounded: slopes and their products with
        positions are rounded to bfloat16, whatever the model's dtype, as in Falcon.
    """

    kind: Literal["alibi", "relative"]
    fields: Mapping[str, Any]
    rounded: bool = False


@dataclass(frozen=True)
class Traits:
    """The traits of one attention block. D embed_dim, N and K heads, H head_dim.

    kdim, vdim: features of keys and values; D when None. scale: 1/√H when None. is_causal: a query
    sees no later key. window: how many keys a query sees, the last of them its own; None for all.
    cross: keys and values come from another sequence. add_bias_kv: every query sees a learned key
    and its value, as in torch.nn.MultiheadAttention. sinks: each query head has a learned score
    that takes weight and has no value, as in gpt-oss. lender: the torch prefix of the block whose
    table of position biases this one borrows; "" for none.
    """

    embed_dim: int
    sizes: Sizes
    kdim: int | None = None
    vdim: int | None = None
    use_bias: bool = True
    use_out_bias: bool = True
    is_causal: bool = False
    cross: bool = False
    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    qk_norm: NormTraits | None = None
    rotary: RotaryTraits | None = None
    bias: BiasTraits | None = None
    add_bias_kv: bool = False
    sinks: bool = False
    lender: str = ""

    @property
    def widths(self) -> tuple[int, int]:
        """(kdim, vdim), with D for None."""
        return self.kdim or self.embed_dim, self.vdim or self.embed_dim


# --- whole models -------------------------------------------------------------------------------

ACTIVATION_NAMES = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
"""A config's name of an activation -> its name in `jax_attn.models`."""


class ExpertTraits(NamedTuple):
    """Several MLPs, of which a router chooses some for each token and sums their outputs.

    number: how many there are. chosen: how many a token is sent to, those of the largest
    probabilities, which weight their outputs. are_normalized: those are divided by their sum.
    """

    number: int
    chosen: int
    are_normalized: bool


class SwigluTraits(NamedTuple):
    """The product of gate and up in gpt-oss: (up + 1) · gate · sigmoid(alpha · gate).

    limit: larger gates count as this, and up counts as the nearest number in ±limit.
    """

    alpha: float
    limit: float


class MLPTraits(NamedTuple):
    """down(activation(up(x))), or down(activation(gate(x)) · up(x)) if it is gated.

    width: the number of features after `up`. activation: a value of ACTIVATION_NAMES. use_bias: of
    all layers, and of the router. experts: if there are several of them. swiglu: what takes the
    place of activation(gate(x)) · up(x), if anything does.
    """

    width: int
    activation: str
    is_gated: bool = False
    use_bias: bool = True
    experts: ExpertTraits | None = None
    swiglu: SwigluTraits | None = None


NormPlacement = Literal["pre", "post", "sandwich", "parallel"]
"""The placement of the norms in a block.

pre: x + f(norm(x)), for attention and MLP in turn. post: norm(x + f(x)). sandwich:
x + norm(f(norm(x))). parallel: x + attention(norm(x)) + mlp(norm(x)).
"""


@dataclass(frozen=True)
class BlockTraits:
    """A block: attention, an MLP, and the norms around them.

    shares_norm: attention and MLP of a parallel block read one norm's output. cross: attention to
    another sequence, with a norm of its own, between a "pre" block's attention and its MLP.
    """

    attention: Traits
    mlp: MLPTraits
    norm: NormTraits
    placement: NormPlacement
    shares_norm: bool = False
    cross: Traits | None = None


class PositionTraits(NamedTuple):
    """A learned table of positions.

    rows: those of the table. offset: the row of position 0. counts: what advances the position:
    "places" (every place of a row of tokens, padding too), "mask" (places that the attention mask
    shows) or "tokens" (places with a token other than `pad`; padding reads the row `pad`, which
    gets no gradient).
    """

    rows: int
    offset: int = 0
    counts: Literal["places", "mask", "tokens"] = "places"
    pad: int = 0


@dataclass(frozen=True)
class EmbeddingTraits:
    """The map from tokens to vectors: the sum of up to three tables.

    vocab_size: the number of tokens. width: the features of the token table; if it is not D, a
    linear map follows. scale: the factor of token vectors. positions: None without a table of
    positions. types: rows of the table of token types, 0 for none. norm: the norm of the sum. pad:
    the token whose vector gets no gradient from being read, as with torch's padding_idx; None for
    none.
    """

    vocab_size: int
    width: int
    scale: float = 1.0
    positions: PositionTraits | None = None
    types: int = 0
    norm: NormTraits | None = None
    pad: int | None = None


class VocabularyTraits(NamedTuple):
    """The head that gives a logit for each token.

    is_tied: it multiplies by the token table. use_bias: it adds a bias. activation, norm: those of
    a dense layer that comes first; None without such a layer. softcap: that of the logits. scale:
    the factor of the hidden states that it reads, if it is not 1.
    """

    is_tied: bool
    use_bias: bool = False
    activation: str | None = None
    norm: NormTraits | None = None
    softcap: float | None = None
    scale: float | None = None


class ClassifierTraits(NamedTuple):
    """A head for classes.

    reads: "pooled", the pooler's output; "first" or "last", the hidden state of a row's first or
    last token; "each", that of each token. has_dense: a dense layer and tanh come first. use_bias:
    whether the last layer has a bias. pad: the last token is the last one that is not `pad`; None
    if only lengths or a mask show padding.
    """

    reads: Literal["pooled", "first", "last", "each"]
    has_dense: bool = False
    use_bias: bool = True
    pad: int | None = None


@dataclass(frozen=True)
class ModelTraits:
    """A whole model: embedding, blocks, a norm, and the heads that a file may have.

    final_norm: None for none. lm_head, classifier: the traits of these heads if a file has them.
    decoder: the blocks of a decoder that reads what `blocks`, an encoder's, return. It has the same
    embedding and a final norm of its own. () for a model of one stack.
    """

    embed_dim: int
    embedding: EmbeddingTraits
    blocks: tuple[BlockTraits, ...]
    final_norm: NormTraits | None
    lm_head: VocabularyTraits
    classifier: ClassifierTraits
    decoder: tuple[BlockTraits, ...] = ()
