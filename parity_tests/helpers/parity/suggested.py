"""References of many kinds, small and with random weights, and the inputs suggested for them."""

from functools import cache
from types import SimpleNamespace

import torch
import transformers as tf
from torch import nn

import torch_ref
from jax_attn import parity
from torch_ref.rotary import Rotary

D, N, VOCABULARY, POSITIONS = 24, 6, 41, 37
SIZES = {"hidden_size": D, "num_attention_heads": N, "num_hidden_layers": 2, "vocab_size": 41}
PLAIN = SIZES | {"intermediate_size": 29, "max_position_embeddings": POSITIONS}
GROUPED = PLAIN | {"num_key_value_heads": 3, "head_dim": 10}
T5 = {"d_model": 31, "d_kv": 7, "num_heads": N, "num_layers": 2, "d_ff": 29, "vocab_size": 41}
T5 |= {"relative_attention_max_distance": 29, "relative_attention_num_buckets": 8}
VIT = {"hidden_size": D, "num_attention_heads": N, "num_hidden_layers": 2, "intermediate_size": 29}
EXPERTS = GROUPED | {"num_local_experts": 8, "experts_implementation": "eager"}
SMALL_EXPERTS = EXPERTS | {"num_hidden_layers": 1}


class ByHand(nn.Module):
    """Keys from elsewhere, a mask that must be given and of which 0 hides, a table of languages."""

    def __init__(self):
        super().__init__()
        self.language_embedding = nn.Embedding(5, D)
        self.q, self.k = nn.Linear(D, D), nn.Linear(17, D)

    def forward(self, x, context, mask, language_id=None):
        x = self.q(x)
        if language_id is not None:
            x = x + self.language_embedding(language_id)
        scores = x @ self.k(context).mT + (1.0 - mask) * -1e9
        return scores.softmax(-1) @ self.k(context)


class OfImages(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, D, 3, stride=2)
        self.attention = nn.MultiheadAttention(D, 4, batch_first=True)

    def forward(self, images):
        y = self.conv(images).flatten(2).mT
        return self.attention(y, y, y)[0]


class OfWaves(nn.Module):
    """Tokens of samples, and a mask of samples, of which a token needs the first."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(conv_kernel=(10, 3), conv_stride=(5, 2))
        self.convs = nn.Sequential(nn.Conv1d(1, D, 10, 5), nn.Conv1d(D, D, 3, 2))
        self.attention = nn.MultiheadAttention(D, 4, batch_first=True)

    def forward(self, input_values, attention_mask=None):
        y = self.convs(input_values[:, None]).mT
        hidden = None
        if attention_mask is not None:
            hidden = attention_mask[:, ::10][:, : y.shape[1]] == 0
        return self.attention(y, y, y, key_padding_mask=hidden)[0]


def unweighted(m, query, key, value, attn_mask=None, key_padding_mask=None):
    masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}
    return m(query, key, value, **masks, need_weights=False)[0]


def logits(model, *args, **inputs):
    return model(*args, **inputs).logits


def hidden_state(model, **inputs):
    return model(**inputs).last_hidden_state


# name -> (builds the reference, reference_call, which parameters)
ROWS = {
    "weights_mha": (lambda: torch_ref.DESIGNS["weights_mha"](30, 6), None, "x mask"),
    "fused_mha": (lambda: torch_ref.DESIGNS["fused_mha"](30, 6), None, "x"),
    "mqa": (lambda: torch_ref.DESIGNS["mqa"](30, 6), None, "x mask"),
    "plain_mha": (lambda: torch_ref.DESIGNS["plain_mha"](30, 6), None, "X"),
    "gqa": (
        lambda: torch_ref.DESIGNS["gqa"](30, 6, 3, kdim=17, vdim=19, head_dim=10, rotary=Rotary()),
        None,
        "query key value mask bias positions key_positions",
    ),
    "torch_mha": (
        lambda: nn.MultiheadAttention(D, N, batch_first=True, kdim=17, vdim=19),
        None,
        "query key value key_padding_mask attn_mask",
    ),
    "torch_mha without weights": (
        lambda: nn.MultiheadAttention(D, N, batch_first=True),
        unweighted,
        "query key value attn_mask key_padding_mask",
    ),
    "decoder layer": (
        lambda: nn.TransformerDecoderLayer(D, N, 29, batch_first=True),
        None,
        "tgt memory tgt_mask memory_mask tgt_key_padding_mask memory_key_padding_mask",
    ),
    "by hand": (ByHand, None, "x context mask language_id"),
    "of images": (OfImages, None, "images"),
    "of waves": (OfWaves, None, "input_values attention_mask"),
    "bert": (
        lambda: tf.BertModel(tf.BertConfig(**PLAIN)),
        None,
        "input_ids attention_mask token_type_ids position_ids",
    ),
    "llama": (
        lambda: tf.LlamaModel(tf.LlamaConfig(**GROUPED)),
        hidden_state,
        "input_ids attention_mask position_ids",
    ),
    "llama with a head": (
        lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)),
        logits,  # the form of call that `check` documents
        "input_ids attention_mask position_ids",  # not logits_to_keep, which is a count
    ),
    "mistral": (
        lambda: tf.MistralModel(tf.MistralConfig(**GROUPED, sliding_window=17)),
        None,
        "input_ids attention_mask position_ids",
    ),
    "gemma2": (
        lambda: tf.Gemma2Model(tf.Gemma2Config(**GROUPED, sliding_window=13)),
        None,
        "input_ids attention_mask position_ids",
    ),
    "mixtral": (
        lambda: tf.MixtralModel(tf.MixtralConfig(**SMALL_EXPERTS)),
        None,
        "input_ids attention_mask position_ids",
    ),
    "t5": (
        lambda: tf.T5Model(tf.T5Config(**T5)),
        None,
        "input_ids attention_mask decoder_input_ids decoder_attention_mask",
    ),
    "mpnet": (
        lambda: tf.MPNetModel(tf.MPNetConfig(**PLAIN)),
        None,
        "input_ids attention_mask",  # its own positions count what is no padding
    ),
    "vit": (
        lambda: tf.ViTModel(tf.ViTConfig(**VIT, image_size=8, patch_size=4)),
        None,
        "pixel_values attention_mask",
    ),
}


@cache
def reference(row):
    torch.manual_seed(0)
    return ROWS[row][0]().eval()


@cache
def suggested(row):
    return parity.suggest_inputs(reference(row), reference_call=ROWS[row][1])
