"""What a starting table carried computes what transformers computes, and a mistake in it does not.

The port has the arrays that `jax-attn port` wrote, and is compared with transformers' own module.
"""

import copy
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from flax import nnx

from helpers.transfer.starting_tables import (
    ANSWERS,
    answered,
    heads_of,
    invoke,
    model_of,
    table_text,
)
from jax_attn import GroupedQueryAttention, Rotary, parity
from jax_attn.parity.judge.compare import Verdict
from jax_attn.transfer import Layout, TransferError, load, load_checkpoint, row
from jax_attn.transfer.table.rows import holes

B, T, D, N = 2, 8, 16, 4


@dataclass
class Attention:
    """The attention of a model's first layer.

    place: its torch prefix. num_heads, is_grouped, has: of this package's module.
    call(module, x, bias, turns): its output; turns are the cosines and sines that the whole model
    makes, None for one that turns nothing. lacks: a projection that has no bias. drops: parts of
    the torch module that are no attention.
    """

    place: str
    num_heads: int = N
    is_grouped: bool = False
    has: dict[str, Any] = field(default_factory=dict)
    call: Callable[..., torch.Tensor] = lambda module, x, bias, turns: module(x)[0]
    is_causal: bool = False
    is_biased: bool = False
    lacks: str = ""
    drops: tuple[str, ...] = ()


def turned(module, x, bias, turns):
    return module(x, position_embeddings=turns, attention_mask=None)[0]


def turned_at(module, x, bias, turns):
    return module(x, None, None, position_embeddings=turns)[0]


def biased(module, x, bias, turns):
    return module(x, position_bias=bias)[0]


def exact(module, x, bias, turns):
    """Nystromformer's, without the convolution of values that it adds."""
    module.self.conv_kernel_size = None
    return module.output.dense(module.self(x)[0])


PLAIN = {"use_bias": False}
INTERLEAVED = PLAIN | {"rotary": Rotary(dim=2, interleaved=True)}
DECODER = {"is_causal": True, "call": turned}
GROUPED = DECODER | {"is_grouped": True}
ATTENTION = {
    "CohereForCausalLM": Attention(
        "model.layers.0.self_attn",
        has=PLAIN | {"rotary": Rotary(5e5, interleaved=True)},
        **GROUPED,
    ),
    "StableLmForCausalLM": Attention(
        "model.layers.0.self_attn", has={"rotary": Rotary(dim=2), "use_out_bias": False}, **GROUPED
    ),
    "MptForCausalLM": Attention(
        "transformer.blocks.0.attn",
        has=PLAIN,
        is_biased=True,
        call=lambda module, x, bias, turns: biased(module, x, bias[0], turns),
    ),
    "NystromformerForMaskedLM": Attention(
        "nystromformer.encoder.layer.0.attention",
        call=exact,
        drops=("self.conv", "output.LayerNorm"),
    ),
    "WhisperForConditionalGeneration": Attention(
        "model.encoder.layers.0.self_attn", lacks="k_proj"
    ),
    "CLIPModel": Attention("vision_model.encoder.layers.0.self_attn"),
    "DistilBertForMaskedLM": Attention("distilbert.transformer.layer.0.attention"),
    "MPNetForMaskedLM": Attention(
        "mpnet.encoder.layer.0.attention.attn", is_biased=True, call=biased
    ),
    "MixtralForCausalLM": Attention(
        "model.layers.0.self_attn", has=PLAIN | {"rotary": Rotary(1e6)}, **GROUPED
    ),
    "GPTJForCausalLM": Attention("transformer.h.0.attn", has=INTERLEAVED, **DECODER),
    "CodeGenForCausalLM": Attention(
        "transformer.h.0.attn", num_heads=8, has=INTERLEAVED, **DECODER
    ),
    "OpenAIGPTLMHeadModel": Attention("transformer.h.0.attn", is_causal=True),
    "GPTNeoXJapaneseForCausalLM": Attention(
        "gpt_neox_japanese.layers.0.attention",
        has=PLAIN | {"rotary": Rotary(dim=2)},
        call=turned_at,
    ),
}


class Reference(torch.nn.Module):
    """One block of a model, and what makes its cosines and sines."""

    def __init__(self, model, case):
        super().__init__()
        self.block = copy.deepcopy(model.get_submodule(case.place))
        for name in case.drops:
            self.block.set_submodule(name, torch.nn.Identity())
        turning = [m for name, m in model.named_modules() if name.endswith("rotary_emb")]
        self.turning = turning[0] if turning else None
        self.call = case.call

    def forward(self, x, bias=None):
        at = torch.arange(T)[None]
        turns = None if self.turning is None else self.turning(x, position_ids=at)
        return self.call(self.block, x, bias, turns)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Of a model, itself, its folder and its answered table; each made once."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model = model_of(name)
            model.save_pretrained(folder / "model")
            table = table_text(folder / "model", folder / "begun.py")
            made[name] = model, folder, answered(table, ANSWERS.get(name, ""))[0]
        return made[name]

    return get


def ported(folder, text, target, monkeypatch, *options):
    """What `port` with this table says, and the table; the arrays are then in `target`."""
    module = f"table_{abs(hash(text))}"
    (folder / f"{module}.py").write_text(text)
    monkeypatch.chdir(folder)
    command = ("port", folder / "model", target, "--to", "flax", "--layout", f"{module}:LAYOUT")
    done = invoke(*command, *heads_of(text), *options)
    monkeypatch.syspath_prepend(folder)
    return done, importlib.import_module(module).LAYOUT


def part(layout, case):
    """The rows of one block, by the names that the modules compared have."""
    rows = [r for group in layout.groups for r in group.rows if holes(r) <= {"layer"}]
    passed = tuple(f"{case.place}.{name}." for name in case.drops)

    def short(names, new=""):
        return [new + name.removeprefix(f"{case.place}.") for name in names]

    inside = [
        r
        for r in (r.at((("layer", "0"),)) for r in rows)
        if r.keys[0].startswith(f"{case.place}.") and not r.keys[0].startswith(passed)
    ]
    return Layout(*(row(short(r.keys, "block."), short(r.paths), *r.steps) for r in inside))


def compared(name, model, written, layout, *, gradients=False):
    """The verdict on what was written. Raises TransferError where it does not fit the module."""
    case = ATTENTION[name]
    num_kv_heads = case.num_heads // (2 if case.is_grouped else 1)
    sizes = (D, case.num_heads, num_kv_heads)
    port = GroupedQueryAttention(*sizes, rngs=nnx.Rngs(0), **case.has)
    if case.lacks:
        getattr(port, case.lacks).bias = None
    own = part(layout, case)
    with load_checkpoint(written) as arrays:
        named = {path: arrays[f"{case.place}.{path}"] for path in own.flax_paths()}
    load(port, named, Layout(*(row(path, path) for path in named)))
    rng = np.random.default_rng(0)
    inputs = {"x": rng.standard_normal((B, T, D))}
    if case.is_biased:
        inputs["bias"] = rng.standard_normal((1, N, T, T))
    return parity.check(
        Reference(model, case),
        port,
        inputs,
        layout=own,
        port_call=lambda m, x, bias=None: m(x, bias=bias, is_causal=case.is_causal),
        gradients=gradients,
        transforms=("jit",),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTION)
def test_the_right_answers_pass(name, begun, tmp_path, monkeypatch):
    model, folder, text = begun(name)
    done, layout = ported(folder, text, tmp_path / "flax", monkeypatch)
    assert done.exit_code == 0, done.output
    result = compared(name, model, tmp_path / "flax", layout, gradients=True)
    assert result.verdict is Verdict.PASS, str(result)


def exchanged(text):
    """The weights of query and key, in each other's place."""
    return re.sub(r"\b([qk])_proj\.kernel", lambda m: f"{'kq'['qk'.index(m[1])]}_proj.kernel", text)


def turned_otherwise(text):
    """The output's weight: (out, in) taken for (in, out), or the other way round."""
    as_it_lies = re.sub(r"\blinear,\s+heads_in", "heads_in", text)
    return (
        as_it_lies
        if as_it_lies != text
        else re.sub(r'(",\s+)heads_in', r"\1linear, heads_in", text)
    )


IN_TURN, BY_HEAD = "query, key, value one after another", "for each key/value head"
TURNED = ("CohereForCausalLM", "StableLmForCausalLM", "MixtralForCausalLM", "OpenAIGPTLMHeadModel")
OF_PARTS = ("WhisperForConditionalGeneration", "CLIPModel")
WRONG_ANSWERS = {
    "CodeGenForCausalLM": (IN_TURN, BY_HEAD),
    "OpenAIGPTLMHeadModel": (BY_HEAD,),
    "GPTNeoXJapaneseForCausalLM": (IN_TURN,),
}
MISTAKES = {f"exchanged in {name}": (name, exchanged) for name in ATTENTION}
MISTAKES |= {f"turned in {name}": (name, turned_otherwise) for name in TURNED}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_row_is_seen(mistake, begun, tmp_path, monkeypatch):
    name, change = MISTAKES[mistake]
    model, folder, text = begun(name)
    assert change(text) != text
    done, layout = ported(folder, change(text), tmp_path / "flax", monkeypatch)
    if change is exchanged and ATTENTION[name].is_grouped:
        expect_refused(done, "k_proj.weight", tmp_path / "flax")
    else:
        assert done.exit_code == 0, done.output
        expect_failed(compared(name, model, tmp_path / "flax", layout))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"), [(name, words) for name, wrong in WRONG_ANSWERS.items() for words in wrong]
)
def test_a_wrong_answer_is_seen(name, words, begun, tmp_path, monkeypatch):
    model, folder, text = begun(name)
    wrong, _ = answered((folder / "begun.py").read_text(), words)
    assert wrong != text
    done, layout = ported(folder, wrong, tmp_path / "flax", monkeypatch)
    assert done.exit_code == 0, done.output
    expect_failed(compared(name, model, tmp_path / "flax", layout))


def expect_failed(result):
    """By what was computed, as the weights are compared through the mistaken table."""
    assert result.verdict is Verdict.FAIL
    assert "output" in {t.name for t in result.tensors if t.verdict is Verdict.FAIL}


def expect_refused(done, words, target):
    assert done.exit_code == 2, done.output
    assert words in " ".join(done.output.split())
    assert not target.exists()


@pytest.mark.parametrize("name", ATTENTION)
def test_heads_split_otherwise_are_refused(name, begun, tmp_path, monkeypatch):
    """By the command, or by the module where the config has heads of several parts."""
    model, folder, text = begun(name)
    wrong = ("--num-heads", "16", "--num-kv-heads", "16", "--head-dim", "1")
    done, layout = ported(folder, text, tmp_path / "flax", monkeypatch, *wrong)
    if name in OF_PARTS:
        with pytest.raises(TransferError, match=r"'q_proj\.kernel'.*\[16, 4, 4\]"):
            compared(name, model, tmp_path / "flax", layout)
    else:
        count = ATTENTION[name].num_heads
        words = f"'--num-heads': expected {count}, as config.json says, got 16"
        expect_refused(done, words, tmp_path / "flax")


# What this package has no module for -> what `port --check` says that its rebuild lacks, and a row
# with a step that contradicts the shape.
WITHOUT_MODULE = {
    "XLNetLMHeadModel": (
        "rel_attn.q [16, 4, 4] is a projection with heads in its shape, for relative attention; "
        "the rebuild lacks a relative position bias: model_type = 'xlnet'",
        'rel_attn.q"),',
        'rel_attn.q", linear),',
    ),
    "DeepseekV3ForCausalLM": (
        "kv_b_proj.weight [32, 5] expands a compressed state into keys and values, which is "
        "not supported; the rebuild lacks rotary positions",
        'kv_b_proj.kernel",\n        linear,',
        'kv_b_proj.kernel",\n        conv,',
    ),
}


@pytest.mark.parametrize("name", WITHOUT_MODULE)
def test_what_no_module_here_does_is_told(name, begun, tmp_path, monkeypatch):
    _, folder, text = begun(name)
    lacks, right, wrong = WITHOUT_MODULE[name]
    done, _ = ported(folder, text, tmp_path / "flax", monkeypatch, "--check")
    assert done.exit_code == 4, done.output
    assert lacks in " ".join(done.output.split())
    assert right in text
    mistaken = text.replace(right, wrong).replace(
        "    Layout,", "    Layout,\n    conv,\n    linear,"
    )
    done, _ = ported(folder, mistaken, tmp_path / "again", monkeypatch)
    expect_refused(done, lacks.split(" [")[0], tmp_path / "again")
