"""The benchmark: its labels are what float64 says, its checks can fail, its page is its records."""

import ast

import numpy as np
import pytest
from score_tables import figure, labelled, largest, tables

from helpers import documents
from scores import records
from scores.changes import MISTAKES, STYLES, Change, changed, in_style, places
from scores.pairs import Pair, differences
from scores.qualities import QUALITIES
from scores.records import kept
from scores.scored import scored
from scores.subjects import subject
from scores.verifiers import LEAST, OURS, VERIFIERS

SOURCE = """
class Attention:
    def __call__(self, x, allowed):
        q = self.q_proj(x).reshape(2, 5, 4, 3).swapaxes(1, 2)
        k = jnp.repeat(self.k_proj(x), 2, axis=1)
        scores = jnp.where(allowed, q @ k / 1.732, jnp.finfo(jnp.float32).min)
        later = jnp.arange(5) <= 3
        x = x + self.out_proj(jax.nn.softmax(scores) @ v + self.bias[...])
        return jax.nn.gelu(x + 1e-5, approximate=False) * jax.nn.silu(x)
"""


def changes(kind):
    return [changed(SOURCE, change) for change in places(SOURCE, {kind: MISTAKES[kind]})]


@pytest.mark.parametrize("kind", MISTAKES)
def test_each_mistake_has_a_place_and_changes_one_expression(kind):
    for source in (found := changes(kind)):
        assert ast.dump(ast.parse(source)) != ast.dump(ast.parse(SOURCE))
    assert found


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("gelu, the other one", "approximate=True"),
        ("small constant, 10 times", "(0.0001)"),
        ("constant, 2% larger", "/ 1.76664"),
        ("edge of a comparison", "(jnp.arange(5) < 3)"),
        ("heads by a reshape", "self.q_proj(x).reshape(2, 4, 5, 3)"),
        ("heads tiled", "jnp.concatenate([self.k_proj(x)] * 2, axis=1)"),
        ("mask the other way round", "jnp.where(allowed, jnp.finfo(jnp.float32).min, q @ k"),
        ("residual left out", "x = (self.out_proj("),
        ("division left out", "(q @ k)"),
    ],
)
def test_a_mistake_is_what_its_name_says(kind, text):
    assert text in changes(kind)[0]


def test_a_style_is_taken_wherever_it_has_a_place_and_computes_the_same():
    source = "def f(x): return jax.nn.softmax(jax.nn.softmax(x) @ x / 3.0)\n"
    import jax
    from jax import numpy as jnp

    x, want = np.random.default_rng(0).standard_normal((5, 5)).astype(np.float32), None
    for style in (None, "softmax written out", "products by einsum", "divisions as products"):
        text = source if style is None else in_style(source, style)
        assert text is not None
        assert style is None or in_style(text, style) is None
        names = {"jax": jax, "jnp": jnp}
        exec(text, names)
        found = np.asarray(names["f"](x))
        want = found if want is None else want
        np.testing.assert_allclose(found, want, rtol=1e-5)


@pytest.mark.slow
def test_a_right_port_agrees_in_float64_and_each_style_does():
    name = "block, gated"
    styles = [s for s in STYLES if in_style(subject(name).translation.source, s)]
    for pair in (Pair(name), *(Pair(name, style=style) for style in styles[:1])):
        assert max(off for parts in differences(pair).values() for off in parts.values()) < 1e-12


@pytest.mark.slow
def test_a_wrong_port_is_labelled_and_a_verifier_that_looks_at_it_fails_it():
    name, kind = "block, gated", "division left out"
    change = next(places(subject(name).translation.source, {kind: MISTAKES[kind]}))
    record = scored(Pair(name, change))
    assert (record["kind"], record["line"]) == (kind, change.line)
    assert min(parts["outputs"] for parts in record["differences"].values()) > LEAST
    on = record["verdicts"]
    assert on["suggested"][f"{OURS}, gradients"] == on["suggested"]["allclose 1e-3, outputs"] == "F"
    assert on["ones"]["allclose 1e-3, outputs"] == "P"  # all keys are alike: no scale matters
    assert on["ones"][f"{OURS}, outputs"] != "P"


@pytest.mark.slow
def test_a_port_that_raises_an_error_or_does_the_same_is_not_scored():
    name, source = "block, gated", subject("block, gated").translation.source
    start = source.index("self.up(x)")
    raising = Change("none", 1, start, start + len("self.up(x)"), "self.nothing(x)")
    same = Change("none", 1, start, start + len("self.up(x)"), "(self.up(x))")
    assert scored(Pair(name, raising))["raises"] == "RaisedError"
    assert "verdicts" not in scored(Pair(name, same))


X = {"output": np.linspace(-5, 5, 35).reshape(5, 7)}
WITHIN = {
    "allclose 1e-5": 1e-6,
    "allclose 1e-3": 1e-4,
    "allclose 1e-2": 1e-3,
    "absolute 1e-4": 1e-5,
    "absolute 1e-3": 1e-4,
    "largest 1e-5": 1e-6,
    "largest 4e-2": 1e-2,
    "cosine .999": 1e-2,
    "cosine .99": 0.1,
    "KL .01": 0.05,
    "KL .1": 0.2,
    "top-1 agrees": 0.01,
    "error ratio 1.2": 1.1e-6,
}


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_verifier_passes_what_is_within_its_threshold_and_fails_what_is_not(name):
    verifier, *_ = VERIFIERS[name]
    noise = np.where(np.arange(35).reshape(5, 7) % 2, 1, -1)
    own = {"output": X["output"] + 1e-6 * noise}
    near = {"output": X["output"] + WITHIN[name] * noise}
    far = {"output": X["output"][:, ::-1].copy()}
    assert verifier(near, own, X)
    assert not verifier(far, own, X)
    assert not verifier({"output": np.full_like(far["output"], np.nan)}, own, X)


def test_every_record_is_of_a_kind_of_the_tables_and_the_page_shows_them():
    wrong, right = labelled()
    assert {r["kind"] for r in wrong} <= {*MISTAKES}
    assert {r["kind"] for r in right} <= {*STYLES, ""}
    assert all({*r["verdicts"]} == {*QUALITIES} for r in (*wrong, *right))
    assert all(largest(r, "outputs", "gradients") > LEAST for r in wrong)
    assert all(largest(r, "outputs", "gradients") <= LEAST / 2 for r in right)
    assert len(kept()) >= len(wrong) + len(right)
    page = documents.ROOT / "docs" / "reference" / "verifiers.md"
    text = page.read_text()
    for name, part in tables().items():
        assert f"<!-- {name} -->\n{part}\n<!-- /{name} -->" in text
    assert len(figure().axes) == 2


def test_a_cosine_with_nothing_is_no_agreement():
    verifier, *_ = VERIFIERS["cosine .99"]
    assert not verifier({"output": np.zeros((5, 7))}, X, X)


def test_a_line_that_was_not_finished_is_passed_over_and_the_next_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RECORDS", tmp_path / "scores.jsonl")
    records.keep("one", {"kind": "a"})
    with records.RECORDS.open("a") as file:
        file.write('{"name": "half')
    records.keep("two", {"kind": "b"})
    assert records.kept() == {"one": {"kind": "a"}, "two": {"kind": "b"}}


def test_places_of_one_start_have_names_of_their_own():
    source = subject("block, experts").translation.source
    found = [Pair("block, experts", change).name for change in places(source, MISTAKES)]
    assert len({*found}) == len(found)
