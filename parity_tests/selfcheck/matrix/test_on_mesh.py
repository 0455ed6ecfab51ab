"""Rows of the matrix on meshes: what passes, and that each demand on them can fail."""

from dataclasses import replace

import jax
import pytest
from jax import P
from jax.sharding import NamedSharding

from helpers.parity.findings import sentences
from jax_attn.parity import Verdict
from jax_attn.selfcheck.matrix import on_mesh
from jax_attn.selfcheck.matrix.cases import Case
from jax_attn.selfcheck.matrix.designs import PORTED_DESIGNS
from jax_attn.selfcheck.matrix.mesh_rows import DATA, HEADS, KINDS, MeshCase, cases, problems
from jax_attn.selfcheck.matrix.on_mesh import OnMesh
from jax_attn.selfcheck.matrix.preparation import Preparation
from jax_attn.selfcheck.matrix.rows import FACTORS, published

MQA = Case("mqa", "float32", "causal", "parts", "jit")
# Name -> a row, and the kinds of mesh that it is run on without --long.
CASES = {
    "one key/value head": (MQA, ["explicit"]),
    "shared key/value heads": (Case("gqa", "float32", "none", "shared_parts", "jit"), [*KINDS]),
    "a bias by head": (Case("torch_mha", "float32", "bias", "parts", "jit"), ["auto"]),
    "a cache": (Case("gqa/cached_ragged", "float32", "sliding", "parts", "jit"), ["explicit"]),
}


def of_kind(findings, kind: str) -> list[str]:
    return [finding for finding in findings if finding.kind == kind]


def on(case: Case, kind: str) -> OnMesh:
    preparation = Preparation(PORTED_DESIGNS[case.design], case)
    return OnMesh(preparation, MeshCase(case, 2, 4, kind).mesh("cpu"))


def test_each_design_is_run_and_each_published_one_under_each_mask():
    every = cases(every=False)
    assert {case.design for case in every} == {*FACTORS}
    masks = {(case.design, case.mask) for case in every}
    assert masks >= {(name, mask) for name in published() for mask in FACTORS[name].masks}
    assert {*every} <= {*cases(every=True)}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_rows_pass_on_either_kind_of_mesh(name, pytestconfig):
    case, kinds = CASES[name]
    kinds = KINDS if pytestconfig.getoption("--long") else kinds
    rows = [MeshCase(case, 2, 4, kind) for kind in kinds]
    results = on_mesh.run_on_mesh(rows, "cpu", None, doubts=lambda _: ())
    assert [r.name for r in results] == [row.name for row in rows]
    for result in results:
        assert result.verdict is Verdict.PASS, str(result)
        assert {t.transform for t in result.tensors} == {"jit", "jit, beside one device"}
        assert "parameter after a step" in {t.kind for t in result.tensors}
        assert all("all-reduce" in note for note in sentences(result, "traffic"))


PLACED = {"auto": jax.lax.with_sharding_constraint, "explicit": jax.sharding.reshard}


def gathering(row, kind):
    """The row's port, each device of which computes the whole batch."""

    def call(module, x):
        whole = NamedSharding(jax.sharding.get_abstract_mesh(), P())
        return {"output": module(PLACED[kind](x, whole), is_causal=True)}

    return replace(row.port, call=call)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_port_that_gathers_fails(kind):
    row = on(MQA, kind)
    vars(row)["port"] = gathering(row, kind)
    failures, _ = row.findings()
    assert any("all-gather" in text for text in of_kind(failures, "mesh-costs")), failures


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_port_that_computes_all_of_it_on_each_device_holds_too_much(kind):
    row = on(MQA, kind)
    vars(row)["port"] = replace(
        gathering(row, kind), placement=replace(row.placement, parameters={})
    )
    failures, _ = row.findings()
    assert any("forward: expected temporaries" in x for x in of_kind(failures, "mesh-costs"))


@pytest.mark.slow
def test_a_port_with_whole_parameters_sends_more_than_theory():
    """The gradient of its query projection is not cut by heads, so that it is a larger sum."""
    row = on(MQA, "auto")
    placement = replace(row.placement, parameters={})
    vars(row)["port"] = replace(row.port, placement=placement)
    failures, _ = row.findings()
    assert any("all-reduces" in text for text in of_kind(failures, "mesh-costs")), failures


def other_rate(step):
    def run(forward, params, *rest):
        after = step(forward, params, *rest)
        return jax.tree.map(lambda old, new: old + 1.5 * (new - old), params, after)

    return run


def whole_after(step):
    def run(*arguments):
        whole = NamedSharding(jax.sharding.get_abstract_mesh(), P())
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, whole), step(*arguments))

    return run


@pytest.mark.slow
def test_a_step_at_another_rate_fails(monkeypatch):
    monkeypatch.setattr(on_mesh, "_step", other_rate(on_mesh._step))
    reports, _ = on(MQA, "auto").after_a_step()
    # No step moves the bias of keys, whose gradient is zero.
    assert {r.verdict for r in reports if r.name != "W_K.bias"} == {Verdict.FAIL}


@pytest.mark.slow
def test_a_step_that_leaves_parameters_whole_fails(monkeypatch):
    row = on(MQA, "auto")
    assert row.after_a_step()[1] == []
    monkeypatch.setattr(on_mesh, "_step", whole_after(on_mesh._step))
    _, moved = row.after_a_step()
    assert any("q_proj.kernel" in text for text in of_kind(moved, "moved"))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({DATA: 3, HEADS: 2}, "data: expected a number of devices that divides 4 rows, got 3"),
        ({DATA: 1, HEADS: 5}, "heads: expected a number of devices that divides 16 heads, got 5"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(sizes, expected):
    assert problems(sizes) == [expected]
    assert problems({DATA: 2, HEADS: 4}) == []
