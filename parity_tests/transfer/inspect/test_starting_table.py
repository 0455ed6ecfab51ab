"""A starting table carries models of no known family, once its questions are answered."""

import re

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner

from jax_attn.cli import main
from jax_attn.transfer import load_checkpoint, save_checkpoint
from jax_attn.transfer.arrays import same_bits


def config(words: str, **others) -> dict:
    """A small config: "hidden_size=16 num_hidden_layers=2", and what is no number."""
    pairs = (word.split("=") for word in words.split())
    return {name: int(value) for name, value in pairs} | others


SMALL = config("hidden_size=16 num_hidden_layers=2 num_attention_heads=4 vocab_size=23")
LAYERS = config("n_layer=2 n_head=4 n_embd=16 vocab_size=23 n_positions=16 rotary_dim=2")
MLP = config("intermediate_size=24")
GROUPED = SMALL | MLP | config("num_key_value_heads=2 head_dim=4")
# Models of no family that is known here.
MODELS = {
    "CohereForCausalLM": GROUPED | config("pad_token_id=0"),
    "StableLmForCausalLM": GROUPED | {"use_qkv_bias": True},
    "MptForCausalLM": config("d_model=16 n_heads=4 n_layers=2 vocab_size=23 max_seq_len=16"),
    "XLNetLMHeadModel": config("d_model=16 n_head=4 n_layer=2 vocab_size=23 d_inner=24"),
    "NystromformerForMaskedLM": SMALL
    | MLP
    | config("max_position_embeddings=16 segment_means_seq_len=8"),
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
    "CodeGenForCausalLM": LAYERS,
}
# A question's first lines -> the answer that is uncommented, by how it begins; else the last one.
ANSWER = "another order: kept whole"


def invoke(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)


def written(name, folder):
    """A checkpoint of a model with random weights; its folder."""
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    cls(cls.config_class(**MODELS[name])).save_pretrained(folder)
    return folder


def table_text(source, target) -> str:
    printed = invoke("inspect", source, "--table", target)
    assert printed.exit_code == 0, printed.output
    text = target.read_text()
    assert printed.stdout.endswith(f"with {text.count('# Question')} questions to answer\n")
    return text


def answered(text: str, answer: str = ANSWER) -> tuple[str, int]:
    """The table with each question answered, and how many of its lines were edited."""
    lines, out, edited = text.split("\n"), [], 0
    in_question = chosen = False
    for line in lines:
        if line.startswith("    # Question"):
            in_question, chosen = True, False
        elif in_question and line.startswith("    # - "):
            chosen = line.startswith(f"    # - {answer}")
        elif in_question and "is not answered" in line:
            edited += 1
            continue
        elif in_question and chosen and line.startswith("    # "):
            line, edited = line.replace("    # ", "    ", 1), edited + 1
        out.append(line)
    return "\n".join(out), edited


@pytest.mark.parametrize("name", MODELS)
def test_an_unknown_model_is_carried_both_ways(name, tmp_path, monkeypatch):
    source = written(name, tmp_path / "model")
    begun = table_text(source, tmp_path / "begun.py")
    text, edited = answered(begun)
    assert edited <= 10, begun
    monkeypatch.chdir(tmp_path)
    module = f"table_{name.lower()}"
    (tmp_path / f"{module}.py").write_text(text)
    options = re.findall(r"--(?:num-heads|num-kv-heads|head-dim) \d+", text)
    heads = [word for option in options for word in option.split()]
    flax, back = tmp_path / "made" / "flax", tmp_path / "back"
    there = invoke("port", source, flax, "--to", "flax", "--layout", f"{module}:LAYOUT", *heads)
    assert there.exit_code == 0, there.output
    again = invoke("port", flax, back, "--to", "torch", "--layout", f"{module}:LAYOUT", *heads)
    assert again.exit_code == 0, again.output
    with load_checkpoint(source) as first, load_checkpoint(back) as second:
        assert {*first} - {*second} <= {*first.tied()}
        for key in second:
            assert same_bits(first[key], second[key]), key


def test_questions_that_are_not_answered_are_refused_all_at_once(tmp_path, monkeypatch):
    save_checkpoint(
        tmp_path / "model.safetensors",
        {
            "a.query_key_value.weight": np.zeros((48, 16), np.float32),
            "a.query_key_value.bias": np.zeros(48, np.float32),
            "square.weight": np.zeros((16, 16), np.float32),
            "square.bias": np.zeros(16, np.float32),
        },
    )
    text = table_text(tmp_path / "model.safetensors", tmp_path / "unanswered.py")
    assert text.count("# Question") == 1  # the packed one's bias tells how all matrices lie
    monkeypatch.chdir(tmp_path)
    sizes = ("--num-heads", 4, "--head-dim", 4)
    layout = ("--to", "flax", "--layout", "unanswered:LAYOUT")
    result = invoke("port", tmp_path / "model.safetensors", tmp_path / "out", *layout, *sizes)
    assert result.exit_code == 2
    for key in ("a.query_key_value.weight", "a.query_key_value.bias"):
        assert f"'{key}': question 1 of the table is not answered" in " ".join(
            result.output.split()
        )
    assert not (tmp_path / "out").exists()


def table_of(arrays, tmp_path):
    (tmp_path / "begun.py").unlink(missing_ok=True)
    save_checkpoint(tmp_path / "model.safetensors", arrays)
    return table_text(tmp_path / "model.safetensors", tmp_path / "begun.py")


ROWS = {
    "a linear layer": ("up.weight", (7, 5), 'row("up.weight", "up.kernel", linear)'),
    "a norm": ("ln.weight", (5,), 'row("ln.weight", "ln.scale")'),
    "a table": ("wte.weight", (9, 5), 'row("wte.weight", "wte.embedding")'),
    "a convolution": ("conv.weight", (7, 5, 2), 'row("conv.weight", "conv.kernel", conv)'),
    "a parameter of its own": ("cls_token", (1, 1, 5), 'row("cls_token", "cls_token")'),
}


@pytest.mark.parametrize("name", ROWS)
def test_names_and_shapes_settle(name, tmp_path):
    key, shape, expected = ROWS[name]
    assert expected in table_of({key: np.zeros(shape, np.float32)}, tmp_path)


def test_a_bias_tells_which_axis_of_a_matrix_is_its_input(tmp_path):
    arrays = {"c.weight": (5, 7), "c.bias": (7,), "d.weight": (5, 5), "d.bias": (5,)}
    text = table_of({key: np.zeros(s, np.float32) for key, s in arrays.items()}, tmp_path)
    assert 'row("c.weight", "c.kernel"),' in text
    assert 'row("d.weight", "d.kernel"),' in text  # as the file's other matrices
    alone = table_of({k: np.zeros(s, np.float32) for k, s in [*arrays.items()][2:]}, tmp_path)
    assert "# Question 1: which axis of d is its input?" in alone


def test_layers_are_one_row_and_whole_numbers_are_passed_over(tmp_path):
    arrays = {f"h.{i}.up.weight": np.zeros((7, 5), np.float32) for i in range(3)}
    arrays |= {f"h.{i}.ids": np.arange(3) for i in range(3)}
    text = table_of(arrays, tmp_path)
    assert 'row("h.{layer}.up.weight", "h.{layer}.up.kernel", linear)' in text
    assert 'ignored("h.{layer}.ids", ' in text


def test_a_name_from_a_file_does_not_become_code(tmp_path):
    key = 'x")]; import os; print(os.name) #\n.weight'
    text = table_of({key: np.zeros(5, np.float32)}, tmp_path)
    names = {}
    exec(compile(text, "table", "exec"), names)
    assert names["LAYOUT"].torch_keys() == [key]


def test_a_file_that_is_there_is_kept(tmp_path):
    save_checkpoint(tmp_path / "model.safetensors", {"a.weight": np.zeros(3, np.float32)})
    (tmp_path / "mine.py").write_text("answers")
    result = invoke("inspect", tmp_path / "model.safetensors", "--table", tmp_path / "mine.py")
    assert result.exit_code == 2
    assert "expected a file that does not exist yet" in result.output
    assert (tmp_path / "mine.py").read_text() == "answers"
