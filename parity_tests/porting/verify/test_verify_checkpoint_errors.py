"""`jax-attn verify CHECKPOINT` on what it cannot read: one message, and nothing written."""

import pytest
import torch  # noqa: F401  # `verify` needs it

from helpers.transfer.torch_checkpoints import USAGE, D, N, bert, llama, run, saved, tensors


def empty_folder(folder):
    (folder / "notes.txt").write_text("none here")
    return folder


def written(name, content):
    def write(folder):
        (folder / name).write_bytes(content)
        return folder / name

    return write


def truncated(folder):
    path = saved(folder, tensors(bert()), {"num_attention_heads": N})
    path.write_bytes(path.read_bytes()[:-100])
    return path


def with_config(config, shapes=None):
    return lambda folder: saved(folder, tensors(shapes or bert()), config)


def config_of(text):
    def write(folder):
        path = saved(folder, tensors(bert()))
        (folder / "config.json").write_text(text)
        return path

    return write


BAD = {
    "no such folder": (lambda f: f / "gone", [], ["CHECKPOINT", "gone"]),
    "a folder without": (empty_folder, [], ["*.safetensors", "notes.txt"]),
    "truncated": (truncated, [], ["model.safetensors", "a complete safetensors file"]),
    "no attention": (
        with_config({}, {"mlp.up.weight": (D, D), "mlp.down.weight": (D, D)}),
        [],
        ["expected attention", "2 tensors", "mlp.up.weight"],
    ),
    "heads unknown": (with_config(None), [], ["--num-heads", "self.query.weight"]),
    "a config of another model": (
        with_config({"model_type": "bert", "num_attention_heads": N}),
        [],
        ["self.query.weight", "expected [768, 768] for q_proj.kernel [768, 6, 128]", "[30, 30]"],
    ),
    "heads that a family has otherwise": (
        with_config({"model_type": "bert", "num_attention_heads": N, "hidden_size": D}),
        ["--num-heads", 5],
        ["--num-heads", "expected 6, as config.json says, got 5"],
    ),
    "heads do not divide": (
        with_config(None, bert(layers=2)),
        ["--num-heads", 7],
        [
            "2 problems",
            "encoder.layer.0.attention.self.query.weight",
            "encoder.layer.1.attention.self.query.weight",
            "--num-heads = 7",
            "got 30 rows",
        ],
    ),
    "zero heads": (
        with_config(None),
        ["--num-heads", 0],
        ["--num-heads", "0 is not in the range x>=1"],
    ),
    "a broken config": (config_of("{"), [], ["config.json", "expected JSON"]),
    "a bottomless config": (config_of("[" * 100_000), [], ["config.json", "expected JSON"]),
    "a config that says a thing twice": (
        config_of('{"n_head": 6, "n_head": 5}'),
        [],
        ["config.json", "named more than once: ['n_head']"],
    ),
    "packed and split": (
        with_config({"n_head": N}, llama() | {"layers.0.self_attn.qkv_proj.weight": (3 * D, D)}),
        [],
        ["ambiguous", "qkv_proj.weight", "q_proj.weight"],
    ),
}


@pytest.mark.parametrize(("make", "options", "named"), BAD.values(), ids=BAD)
def test_bad_input_is_one_message_and_nothing_written(tmp_path, make, options, named):
    source = tmp_path / "source"
    source.mkdir()
    path = make(source)
    done = run(path, *options, "--report", tmp_path / "report")
    assert done.exit_code == USAGE, done.output
    assert isinstance(done.exception, SystemExit)  # no traceback
    assert done.stdout == ""
    said = " ".join(done.stderr.split())
    assert said.count("Error: ") == 1
    for word in named:
        assert word in said
    assert not (tmp_path / "report").exists()
