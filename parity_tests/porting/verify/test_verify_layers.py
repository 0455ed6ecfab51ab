"""`jax-attn verify CHECKPOINT --layers`: single layers, each cut out of the model."""

import pytest

from helpers.transfer.torch_checkpoints import INCONCLUSIVE, USAGE, verify
from jax_attn.parity.judge.compare import Verdict
from jax_attn.porting.verify import cut as cutting
from jax_attn.porting.verify import model_pair, whole
from jax_attn.porting.verify.source_pair import pair_of
from jax_attn.transfer import load_checkpoint

# Case -> its layers: both where they differ, else the one whose names a cut must change.
OF_LAYERS = {
    "bert": (1,),
    "gpt2": (1,),
    "falcon, groups": (1,),
    "opt, norms behind": (0,),
    "qwen2": (0, 1),
}


def assert_each_passes_alone(case, layers):
    results = [*whole.verify_layers(case.folder, case.config, layers)]
    assert [r.name for r in results] == [f"layer {layer}, float32" for layer in layers]
    for result in results:
        result.raise_for_status()
        assert result.notes[0].kind == "about-checkpoint"


@pytest.mark.slow
@pytest.mark.usefixtures("outputs_alone")
@pytest.mark.parametrize("name", OF_LAYERS)
def test_each_layer_passes_alone(name, small):
    assert_each_passes_alone(small(name), OF_LAYERS[name])


@pytest.mark.slow
@pytest.mark.usefixtures("one_dtype")
def test_each_layer_passes_alone_with_its_gradients(small):
    assert_each_passes_alone(small("gemma2"), (1,))


@pytest.mark.slow
@pytest.mark.usefixtures("outputs_alone")
def test_the_summary_of_layers_says_what_they_were_verified_with(small, monkeypatch):
    """Also the window that only one of them has."""
    monkeypatch.setattr(cutting, "ROWS", 17)
    monkeypatch.setattr(model_pair, "LONGEST", 4)
    done = verify(small("qwen2").folder, "--layers", "0,1")
    assert done.exit_code == INCONCLUSIVE, done.output
    words = " ".join(done.output.split())
    assert "note: verified each layer alone, between the embedding and the last norm and" in words
    assert "with the first 17 of 41 tokens, against transformers" in words
    assert "note: rows of 4 tokens are too short for the window of 5" in words


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_a_cut_does_what_the_layer_does_in_its_place(name, small, tmp_path):
    """The windows of the two layers differ."""
    pair, windows = small(name).pair, []
    for layer in (0, 1):
        (folder := tmp_path / str(layer)).mkdir()
        config = cutting.cut(small(name).folder, small(name).config, layer, folder)
        traits = pair_of(folder, config, "float32").traits
        assert traits.blocks == pair.traits.blocks[layer : layer + 1]
        windows.append(traits.blocks[0].attention.window)
    assert windows[0] != windows[1]


@pytest.mark.slow
@pytest.mark.usefixtures("outputs_alone")
def test_a_cut_has_the_first_rows_of_the_vocabulary(small, tmp_path, monkeypatch):
    monkeypatch.setattr(cutting, "ROWS", 17)
    config = cutting.cut(small("bert").folder, small("bert").config, 1, tmp_path)
    file, cut = load_checkpoint(small("bert").folder), load_checkpoint(tmp_path)
    assert config["vocab_size"] == 17
    rows = {key for key in cut if cut[key].shape != file[key.replace(".0.", ".1.")].shape}
    assert rows == {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias"}
    for key in cut:
        whole_tensor = file[key.replace(".0.", ".1.")]
        assert cut[key].tobytes() == whole_tensor[: len(cut[key])].tobytes(), key
    assert {key for key in cut if ".layer." in key} == {
        key.replace(".1.", ".0.") for key in file if ".layer.1." in key
    }
    pair_of(tmp_path, config, "float32").check().raise_for_status()


@pytest.mark.slow
@pytest.mark.usefixtures("outputs_alone")
def test_a_mistake_in_one_layer_is_found_there(small, monkeypatch):
    load = whole.ModelPair.of

    def scaled(*args):
        pair = load(*args)
        pair.port.layers[0].attention.scale = 1.001 * pair.traits.blocks[0].attention.scale
        return pair

    monkeypatch.setattr(whole.ModelPair, "of", scaled)
    (result,) = whole.verify_layers(small("gemma2").folder, small("gemma2").config, (1,))
    assert result.verdict is Verdict.FAIL


LAYERS = {
    "not there, beside one that is": ("gpt2", "0,2", "expected one of the layers 0 to 1, got 2"),
    "no numbers": ("gpt2", "0,x", "such as 2,5"),
    "twice the same": ("gpt2", "1,1", "such as 2,5"),
    "none": ("gpt2", "", "such as 2,5"),
    "one of an encoder or of a decoder": (
        "mt5",
        "0",
        "expected a model of one stack, got an encoder and a decoder",
    ),
    "what depends on its number": (
        "gpt2, scaled by layer",
        "1",
        "depends on its own number (scale_attn_by_inverse_layer_idx), which a model of one layer",
    ),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.usefixtures("outputs_alone")
def test_layers_that_cannot_be_verified_alone_are_refused(name, small):
    case, layers, words = LAYERS[name]
    done = verify(small(case).folder, "--layers", layers)
    assert done.exit_code == USAGE
    assert words in " ".join(done.output.split())
