"""Models of families that are not known here, and their starting tables, answered."""

import re

import torch
import transformers
from click.testing import CliRunner

from jax_attn.cli import main


def config(words: str, **others) -> dict:
    """A small config: "hidden_size=16 num_hidden_layers=2", and what is no number."""
    pairs = (word.split("=") for word in words.split())
    return {name: int(value) for name, value in pairs} | others


SMALL = config("hidden_size=16 num_hidden_layers=2 num_attention_heads=4 vocab_size=23")
LAYERS = config("n_layer=2 n_head=4 n_embd=16 vocab_size=23 n_positions=16 rotary_dim=2")
MLP = config("intermediate_size=24")
GROUPED = SMALL | MLP | config("num_key_value_heads=2 head_dim=4")
HALF_TURNED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
# Models of no family that is known here.
MODELS = {
    "CohereForCausalLM": GROUPED | config("pad_token_id=0"),
    "StableLmForCausalLM": GROUPED | {"use_qkv_bias": True, "rope_parameters": HALF_TURNED},
    "MptForCausalLM": config("d_model=16 n_heads=4 n_layers=2 vocab_size=23 max_seq_len=16"),
    "XLNetLMHeadModel": config("d_model=16 n_head=4 n_layer=2 vocab_size=23 d_inner=24"),
    "NystromformerForMaskedLM": SMALL
    | MLP
    # With as many landmarks as tokens, there is no approximation.
    | config("max_position_embeddings=16 segment_means_seq_len=8 num_landmarks=8"),
    "WhisperForConditionalGeneration": config(
        "d_model=16 encoder_layers=2 decoder_layers=2 vocab_size=23 encoder_attention_heads=4 "
        "decoder_attention_heads=4 num_mel_bins=5 encoder_ffn_dim=24 decoder_ffn_dim=24 "
        "max_source_positions=8 max_target_positions=8 pad_token_id=0 bos_token_id=1 "
        "eos_token_id=2 decoder_start_token_id=1",
        begin_suppress_tokens=None,
        suppress_tokens=None,
    ),
    "CLIPModel": config(
        "projection_dim=6",
        text_config=SMALL | MLP | config("max_position_embeddings=8"),
        vision_config=SMALL | MLP | config("image_size=8 patch_size=4"),
    ),
    "DistilBertForMaskedLM": config(
        "dim=16 n_heads=4 n_layers=2 vocab_size=23 hidden_dim=24 max_position_embeddings=16"
    ),
    "MPNetForMaskedLM": SMALL | MLP | config("max_position_embeddings=16"),
    "MixtralForCausalLM": GROUPED | config("num_local_experts=3"),
    "DeepseekV3ForCausalLM": GROUPED
    | config(
        "num_key_value_heads=4 n_routed_experts=4 n_group=2 topk_group=1 num_experts_per_tok=2 "
        "q_lora_rank=6 kv_lora_rank=5 qk_rope_head_dim=2 qk_nope_head_dim=4 v_head_dim=4 "
        "moe_intermediate_size=8 first_k_dense_replace=1"
    ),
    "GPTJForCausalLM": LAYERS,
    # Two heads in each of its four parts.
    "CodeGenForCausalLM": LAYERS | config("n_head=8"),
    "OpenAIGPTLMHeadModel": config("n_layer=2 n_head=4 n_embd=16 vocab_size=23 n_positions=16"),
    "GPTNeoXJapaneseForCausalLM": SMALL
    | config("max_position_embeddings=16")
    | {"rope_parameters": HALF_TURNED},
}
# Model -> how the right answer to its question begins.
ANSWERS = {
    "CodeGenForCausalLM": "in four parts, as in CodeGen",
    "OpenAIGPTLMHeadModel": "query, key, value one after another",
    "GPTNeoXJapaneseForCausalLM": "for each key/value head",
}


def invoke(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)


def model_of(name: str) -> torch.nn.Module:
    """A model with random weights, large enough for every head to attend in its own way."""
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**MODELS[name])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
    return model


def table_text(source, target) -> str:
    """The starting table of a checkpoint, which `inspect` writes to `target`."""
    printed = invoke("inspect", source, "--table", target)
    assert printed.exit_code == 0, printed.output
    text = target.read_text()
    count = text.count("# Question")
    assert printed.stdout.endswith(f"with {count} question{'s' * (count != 1)} to answer\n")
    return text


def answered(text: str, answer: str) -> tuple[str, int]:
    """The table with each question answered, and how many of its lines were edited.

    answer: how the answer begins whose rows are uncommented.
    """
    lines, out, edited = text.split("\n"), [], 0
    in_question = chosen = False
    for line in lines:
        if line.startswith("    # Question"):
            in_question, chosen = True, False
        elif in_question and line.startswith("    # - "):
            chosen = line.startswith(f"    # - {answer}")
        elif in_question and "is unanswered" in line:
            edited += 1
            continue
        elif in_question and chosen and line.startswith("    # "):
            line, edited = line.replace("    # ", "    ", 1), edited + 1
        out.append(line)
    return "\n".join(out), edited


def heads_of(text: str) -> list[str]:
    """The options of `port` that a table's first lines name."""
    options = re.findall(r"--(?:num-heads|num-kv-heads|head-dim) \d+", text)
    return [word for option in options for word in option.split()]
