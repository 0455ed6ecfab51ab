"""Small models of every family that has one."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from flax import nnx

from helpers.parity.findings import kinds
from jax_attn import transfer
from jax_attn.families.traits import ModelTraits
from jax_attn.models import EncoderDecoder, Model
from jax_attn.parity.checking.judging import judge_port
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.inputs_and_runs import Inputs, float_dtype
from jax_attn.parity.run.port import Port
from jax_attn.parity.run.reference import Reference
from jax_attn.porting.verify.model_pair import ModelPair
from jax_attn.porting.verify.source_pair import pair_of

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
GEMMA3 = GEMMA2 | {
    "sliding_window_pattern": 2,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    },
}
EXPERTS = GROUPED | {"num_local_experts": 5, "num_experts_per_tok": 2}
EXPERTS |= {"experts_implementation": "eager"}  # torch's products of groups take no float64
# Small limits: products of random weights pass them on either side, as do texts the first length.
GPT_OSS = EXPERTS | {
    "hidden_size": 31,
    "num_attention_heads": 6,
    "sliding_window": 5,
    "num_experts_per_tok": 3,
    "swiglu_alpha": 1.3,
    "swiglu_limit": 0.7,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150.0,
        "factor": 4.0,
        "beta_fast": 3.0,
        "beta_slow": 0.3,
        "truncate": False,
        "original_max_position_embeddings": 7,
    },
}
TRUNCATED = GPT_OSS["rope_parameters"] | {"truncate": True}
# Distances of up to 12 and 18 fall into near and far buckets, and none onto a bound.
T5 = {
    "d_model": 31,
    "d_kv": 7,
    "num_heads": 3,
    "num_layers": LAYERS,
    "num_decoder_layers": 3,
    "d_ff": 29,
    "vocab_size": 41,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 11,
    "decoder_start_token_id": 0,
}
# One layer, for variants: their heads and options.
ONE_PLAIN = PLAIN | {"num_hidden_layers": 1}
ONE_GPT2 = GPT2 | {"n_layer": 1}
ONE_BLOOM = BLOOM | {"n_layer": 1}
ONE_POST_OPT = POST_OPT | {"num_hidden_layers": 1}
ONE_GROUPED = GROUPED | {"num_hidden_layers": 1}
EVEN_T5 = T5 | {"num_decoder_layers": LAYERS}
ONE_T5 = T5 | {"num_layers": 1, "num_decoder_layers": 1}

# name -> transformers' class, what its config says
CASES = {
    "bert": ("BertForMaskedLM", PLAIN),
    "bert, for two sentences": ("BertForPreTraining", ONE_PLAIN),
    "bert, a pooler": ("BertModel", ONE_PLAIN),
    "bert, classes": ("BertForSequenceClassification", ONE_PLAIN | {"num_labels": 3}),
    "bert, a class for each token": ("BertForTokenClassification", ONE_PLAIN),
    "bert, answers": ("BertForQuestionAnswering", ONE_PLAIN),
    "bert, a head of its own": ("BertForMaskedLM", ONE_PLAIN | {"tie_word_embeddings": False}),
    "bert, causal": ("BertLMHeadModel", ONE_PLAIN | {"is_decoder": True}),
    "roberta": ("RobertaForMaskedLM", ONE_PLAIN),
    "roberta, causal": ("RobertaForCausalLM", ONE_PLAIN | {"is_decoder": True}),
    "roberta, classes": ("RobertaForSequenceClassification", ONE_PLAIN),
    "xlm-roberta": ("XLMRobertaForMaskedLM", ONE_PLAIN | {"type_vocab_size": 1}),
    "camembert": ("CamembertForMaskedLM", ONE_PLAIN),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2, scaled by layer": (
        "GPT2LMHeadModel",
        GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 37},
    ),
    "gpt2, classes": ("GPT2ForSequenceClassification", ONE_GPT2 | {"pad_token_id": 0}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", ONE_GPT2),
    "gpt_neox": ("GPTNeoXForCausalLM", PLAIN | {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    "gpt_neox, one after the other": (
        "GPTNeoXForCausalLM",
        ONE_PLAIN | {"use_parallel_residual": False, "attention_bias": False},
    ),
    "falcon, one key head": ("FalconForCausalLM", ONE_PLAIN),
    "falcon, groups": (
        "FalconForCausalLM",
        PLAIN | {"new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon, alibi": (
        "FalconForCausalLM",
        ONE_PLAIN | {"alibi": True, "parallel_attn": False, "bias": True, "multi_query": False},
    ),
    "bloom, classes": ("BloomForSequenceClassification", ONE_BLOOM | {"pad_token_id": 3}),
    "llama, classes": ("LlamaForSequenceClassification", ONE_GROUPED | {"pad_token_id": None}),
    "bert, next sentence": ("BertForNextSentencePrediction", ONE_PLAIN),
    "bloom": ("BloomForCausalLM", BLOOM),
    "opt": ("OPTForCausalLM", OPT),
    "opt, norms behind": ("OPTForCausalLM", ONE_POST_OPT),
    "gpt2, quick gelu": ("GPT2LMHeadModel", ONE_GPT2 | {"activation_function": "quick_gelu"}),
    "bert, tanh": ("BertForMaskedLM", ONE_PLAIN | {"hidden_act": "tanh"}),
    "phi": ("PhiForCausalLM", PLAIN),
    "phi, norms of queries and keys": (
        "PhiForCausalLM",
        ONE_PLAIN | {"qk_layernorm": True, "num_key_value_heads": 2},
    ),
    "llama": ("LlamaForCausalLM", GROUPED | LLAMA3),
    "llama, biases": (
        "LlamaForCausalLM",
        ONE_GROUPED | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", PLAIN | QWEN2 | {"max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", ONE_GROUPED),
    "mixtral": ("MixtralForCausalLM", EXPERTS),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        EXPERTS | {"num_hidden_layers": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 13},
    ),
    "gpt_oss": ("GptOssForCausalLM", GPT_OSS),
    "gpt_oss, truncated frequencies, no biases": (
        "GptOssForCausalLM",
        GPT_OSS | {"num_hidden_layers": 1, "attention_bias": False, "rope_parameters": TRUNCATED},
    ),
    "gemma2": ("Gemma2ForCausalLM", GEMMA2),
    "gemma3_text": ("Gemma3ForCausalLM", GEMMA3),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5, gated, a head of its own": (
        "T5ForConditionalGeneration",
        EVEN_T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "t5, no head": ("T5Model", ONE_T5 | {"feed_forward_proj": "gated-silu"}),
    "t5, its encoder": ("T5EncoderModel", T5),
    "mt5": ("MT5ForConditionalGeneration", EVEN_T5),
    "umt5": ("UMT5ForConditionalGeneration", T5 | {"tie_word_embeddings": False}),
    "umt5, its encoder": ("UMT5EncoderModel", T5),
}

# Whose file has a weight of the head beside that of the tokens.
UNTIED = ("t5, gated, a head of its own", "umt5")

# Those with several layers are compiled too; operations of the others are shared, one by one.
COMPILED = {
    name
    for name, (_, says) in CASES.items()
    if LAYERS in map(says.get, ("n_layer", "num_hidden_layers", "num_layers"))
}

# transformers rounds its slopes, so that it errs itself: apart from the other cases.
ROUNDED = "falcon, alibi, slopes that bfloat16 rounds"
ROUNDED_CASE = (
    "FalconForCausalLM",
    ONE_PLAIN | {"alibi": True, "hidden_size": 36, "num_attention_heads": 12},
)

# Whose gradients are compared in every run of the tests: blocks that are parallel, and with norms
# on both sides. BERT's, with norms behind, and GPT-2's are compared in tests of their own.
USUAL = ("falcon, one key head", "gemma2", "t5")


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
    if name in UNTIED:  # transformers 5 ties it, unless a file has both
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    generator = torch.Generator().manual_seed(0)
    for key, p in model.named_parameters():
        with torch.no_grad():
            p.normal_(0, p.shape[-1] ** -0.5 if p.ndim > 1 else 0.3, generator=generator)
            is_scale = key.endswith("weight") and p.ndim == 1
            p += 1 if is_scale and "gemma" not in name else 0
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
        return pair_of(self.folder, self.config, dtype)

    @cached_property
    def _inputs(self) -> Inputs:
        return Inputs.of(self.pair.inputs, float_dtype(self.pair.dtype))

    @cached_property
    def _prepared(self) -> Prepared:
        called = Reference(self.pair.reference, self.pair.call_reference, self._inputs)
        return Prepared(called, self.pair.dtype, gradients=False)

    def judged(self, port: Model | EncoderDecoder) -> Verdict:
        """Verdict on the outputs of another model in this one's place, by each way to call it."""
        transform = "jit" if self.name in COMPILED else "eager"
        return self._verdict(port, self.pair.call_port, transform)

    def by_mask(self, port: Model | EncoderDecoder) -> Verdict:
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

    def _verdict(
        self, port: Model | EncoderDecoder, call: Callable[..., Any], transform: str
    ) -> Verdict:
        called = Port(port, call, self._inputs)
        return judge_port(self._prepared, called, (transform,), to_torch=None).verdict

    def mistaken(self, change: Callable[[ModelTraits], ModelTraits]) -> Model | EncoderDecoder:
        """The model of other traits with the right weights."""
        right = self.pair.port
        heads = {}
        for head in ("lm_head", "pooler", "classifier"):
            if getattr(right, head, None) is not None:
                heads[head] = _outputs(right, head, self.pair.traits)
        heads |= {"pooler": D} if "pooler" in heads else {}
        traits = change(self.pair.traits)
        model = nnx.eval_shape(lambda: type(right)(traits, heads, rngs=nnx.Rngs(0)))
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
