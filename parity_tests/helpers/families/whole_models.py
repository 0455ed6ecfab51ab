"""Small models of every family that has one, and mistakes planted in what they do."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from flax import nnx

from helpers.parity.findings import kinds
from jax_attn import transfer
from jax_attn.families.traits import ModelTraits
from jax_attn.models import Model
from jax_attn.parity.checking.judging import judge_port
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.inputs_and_runs import Inputs, float_dtype
from jax_attn.parity.run.port import Port
from jax_attn.parity.run.reference import Reference
from jax_attn.porting.verify.model_pair import ModelPair

D, N, LAYERS = 32, 4, 2
PLAIN = {
    "hidden_size": D,
    "num_attention_heads": N,
    "num_hidden_layers": LAYERS,
    "vocab_size": 41,
    "intermediate_size": 29,
    "max_position_embeddings": 23,
}
GPT2 = {"n_embd": D, "n_head": N, "n_layer": LAYERS, "vocab_size": 41, "n_positions": 23}
IDS = {"bos_token_id": 1, "eos_token_id": 2}
BLOOM = {"hidden_size": D, "n_head": N, "n_layer": LAYERS, "vocab_size": 41}
OPT = PLAIN | {"ffn_dim": 29}
POST_OPT = OPT | {"word_embed_proj_dim": 20, "do_layer_norm_before": False}
GROUPED = PLAIN | {"num_key_value_heads": 2, "head_dim": 10}
QWEN2 = {"num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 5}
LLAMA3 = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    }
}
GEMMA2 = GROUPED | {"sliding_window": 5, "query_pre_attn_scalar": 7}

# name -> transformers' class, what its config says
CASES = {
    "bert": ("BertForMaskedLM", PLAIN),
    "bert, for two sentences": ("BertForPreTraining", PLAIN),
    "bert, a pooler": ("BertModel", PLAIN),
    "bert, classes": ("BertForSequenceClassification", PLAIN | {"num_labels": 3}),
    "bert, a class for each token": ("BertForTokenClassification", PLAIN),
    "bert, answers": ("BertForQuestionAnswering", PLAIN),
    "bert, a head of its own": ("BertForMaskedLM", PLAIN | {"tie_word_embeddings": False}),
    "bert, causal": ("BertLMHeadModel", PLAIN | {"is_decoder": True}),
    "roberta": ("RobertaForMaskedLM", PLAIN),
    "roberta, causal": ("RobertaForCausalLM", PLAIN | {"is_decoder": True}),
    "roberta, classes": ("RobertaForSequenceClassification", PLAIN),
    "xlm-roberta": ("XLMRobertaForMaskedLM", PLAIN | {"type_vocab_size": 1}),
    "camembert": ("CamembertForMaskedLM", PLAIN),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2, scaled by layer": (
        "GPT2LMHeadModel",
        GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 37},
    ),
    "gpt2, classes": ("GPT2ForSequenceClassification", GPT2 | {"pad_token_id": 0}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", GPT2),
    "gpt_neox": ("GPTNeoXForCausalLM", PLAIN | {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    "gpt_neox, one after the other": (
        "GPTNeoXForCausalLM",
        PLAIN | {"use_parallel_residual": False, "attention_bias": False},
    ),
    "falcon, one key head": ("FalconForCausalLM", PLAIN),
    "falcon, groups": (
        "FalconForCausalLM",
        PLAIN | {"new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon, alibi": (
        "FalconForCausalLM",
        PLAIN | {"alibi": True, "parallel_attn": False, "bias": True, "multi_query": False},
    ),
    "bloom, classes": ("BloomForSequenceClassification", BLOOM | {"pad_token_id": 3}),
    "llama, classes": ("LlamaForSequenceClassification", GROUPED | {"pad_token_id": None}),
    "bert, next sentence": ("BertForNextSentencePrediction", PLAIN),
    "bloom": ("BloomForCausalLM", BLOOM),
    "opt": ("OPTForCausalLM", OPT),
    "opt, norms behind": ("OPTForCausalLM", POST_OPT),
    "gpt2, quick gelu": ("GPT2LMHeadModel", GPT2 | {"activation_function": "quick_gelu"}),
    "bert, tanh": ("BertForMaskedLM", PLAIN | {"hidden_act": "tanh"}),
    "phi": ("PhiForCausalLM", PLAIN),
    "phi, norms of queries and keys": (
        "PhiForCausalLM",
        PLAIN | {"qk_layernorm": True, "num_key_value_heads": 2},
    ),
    "llama": ("LlamaForCausalLM", GROUPED | LLAMA3),
    "llama, biases": (
        "LlamaForCausalLM",
        GROUPED | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", PLAIN | QWEN2 | {"max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", GROUPED),
    "gemma2": ("Gemma2ForCausalLM", GEMMA2),
}

# transformers rounds its slopes, so that it errs itself: apart from the other cases.
ROUNDED = "falcon, alibi, slopes that bfloat16 rounds"
ROUNDED_CASE = (
    "FalconForCausalLM",
    PLAIN | {"alibi": True, "hidden_size": 36, "num_attention_heads": 12},
)

# Whose gradients are compared in every run of the tests: blocks that are parallel, and with norms
# on both sides. BERT's, with norms behind, and GPT-2's are compared in tests of their own.
USUAL = ("falcon, groups", "gemma2")


def config_of(name: str) -> dict:
    """The config.json of a case."""
    kind, says = ROUNDED_CASE if name == ROUNDED else CASES[name]
    config = getattr(tf, kind).config_class(**(IDS | says), architectures=[kind])
    return json.loads(config.to_json_string(use_diff=False))


def made(name: str) -> torch.nn.Module:
    """The model of a case, its parameters drawn so that every one of them matters."""
    kind, says = ROUNDED_CASE if name == ROUNDED else CASES[name]
    kind = getattr(tf, kind)
    model = kind(kind.config_class(**(IDS | says))).eval()
    generator = torch.Generator().manual_seed(0)
    for key, p in model.named_parameters():
        with torch.no_grad():
            p.normal_(0, p.shape[-1] ** -0.5 if p.ndim > 1 else 0.3, generator=generator)
            is_scale = key.endswith("weight") and p.ndim == 1
            p += 1 if is_scale and "gemma2" not in name else 0
    return model


@dataclass(frozen=True)
class SmallModel:
    """A case on both sides, by way of a folder on the disk."""

    name: str
    folder: Path

    @cached_property
    def config(self) -> dict:
        made(self.name).save_pretrained(self.folder)
        return json.loads((self.folder / "config.json").read_text())

    @cached_property
    def pair(self) -> ModelPair:
        return self.of("float32")

    def of(self, dtype: str) -> ModelPair:
        return ModelPair.of(self.folder, self.config, dtype)

    @cached_property
    def _inputs(self) -> Inputs:
        return Inputs.of(self.pair.inputs, float_dtype(self.pair.dtype))

    @cached_property
    def _prepared(self) -> Prepared:
        called = Reference(self.pair.reference, self.pair.call_reference, self._inputs)
        return Prepared(called, self.pair.dtype, gradients=False)

    def judged(self, port: Model) -> Verdict:
        """Verdict on the outputs of another model in this one's place."""
        return self._verdict(port, self.pair.call_port, "jit")

    def by_mask(self, port: Model) -> Verdict:
        """The same where a mask alone gives the outputs of every way to call the model.

        It runs eagerly, so that all models share the operations that are compiled.
        """

        def call(*arguments: Any, **named: Any) -> dict[str, Any]:
            own = self.pair.port_outputs(*arguments, **named)
            return {
                name: own[name.partition(" by ")[0]][: len(want)]
                for name, want in self._prepared.exact.outputs.items()
            }

        return self._verdict(port, call, "eager")

    def _verdict(self, port: Model, call: Callable[..., Any], transform: str) -> Verdict:
        called = Port(port, call, self._inputs)
        return judge_port(self._prepared, called, (transform,), to_torch=None).verdict

    def mistaken(self, change: Callable[[ModelTraits], ModelTraits]) -> Model:
        """The model of other traits with the right weights."""
        right = self.pair.port
        heads = {}
        for head in ("lm_head", "pooler", "classifier"):
            if getattr(right, head) is not None:
                heads[head] = _outputs(right, head, self.pair.traits)
        heads |= {"pooler": D} if "pooler" in heads else {}
        traits = change(self.pair.traits)
        model = nnx.eval_shape(lambda: Model(traits, heads, rngs=nnx.Rngs(0)))
        own = transfer.flatten(model)
        tensors = {path: a for path, a in transfer.flatten(right).items() if path in own}
        same = transfer.Layout(*(transfer.row(path, path) for path in tensors))
        transfer.load(model, tensors, same)
        model.eval()
        return model


def _outputs(model: Model, head: str, traits: ModelTraits) -> int:
    """How many outputs a head has."""
    if head == "lm_head":
        return traits.embedding.vocab_size
    kernel = transfer.flatten(model)
    return next(a.shape[-1] for path, a in kernel.items() if path.startswith(f"{head}.kernel"))


def assert_gradients(pair: ModelPair) -> Result:
    """All outputs, and the gradient of every parameter of transformers' model, pass.

    In bfloat16 some are too small beside rounding to have power, and a single row of tokens has no
    padding to show that the mask is read: none fails.
    """
    result = pair.check()
    assert result.verdict is not Verdict.FAIL, str(result)
    if pair.dtype == "float32":
        assert all(t.verdict is Verdict.PASS for t in result.tensors), str(result)
    assert "padding-row" not in kinds(result), str(result)
    compared = {t.name for t in result.tensors if t.kind == "gradient of parameter"}
    unread = {item.key for item in pair.layout.passed_over if not item.same_as}
    assert compared == dict(pair.reference.named_parameters()).keys() - unread
    return result


# --- mistakes -----------------------------------------------------------------------------------


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


def one_layer_off(traits):
    """The windows of the layers, each that of its neighbour."""
    windows = [b.attention.window for b in traits.blocks]
    made = (
        replace(b, attention=replace(b.attention, window=w))
        for b, w in zip(traits.blocks, windows[1:] + windows[:1], strict=True)
    )
    return replace(traits, blocks=tuple(made))


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
        "the other layer's window": one_layer_off,
        "a base of 1000": turning(base=1000.0),
    },
    "qwen3": {
        "norms of queries and keys with another epsilon": attention(
            qk_norm=lambda a: a.qk_norm._replace(epsilon=LARGE)
        ),
        "pairs side by side": turning(interleaved=True),
        "gelu": activation("gelu"),
    },
    "gemma2": {
        "a scale of w": norm(adds_one=False),
        "token vectors not scaled": embedding(scale=1.0),
        "the scale of the head's size": attention(scale=None),
        "no cap on the scores": attention(softcap=None),
        "no cap on the logits": head(softcap=None),
        "the other layer's window": one_layer_off,
        "a window of one key more": attention(window=one_key_more),
        "norms before alone": blocks(placement="pre"),
    },
}
