"""What a family's file must have beside attention: without it no port, and the error names it."""

import json
import re

import pytest
import torch
import transformers as tf
from click.testing import CliRunner

from helpers.families.family_models import GPT2, GROUPED, PLAIN, ROWS, SIZES, T5, VIT, saved_llama
from helpers.transfer.torch_checkpoints import saved
from jax_attn.cli import main
from jax_attn.families import LLAMA_META, family_of
from jax_attn.porting.port import parts
from jax_attn.porting.port import shapes as port_shapes
from jax_attn.porting.port.table import by_family
from jax_attn.transfer import load_checkpoint
from jax_attn.transfer.table.layout import moves_by_sizes
from jax_attn.transfer.table.resolve import passed

DECODER = PLAIN | {"is_decoder": True, "add_cross_attention": True}
ELECTRA = PLAIN | {"embedding_size": 13}
BLOOM = {"hidden_size": 24, "n_head": 6, "n_layer": 2, "vocab_size": 41}
# Models that transformers builds, whole: nothing is missing.
WHOLE = {name: (row.model, row.config) for name, row in ROWS.items()} | {
    "bert without a pooler": (
        lambda config: tf.BertModel(config, add_pooling_layer=False),
        tf.BertConfig(**PLAIN),
    ),
    "bert, a decoder": (tf.BertLMHeadModel, tf.BertConfig(**DECODER)),
    "bert of classes": (tf.BertForTokenClassification, tf.BertConfig(**PLAIN)),
    "electra": (tf.ElectraForPreTraining, tf.ElectraConfig(**ELECTRA)),
    "electra of one width": (
        tf.ElectraModel,
        tf.ElectraConfig(**PLAIN | {"embedding_size": PLAIN["hidden_size"]}),
    ),
    "roberta of classes": (tf.RobertaForSequenceClassification, tf.RobertaConfig(**PLAIN)),
    "vit, masked": (tf.ViTForMaskedImageModeling, tf.ViTConfig(**VIT)),
    "vit of classes": (tf.ViTForImageClassification, tf.ViTConfig(**VIT)),
    "gpt2 of classes": (tf.GPT2ForTokenClassification, tf.GPT2Config(**GPT2)),
    "falcon of one after another": (
        tf.FalconForQuestionAnswering,
        tf.FalconConfig(**SIZES, parallel_attn=False),
    ),
    "falcon of one norm": (
        tf.FalconModel,
        tf.FalconConfig(**SIZES, new_decoder_architecture=True, num_ln_in_parallel_attn=1),
    ),
    "gpt_neox of classes": (
        tf.GPTNeoXForSequenceClassification,
        ROWS["gpt_neox"].config,
    ),
    "bloom alone": (tf.BloomModel, tf.BloomConfig(**BLOOM)),
    "t5, its encoder": (tf.T5EncoderModel, tf.T5Config(**T5)),
    "t5, gated": (tf.T5Model, tf.T5Config(**T5, feed_forward_proj="gated-gelu")),
    "umt5": (tf.UMT5ForConditionalGeneration, tf.UMT5Config(**T5)),
    "llama of classes": (tf.LlamaForSequenceClassification, tf.LlamaConfig(**GROUPED)),
    "llama of answers": (tf.LlamaForQuestionAnswering, tf.LlamaConfig(**GROUPED)),
}


def held(name):
    """(config, {key: shape}) of a model as it lives; its tensors have no values."""
    make, config = WHOLE[name]
    with torch.device("meta"):
        model = make(config)
    return config.to_dict(), {key: tuple(t.shape) for key, t in model.state_dict().items()}


def missing(config, keys, names=None, side="keys"):
    """What is said to be missing where a file of `keys` has become one of `names`."""
    table = by_family(family_of(config), config, keys)
    places = [place for place, _ in table.blocks]
    found = parts.missing_parts(table.layout, table.beside, places, names or keys, side)
    return {problem.name: str(problem) for problem in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_of_a_whole_model_nothing_is_missing_on_either_side(name):
    config, shapes = held(name)
    family = family_of(config)
    layout = family.model(config, shapes)
    skipped = [item.key for item in layout.passed_over]
    taken = {key: shape for key, shape in shapes.items() if key not in skipped}
    sizes = by_family(family, config, shapes).blocks[0][1].sizes
    paths = [*layout.shapes(taken, sizes)]
    assert missing(config, [*shapes]) == {}
    assert missing(config, [*shapes], paths, "paths") == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_of_a_whole_model_every_width_is_known_and_none_is_wrong(name):
    config, shapes = held(name)
    table = by_family(family_of(config), config, shapes)
    skipped = passed(table.layout.passed_over, shapes)
    taken = {key: shape for key, shape in shapes.items() if key not in skipped}
    paths = table.layout.shapes(taken, table.sizes)
    traits = table.blocks[0][1]

    def said(key, shape):
        moves = moves_by_sizes(table.layout, {**taken, key: shape}, table.sizes)
        wrong = port_shapes.wrong_axes(moves, traits, config, "keys")
        return {problem.name for problem in wrong}

    assert not [*port_shapes.unlike(table.layout, taken, "keys")]
    assert not [*port_shapes.unlike(table.layout, paths, "paths")]
    some, *_ = taken.items()
    assert said(*some) == set()
    for key, shape in taken.items():
        path = table.layout.row_of(key).partition(" -> ")[2]
        if not re.search(r"[qkv]_proj|out_proj.kernel|\[conv\]|^decoder.bias", path):
            # By 2, as gate and up take turns in gpt-oss.
            assert key in said(key, (*shape[:-1], shape[-1] + 2)), path


# model -> a part behind whose loss there is no model; {0} is every layer's
NEEDED = {
    "llama": "model.embed_tokens model.norm model.layers.{0}.input_layernorm "
    "model.layers.{0}.post_attention_layernorm model.layers.{0}.mlp.gate_proj "
    "model.layers.{0}.mlp.up_proj model.layers.{0}.mlp.down_proj",
    "gpt2": "transformer.wte transformer.wpe transformer.ln_f transformer.h.{0}.ln_1 "
    "transformer.h.{0}.ln_2 transformer.h.{0}.mlp.c_fc transformer.h.{0}.mlp.c_proj",
    "bert alone": "embeddings.word_embeddings embeddings.position_embeddings "
    "embeddings.token_type_embeddings embeddings.LayerNorm encoder.layer.{0}.output.dense "
    "encoder.layer.{0}.attention.output.LayerNorm encoder.layer.{0}.output.LayerNorm "
    "encoder.layer.{0}.intermediate.dense",
    "bert, a decoder": "bert.encoder.layer.{0}.crossattention.output.LayerNorm",
    "electra": "electra.embeddings_project",
    "vit": "embeddings.patch_embeddings.projection layernorm layers.{0}.layernorm_before "
    "layers.{0}.layernorm_after layers.{0}.mlp.fc1 layers.{0}.mlp.fc2",
    "bloom": "transformer.word_embeddings transformer.word_embeddings_layernorm transformer.ln_f "
    "transformer.h.{0}.input_layernorm transformer.h.{0}.post_attention_layernorm "
    "transformer.h.{0}.mlp.dense_h_to_4h transformer.h.{0}.mlp.dense_4h_to_h",
    "falcon of groups": "transformer.h.{0}.ln_attn transformer.h.{0}.ln_mlp",
    "falcon of one": "transformer.h.{0}.input_layernorm transformer.ln_f",
    "gpt_neox": "gpt_neox.embed_in gpt_neox.final_layer_norm "
    "gpt_neox.layers.{0}.post_attention_layernorm gpt_neox.layers.{0}.mlp.dense_4h_to_h",
    "t5": "shared encoder.final_layer_norm decoder.final_layer_norm "
    "encoder.block.{0}.layer.1.DenseReluDense.wi decoder.block.{0}.layer.2.DenseReluDense.wo "
    "decoder.block.{0}.layer.1.layer_norm",
}
NAMELESS = {"vit": ("embeddings.cls_token", "embeddings.position_embeddings")}


def with_tied(lost, config, keys):
    """Return these keys, and the other names under which a file may hold the same tensors."""
    table = by_family(family_of(config), config, keys)
    ties = {item.key: item.same_as for item in table.beside[0].passed_over if item.same_as}
    return {*lost, *(key for key, same_as in ties.items() if same_as in lost)}


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDED)
def test_what_every_model_of_a_family_has_must_be_there(name):
    config, keys = held(name)
    needed = [f"{part}.weight" for part in NEEDED[name].split()] + [*NAMELESS.get(name, ())]
    for part in needed:
        lost = {part.format(i) for i in range(4)} & keys.keys()
        assert lost, part
        lost = with_tied(lost, config, keys)
        (said,) = missing(config, [k for k in keys if k not in lost]).values()
        assert part.format(0) in said  # as the name, or as what would do instead
    everything = {part.format(i) for part in needed for i in range(4)}
    everything = with_tied(everything, config, keys)
    left = [key for key in keys if key not in everything]
    assert len(missing(config, left)) == len(needed)


# model -> the modules that have no bias, by their torch keys; all others beside attention have one
BARE = {
    "llama": ".*",
    "mistral": ".*",
    "qwen2": ".*",
    "qwen3": ".*",
    "gemma3_text": ".*",
    "mixtral": ".*",
    "qwen3_moe": ".*",
    "t5": ".*",
    "falcon of one": r".*mlp\..*",
    "falcon of groups": r".*mlp\..*",
}
HEADS = r"score|classif|qa_outputs"


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_every_bias_of_a_family_must_be_there_and_no_other_may(name):
    config, keys = held(name)
    table = by_family(family_of(config), config, keys)
    beside = {pattern.replace("{layer}", "0") for pattern in table.beside[0].torch_keys()}
    biases = [key for key in keys if key in beside and key.endswith(".bias")]
    assert bool(biases) != (BARE.get(name) == ".*")
    for bias in biases:
        pattern = re.compile(re.sub(r"\\\.0\\\.", r"\.\\d+\.", re.escape(bias)))
        lost = with_tied({key for key in keys if pattern.fullmatch(key)}, config, keys)
        left = [key for key in keys if key not in lost]
        (said,) = missing(config, left).values()
        assert bias in said  # as the name, or as what would do instead
    others = {key for key in beside - keys.keys() if key.endswith(".bias")}
    bare = {key for key in others if re.fullmatch(BARE.get(name, "-"), key)}
    assert not {key for key in bare if not re.match(HEADS, key)}


def test_a_llama_whose_perceptrons_have_biases():
    config = tf.LlamaConfig(**GROUPED, mlp_bias=True)
    keys = [*tf.LlamaForCausalLM(config).state_dict()]
    assert missing(config.to_dict(), keys) == {}
    left = [key for key in keys if not key.endswith("mlp.up_proj.bias")]
    assert missing(config.to_dict(), left).keys() == {"model.layers.0.mlp.up_proj.bias"}


@pytest.mark.parametrize("name", ["llama", "qwen3", "falcon of one", "gpt_neox"])
def test_a_language_model_whose_head_is_not_tied_has_one(name):
    config, keys = held(name)
    config |= {"tie_word_embeddings": False, "architectures": [ROWS[name].name]}
    left = [key for key in keys if key not in ("lm_head.weight", "embed_out.weight")]
    (said,) = missing(config, left).values()
    assert "names an architecture with an untied head" in said
    assert missing(config | {"architectures": ["Model"]}, left) == {}
    assert missing(config | {"architectures": 3}, left) == {}


FREE = {
    "bert": "cls.predictions.transform.dense cls.predictions.transform.LayerNorm",
    "bert alone": "pooler",
    "gpt2": "lm_head",
    "vit": "pooler",
    "vit, masked": "decoder.0",
    "llama": "lm_head",
    "llama of classes": "score",
}


@pytest.mark.parametrize("name", FREE)
def test_poolers_and_heads_may_be_absent_but_not_in_half(name):
    config, keys = held(name)
    for part in FREE[name].split():
        left = [key for key in keys if not key.startswith(f"{part}.")]
        assert len(left) < len(keys)
        assert missing(config, left) == {}
        if f"{part}.bias" in keys:
            assert missing(config, [*left, f"{part}.bias"]).keys() == {f"{part}.weight"}


def test_metas_files_too():
    config = {"dim": 24, "n_heads": 6, "n_layers": 1}
    blocks = [f"layers.0.attention.w{name}.weight" for name in "qkvo"]
    table = by_family(LLAMA_META, config, blocks)
    places = [place for place, _ in table.blocks]
    found = parts.missing_parts(table.layout, table.beside, places, blocks, "keys")
    assert {problem.name.removesuffix(".weight") for problem in found} == {
        *("tok_embeddings", "norm", "layers.0.attention_norm", "layers.0.ffn_norm"),
        *(f"layers.0.feed_forward.w{i}" for i in (1, 2, 3)),
    }


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return saved_llama(tmp_path_factory.mktemp("llama"))


def ported(source, target, to, *options):
    done = CliRunner().invoke(main, ["port", str(source), str(target), "--to", to, *options])
    return done.exit_code, " ".join(done.stderr.split())


def test_a_port_says_all_that_is_missing_with_the_nearest_names_and_writes_nothing(tmp_path, llama):
    tensors = dict(load_checkpoint(llama))
    config = json.loads((llama / "config.json").read_text())
    tensors["model.nrom.weight"] = tensors.pop("model.norm.weight")
    left = {key: array for key, array in tensors.items() if "gate_proj" not in key}
    (tmp_path / "source").mkdir()
    status, said = ported(saved(tmp_path / "source", left, config), tmp_path / "flax", "flax")
    assert status == 2
    assert "missing: 'model.norm.weight'" in said
    assert "nearest: model.nrom.weight" in said
    assert "'model.layers.0.mlp.gate_proj.weight': every model of this family has it" in said
    assert "here no layer has it" in said
    assert "3 problems" in said
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_the_caller_passes_over_is_not_missed(tmp_path, llama):
    options = ("--ignore", "*.gate_proj.weight", "--ignore", "model.norm.weight")
    assert ported(llama, tmp_path / "flax", "flax", *options)[0] == 0
    assert "final_norm.scale" not in load_checkpoint(tmp_path / "flax")


def test_the_way_back_says_it_by_its_own_paths(tmp_path, llama):
    assert ported(llama, tmp_path / "flax", "flax")[0] == 0
    tensors = dict(load_checkpoint(tmp_path / "flax"))
    del tensors["final_norm.scale"]
    saved(tmp_path / "flax", tensors)
    status, said = ported(tmp_path / "flax", tmp_path / "back", "torch")
    assert status == 2
    assert "1 problem" in said
    assert "missing: 'final_norm.scale'" in said
    assert not (tmp_path / "back").exists()
