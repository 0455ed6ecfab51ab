"""`jax-attn port`: every family there and back, to the bit; what is written, and what proves it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from flax import nnx

from helpers.dtype_rows import in_dtypes
from helpers.families.family_models import GROUPED, ROWS, saved_llama, tf
from helpers.same_arrays import assert_same
from helpers.transfer.port_cases import plain, ported
from jax_attn import nn
from jax_attn.cli import status
from jax_attn.transfer import load_checkpoint, save_checkpoint

LOADED = "print(*({'jax', 'flax', 'torch'} & set(sys.modules)))"


@pytest.mark.slow
@in_dtypes("name", ROWS, low=("llama",))
def test_a_familys_file_comes_back_to_the_bit(tmp_path, name, dtype):
    row = ROWS[name]
    torch.manual_seed(0)
    row.model(row.config).to(getattr(torch, dtype)).save_pretrained(tmp_path / "source")
    done = ported(tmp_path / "source", tmp_path / "flax", "flax", "--json")
    document = json.loads(done.stdout)
    ported(tmp_path / "flax", tmp_path / "back", "torch")
    given = dict(load_checkpoint(tmp_path / "source"))
    over = document["plan"]["passed_over"]
    kept = {key: array for key, array in given.items() if key not in over}
    assert_same(dict(load_checkpoint(tmp_path / "back")), kept)
    assert document["proof"]["carried"] == sum(array.nbytes for array in kept.values())
    counted = document["proof"]["carried"] + document["proof"]["passed_over"]
    assert counted == sum(array.nbytes for array in given.values())
    config = (tmp_path / "source" / "config.json").read_bytes()
    assert (tmp_path / "back" / "config.json").read_bytes() == config
    assert tf.AutoConfig.from_pretrained(tmp_path / "back").model_type == row.config.model_type


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return saved_llama(tmp_path_factory.mktemp("llama"))


def test_the_plan_is_printed_and_a_dry_run_writes_nothing(tmp_path, llama):
    done = ported(llama, tmp_path / "flax", "flax", "--dry-run")
    line = next(li for li in done.stdout.split("\n") if "self_attn.k_proj" in li)
    assert line.split("  ")[0] == "model.layers.{0..1}.self_attn.k_proj.weight"
    for said in ("[30, 24]", "layers.{0..1}.attention.k_proj.kernel", "[24, 3, 10]", "float32"):
        assert said in line
    assert line.endswith("linear heads")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_flax_side_fills_our_module(tmp_path, llama):
    ported(llama, tmp_path / "flax", "flax")
    found = load_checkpoint(tmp_path / "flax")
    module = nn.GroupedQueryAttention(24, 6, 3, head_dim=10, use_bias=False, rngs=nnx.Rngs(0))
    state = nnx.state(module, nnx.Param)
    stem = "layers.0.attention."
    flat = dict(nnx.to_flat_state(state))
    assert {stem + ".".join(p) for p in flat} == {k for k in found if k.startswith(stem)}
    for path, variable in flat.items():
        assert found[stem + ".".join(path)].shape == variable.get_value().shape


@pytest.mark.slow
def test_an_orbax_checkpoint_restores_and_comes_back(tmp_path, llama):
    import orbax.checkpoint as ocp

    ported(llama, tmp_path / "flax", "flax", "--format", "orbax")
    with ocp.StandardCheckpointer() as orbax:
        state = nnx.restore_int_paths(orbax.restore(tmp_path / "flax" / "state"))
    given = load_checkpoint(llama)
    kernel = state["layers"][1]["attention"]["q_proj"]["kernel"]
    np.testing.assert_array_equal(
        np.asarray(kernel).reshape(24, 60).T, given["model.layers.1.self_attn.q_proj.weight"]
    )
    module = nn.GroupedQueryAttention(24, 6, 3, head_dim=10, use_bias=False, rngs=nnx.Rngs(0))
    own = nnx.state(module, nnx.Param)
    nnx.replace_by_pure_dict(own, state["layers"][1]["attention"])
    nnx.update(module, own)
    np.testing.assert_array_equal(module.q_proj.kernel[...], kernel)
    ported(tmp_path / "flax", tmp_path / "back", "torch")
    assert_same(dict(load_checkpoint(tmp_path / "back")), dict(given))


ORBAX = {
    "an empty array": ({"a": np.zeros((0, 3), "f4")}, "orbax saves no empty array"),
    "a leaf that is a branch": ({"a": np.ones(3), "a.b": np.ones(3)}, "'a' is both"),
}


@pytest.mark.parametrize("name", ORBAX)
def test_what_orbax_does_not_hold_is_named(tmp_path, name):
    from jax_attn.transfer import TransferError
    from jax_attn.transfer.files import orbax_folder

    arrays, said = ORBAX[name]
    with pytest.raises(TransferError, match=said):
        orbax_folder.save(tmp_path / "state", arrays)
    assert list(tmp_path.iterdir()) == []


def test_what_was_trained_and_saved_anew_goes_back_without_a_record(tmp_path, llama):
    ported(llama, tmp_path / "flax", "flax")
    (tmp_path / "flax" / "port.json").unlink()
    ported(tmp_path / "flax", tmp_path / "back", "torch")
    assert_same(dict(load_checkpoint(tmp_path / "back")), dict(load_checkpoint(llama)))


def test_a_bare_model_goes_back_under_its_own_keys(tmp_path):
    tf.LlamaModel(tf.LlamaConfig(**GROUPED)).save_pretrained(tmp_path / "source")
    ported(tmp_path / "source", tmp_path / "flax", "flax")
    ported(tmp_path / "flax", tmp_path / "back", "torch")
    assert "layers.0.self_attn.q_proj.weight" in load_checkpoint(tmp_path / "back")


def in_shards(folder, state):
    save_checkpoint(folder / "model.safetensors", state, shard_bytes=9_000)
    assert len(list(folder.glob("*.safetensors"))) > 1


FORMS = {
    "shards": in_shards,
    "torch's pickle": lambda folder, state: torch.save(state, folder / "pytorch_model.bin"),
    "wrapped": lambda folder, state: save_checkpoint(
        folder / "model.safetensors", {f"module.{key}": t for key, t in state.items()}
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_file_is_carried(tmp_path, llama, name):
    given = tf.LlamaForCausalLM.from_pretrained(llama)
    (tmp_path / "source").mkdir()
    given.config.save_pretrained(tmp_path / "source")
    FORMS[name](tmp_path / "source", given.state_dict())
    ported(
        tmp_path / "source", tmp_path / "flax", "flax", *["--strip=module"] * (name == "wrapped")
    )
    ported(tmp_path / "flax", tmp_path / "back", "torch")
    assert_same(dict(load_checkpoint(tmp_path / "back")), dict(load_checkpoint(llama)))
    again = tf.LlamaForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert all(torch.equal(again[key], tensor) for key, tensor in given.state_dict().items())


def test_ties_are_kept_and_said(tmp_path):
    model = tf.GPT2LMHeadModel(ROWS["gpt2"].config)
    (tmp_path / "source").mkdir()
    model.config.save_pretrained(tmp_path / "source")
    save_checkpoint(tmp_path / "source" / "model.safetensors", model.state_dict())
    done = ported(tmp_path / "source", tmp_path / "flax", "flax")
    assert "lm_head.weight: skipped: tied to transformer.wte.weight" in done.stdout
    assert not any("head" in path for path in load_checkpoint(tmp_path / "flax"))


def test_a_tie_that_is_none_is_an_error(tmp_path):
    model = tf.GPT2LMHeadModel(ROWS["gpt2"].config)
    (tmp_path / "source").mkdir()
    model.config.save_pretrained(tmp_path / "source")
    held = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    held["lm_head.weight"][3, 5] += 1
    save_checkpoint(tmp_path / "source" / "model.safetensors", held)
    done = ported(tmp_path / "source", tmp_path / "flax", "flax", status=2)
    assert "to which it is tied" in done.stderr


RIGHT = ("--layout", "helpers.transfer.port_tables:RIGHT")


def test_an_untested_table_of_a_user_goes_there_and_back(tmp_path):
    source = plain(tmp_path)
    ported(source, tmp_path / "flax", "flax", *RIGHT)
    ported(tmp_path / "flax", tmp_path / "back", "torch", *RIGHT)
    assert_same(dict(load_checkpoint(tmp_path / "back")), dict(load_checkpoint(source)))


CASTS = {
    "wider": ("bfloat16", "float32", ()),
    "rounded when asked to": ("float32", "bfloat16", ("--lossy",)),
}


@pytest.mark.parametrize("name", CASTS)
def test_numbers_are_cast(tmp_path, name):
    before, after, options = CASTS[name]
    source = plain(tmp_path, before)
    ported(source, tmp_path / "flax", "flax", *RIGHT, "--dtype", after, *options)
    path = "layers.1.attn.out_proj.bias"
    given = load_checkpoint(source)["encoder.layer.1.attention.output.dense.bias"]
    np.testing.assert_array_equal(load_checkpoint(tmp_path / "flax")[path], given.astype(after))


def test_what_does_not_come_back_is_seen_and_not_kept(tmp_path, monkeypatch):
    """The proof can fail: a bit that turns between the write and the second reading."""
    from jax_attn.transfer.files import port_folder

    write = port_folder.write

    def turned(folder, *rest):
        write(folder, *rest)
        path = folder / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(port_folder, "write", turned)
    done = ported(plain(tmp_path), tmp_path / "flax", "flax", *RIGHT, status=1)
    assert "is not bit-identical after" in done.stdout
    assert "nothing kept" in done.stdout
    assert not (tmp_path / "flax").exists()


def test_an_interrupted_port_leaves_nothing(tmp_path, monkeypatch):
    from jax_attn.porting.port import carry_and_prove

    def interrupted(*arguments):
        raise KeyboardInterrupt

    source = plain(tmp_path)
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(carry_and_prove, "prove", interrupted)
    done = ported(source, tmp_path / "flax", "flax", *RIGHT, status=130)
    assert "layers.{0..1}.attn.q_proj.kernel" in done.stdout  # the plan comes first
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_a_port_that_is_killed_leaves_what_does_not_look_whole(tmp_path):
    arguments = ["port", plain(tmp_path), tmp_path / "flax", "--to", "flax", *RIGHT]
    code = (
        "import os; from jax_attn.porting.port import carry_and_prove; "
        "carry_and_prove.prove = lambda *a: os._exit(9); "
        f"from jax_attn.cli import main; main({[*map(str, arguments)]!r})"
    )
    here = Path(__file__).parents[2]  # of helpers/transfer/port_tables.py
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=here)
    assert done.returncode == 9, done.stderr
    assert not (tmp_path / "flax").exists()
    (left,) = tmp_path.glob(".flax.*")
    assert left.name.endswith(".partial")
    said = ported(tmp_path / "source", tmp_path / "flax", "flax", *RIGHT, "--clean").stderr
    assert f"{left}: " in said
    assert " old, of a port that was killed: removed\n" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flax", "source"]


@pytest.mark.slow
def test_inspect_and_port_start_no_framework(llama, tmp_path):
    target = tmp_path / "flax"
    calls = "".join(
        f"try:\n main({arguments!r}, standalone_mode=False)\nexcept SystemExit: pass\n"
        for arguments in (["inspect", str(llama)], ["port", str(llama), str(target), "--to=flax"])
    )
    code = f"import sys\nfrom jax_attn.cli import main\n{calls}{LOADED}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not {"jax", "flax", "torch"} & set(done.stdout.strip().split("\n")[-1].split())
    assert target.is_dir()


def test_check_needs_torch_and_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "present", lambda module: module != "torch")
    done = ported(plain(tmp_path), tmp_path / "flax", "flax", "--check", status=3)
    assert "pip install 'torch>=2.10'" in done.stderr
