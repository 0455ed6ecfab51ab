"""Mistakes planted in what whole models do."""

from dataclasses import replace


def blocks(**changed):
    """Other traits of every block."""
    return lambda t: replace(t, blocks=tuple(replace(b, **changed) for b in t.blocks))


def attention(**changed):
    """Other traits of every block's attention; a function of the traits is called with them."""

    def change(traits):
        made = []
        for block in traits.blocks:
            a = block.attention
            new = {k: v(a) if callable(v) else v for k, v in changed.items()}
            made.append(replace(block, attention=replace(a, **new)))
        return replace(traits, blocks=tuple(made))

    return change


def norm(**changed):
    """Other norms everywhere."""

    def change(traits):
        made = tuple(replace(b, norm=b.norm._replace(**changed)) for b in traits.blocks)
        final = traits.final_norm and traits.final_norm._replace(**changed)
        own = traits.embedding.norm and traits.embedding.norm._replace(**changed)
        embedding = replace(traits.embedding, norm=own)
        return replace(traits, blocks=made, final_norm=final, embedding=embedding)

    return change


def activation(name):
    """Another activation in every MLP."""

    def change(traits):
        made = tuple(replace(b, mlp=b.mlp._replace(activation=name)) for b in traits.blocks)
        return replace(traits, blocks=made)

    return change


def experts(**changed):
    """Other choices of every router."""

    def change(traits):
        return replace(
            traits,
            blocks=tuple(
                replace(b, mlp=b.mlp._replace(experts=b.mlp.experts._replace(**changed)))
                for b in traits.blocks
            ),
        )

    return change


def swiglu(**changed):
    """Other numbers in every product of gate and up."""

    def change(traits):
        made = (
            replace(b, mlp=b.mlp._replace(swiglu=b.mlp.swiglu._replace(**changed)))
            for b in traits.blocks
        )
        return replace(traits, blocks=tuple(made))

    return change


def unclamped(traits):
    """A gated MLP in place of the clamped product: without alpha, the limits and the 1."""
    return replace(
        traits, blocks=tuple(replace(b, mlp=b.mlp._replace(swiglu=None)) for b in traits.blocks)
    )


def scaled(**changed):
    """Other fields of the rotary scaling."""

    def change(a):
        name, fields = a.rotary.scaling
        return a.rotary._replace(scaling=(name, {**fields, **changed}))

    return attention(rotary=change)


def positions(**changed):
    """Another table of positions, of as many rows."""

    def change(traits):
        other = traits.embedding.positions._replace(**changed)
        return replace(traits, embedding=replace(traits.embedding, positions=other))

    return change


def embedding(**changed):
    return lambda t: replace(t, embedding=replace(t.embedding, **changed))


def head(**changed):
    return lambda t: replace(t, lm_head=t.lm_head._replace(**changed))


def classes(**changed):
    return lambda t: replace(t, classifier=t.classifier._replace(**changed))


def turning(**changed):
    """Queries and keys that turn otherwise."""
    return attention(rotary=lambda a: a.rotary._replace(**changed))


def one_key_more(a):
    return a.window and a.window + 1


def one_key_less(a):
    return a.window and a.window - 1


def decoder(change):
    """The same mistake in the decoder alone."""
    return lambda t: replace(t, decoder=change(replace(t, blocks=t.decoder)).blocks)


def cross(**changed):
    """Other traits of every cross-attention."""
    return decoder(
        lambda t: replace(
            t, blocks=tuple(replace(b, cross=replace(b.cross, **changed)) for b in t.blocks)
        )
    )


def tables(**changed):
    """Other buckets of every table of distances."""

    def change(a):
        return a.bias and a.bias._replace(fields=a.bias.fields | changed)

    return attention(bias=change)


def only_the_first_table(traits):
    """Later blocks are lent the bias of the first one."""
    first, *others = traits.blocks
    lent = (replace(b, attention=replace(b.attention, bias=None)) for b in others)
    return replace(traits, blocks=(first, *lent))


def one_layer_off(name):
    """What each layer's attention has of this name is that of its neighbour."""

    def change(traits):
        each = [getattr(b.attention, name) for b in traits.blocks]
        made = (
            replace(b, attention=replace(b.attention, **{name: x}))
            for b, x in zip(traits.blocks, each[1:] + each[:1], strict=True)
        )
        return replace(traits, blocks=tuple(made))

    return change


LARGE = 1e-3

# case -> what is mistaken -> how
MISTAKES = {
    "bert": {
        "an epsilon of 1e-3": norm(epsilon=LARGE),
        "the approximate gelu": activation("gelu_tanh"),
        "norms before attention": blocks(placement="pre"),
        "another activation in the head": head(activation="relu"),
        "causal": attention(is_causal=True),
    },
    "bert, a head of its own": {"the table of tokens as the head": head(is_tied=True)},
    "roberta": {
        "positions from 0": positions(counts="places", pad=0),
        "positions one late": positions(counts="places", offset=2, pad=0),
        "the approximate gelu": activation("gelu_tanh"),
        "an epsilon of 1e-3": norm(epsilon=LARGE),
    },
    "gpt2": {
        "the exact gelu": activation("gelu"),
        "an epsilon of 1e-3": norm(epsilon=LARGE),
        "norms behind attention": blocks(placement="post"),
        "positions from 1": positions(offset=1),
        "no scale": attention(scale=1.0),
    },
    "gpt2, scaled by layer": {"one scale for all layers": attention(scale=None)},
    "gpt_bigcode": {
        "the exact gelu": activation("gelu"),
        "attention and MLP side by side": blocks(placement="parallel"),
        "no scale": attention(scale=1.0),
    },
    "gpt_neox": {
        "one after the other": blocks(placement="pre"),
        "pairs side by side": turning(interleaved=True),
        "all of a head turns": turning(dim=None),
        "the approximate gelu": activation("gelu_tanh"),
    },
    "falcon, groups": {
        "one norm for both": blocks(shares_norm=True),
        "one after the other": blocks(placement="pre"),
        "pairs side by side": turning(interleaved=True),
        "the approximate gelu": activation("gelu_tanh"),
    },
    "gpt2, classes": {"the last token of the mask": classes(pad=None)},
    "falcon, alibi": {
        "slopes that are not scaled": attention(bias=lambda a: a.bias._replace(fields={})),
        "no bias by distance": attention(bias=None),
        "attention and MLP side by side": blocks(placement="parallel"),
    },
    "bloom": {
        "the exact gelu": activation("gelu"),
        "slopes of half the size": attention(
            bias=lambda a: a.bias._replace(fields={"factor": 0.5})
        ),
        "an epsilon of 1e-3": norm(epsilon=LARGE),
    },
    "opt": {
        "positions from row 0": positions(offset=0),
        "padding counted": positions(counts="places"),
        "silu": activation("silu"),
        "norms behind": blocks(placement="post"),
    },
    "opt, norms behind": {
        "norms before": blocks(placement="pre"),
        "an epsilon of 1e-3": norm(epsilon=LARGE),
        "positions from row 1": positions(offset=1),
    },
    "phi": {
        "the exact gelu": activation("gelu"),
        "pairs side by side": turning(interleaved=True),
        "all of a head turns": turning(dim=None),
    },
    "llama": {
        "pairs side by side": turning(interleaved=True),
        "an epsilon of 1e-3": norm(epsilon=LARGE),
        "frequencies not scaled": turning(scaling=None),
        "a scale of 1 + w": norm(adds_one=True),
        "gelu": activation("gelu"),
    },
    "mistral": {
        "a window of one key more": attention(window=one_key_more),
        "a window of one key less": attention(window=one_key_less),
        "no window": attention(window=None),
    },
    "qwen2": {
        "a window of one key more": attention(window=one_key_more),
        "the other layer's window": one_layer_off("window"),
        "a base of 1000": turning(base=1000.0),
    },
    "qwen3": {
        "norms of queries and keys with another epsilon": attention(
            qk_norm=lambda a: a.qk_norm._replace(epsilon=LARGE)
        ),
        "pairs side by side": turning(interleaved=True),
        "gelu": activation("gelu"),
    },
    "mixtral": {
        "one expert for each token": experts(chosen=1),
        "an expert more for each token": experts(chosen=3),
        "weights not divided by their sum": experts(are_normalized=False),
        "gelu": activation("gelu"),
    },
    "qwen3_moe": {
        "an expert less for each token": experts(chosen=2),
        "weights divided by their sum": experts(are_normalized=True),
        "no norms of queries and keys": attention(qk_norm=None),
    },
    "gpt_oss": {
        "no sinks": attention(sinks=False),
        "the other layer's window": one_layer_off("window"),
        "a window of one key more": attention(window=one_key_more),
        "truncated frequencies": scaled(truncate=True),
        "frequencies not scaled": turning(scaling=None),
        "a plain gated product": unclamped,
        "no limit": swiglu(limit=1e6),
        "another alpha": swiglu(alpha=1.702),
        "an expert less for each token": experts(chosen=2),
        "weights not divided by their sum": experts(are_normalized=False),
    },
    "gpt_oss, truncated frequencies, no biases": {
        "frequencies that are not truncated": scaled(truncate=False),
        "no sinks": attention(sinks=False),
    },
    "gemma2": {
        "a scale of w": norm(adds_one=False),
        "token vectors not scaled": embedding(scale=1.0),
        "the scale of the head's size": attention(scale=None),
        "no cap on the scores": attention(softcap=None),
        "no cap on the logits": head(softcap=None),
        "the other layer's window": one_layer_off("window"),
        "a window of one key more": attention(window=one_key_more),
        "norms before alone": blocks(placement="pre"),
    },
    "gemma3_text": {
        "a scale of w in norms of queries and keys": attention(
            qk_norm=lambda a: a.qk_norm._replace(adds_one=False)
        ),
        "no norms of queries and keys": attention(qk_norm=None),
        "rotary positions of the other kind of layer": one_layer_off("rotary"),
        "the other layer's window": one_layer_off("window"),
        "positions not scaled": turning(scaling=None),
        "the scale of the head's size": attention(scale=None),
        "token vectors not scaled": embedding(scale=1.0),
    },
    "t5": {
        "a decoder's table for both directions": decoder(tables(bidirectional=True)),
        "an encoder's table for one direction": tables(bidirectional=False),
        "distances up to another one": tables(max_distance=17),
        "no bias by distance in the decoder": decoder(attention(bias=None)),
        "the scale of the head's size in the encoder": attention(scale=None),
        "the scale of the head's size in the decoder": decoder(attention(scale=None)),
        "the scale of the head's size in cross-attention": cross(scale=None),
        "a decoder that sees later tokens": decoder(attention(is_causal=False)),
        "logits that are not scaled": head(scale=None),
        "an epsilon of 1e-3": norm(epsilon=LARGE),
    },
    "t5, gated, a head of its own": {
        "the table of tokens as the head": head(is_tied=True),
        "scaled logits": head(scale=31**-0.5),
        "the exact gelu": activation("gelu"),
    },
    "t5, its encoder": {
        "a table for one direction": tables(bidirectional=False),
        "causal": attention(is_causal=True),
        "no bias by distance": attention(bias=None),
    },
    "mt5": {"scaled logits": head(scale=31**-0.5)},
    "umt5": {
        "one table for the encoder": only_the_first_table,
        "one table for the decoder": decoder(only_the_first_table),
        "scaled logits": head(scale=31**-0.5),
    },
}
