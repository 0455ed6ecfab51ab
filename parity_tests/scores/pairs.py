"""The labelled pairs: a reference and a port that is right, or wrong in one known expression."""

import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain, islice, zip_longest

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_attn.parity.run.inputs_and_runs import Inputs, Run
from jax_attn.parity.run.port import Port, x64_for
from jax_attn.parity.run.reference import Reference
from jax_attn.transfer.arrays import as_numpy
from jax_attn.translate.outputs import called
from jax_attn.translate.proof import loaded
from scores.changes import MISTAKES, STYLES, Change, changed, in_style, places
from scores.subjects import SUBJECTS, Subject, subject

REVEALING = ("random", "suggested")


@dataclass(frozen=True)
class Pair:
    """A reference and its port.

    change: the mistake; None if the port is right. style: of a right one, in `STYLES`, or "".
    """

    of: str
    change: Change | None = None
    style: str = ""

    @property
    def subject(self) -> Subject:
        return subject(self.of)

    @property
    def kind(self) -> str:
        return self.change.kind if self.change else ""

    @property
    def name(self) -> str:
        change, what = self.change, self.style or "as translated"
        if change is not None:
            what = f"{change.kind}, {change.start} to {change.end}"
        return f"{self.of}: {what}"

    @property
    def digest(self) -> str:
        """The first letters of the digest of the port's source, which a record belongs to."""
        return hashlib.sha256(self.source.encode()).hexdigest()[:8]

    @cached_property
    def source(self) -> str:
        source = self.subject.translation.source
        if self.change is not None:
            return changed(source, self.change)
        return in_style(source, self.style) or source if self.style else source

    @cached_property
    def made(self) -> nnx.Module:
        """The port in float32; each call works on a copy."""
        return self.port()

    def port(self, dtype: str = "float32") -> nnx.Module:
        """Make the port with the reference's weights; in float64, its own casts are to float64."""
        source = self.source if dtype == "float32" else self.source.replace("float32", dtype)
        translation = replace(self.subject.translation, source=source)
        with x64_for("float32"):  # where float64 is float32
            port = loaded(translation, self.subject.reference)
        if dtype == "float32":
            return port

        def wide(a: jax.Array) -> jax.Array:
            return a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a

        graph, state = nnx.split(port)
        return nnx.merge(graph, jax.tree.map(wide, state))


def cotangents(of: Subject, quality: str, dtype: str) -> dict[str, np.ndarray]:
    """Standard normal in float32, for each output."""
    rng, shapes = np.random.default_rng(2), own_outputs(of, quality)
    drawn = {name: rng.standard_normal(a.shape, np.float32) for name, a in shapes.items()}
    return {name: a.astype(dtype) for name, a in drawn.items()}


def _reference(of: Subject, quality: str) -> Reference:
    inputs = Inputs.of(dict(of.inputs(quality)), np.dtype("float32"))
    return Reference(of.reference, called, inputs)


@cache
def own_outputs(of: Subject, quality: str) -> dict[str, np.ndarray]:
    """The reference's outputs in float32."""
    return _reference(of, quality).outputs("float32")


@cache
def exact(of: Subject, quality: str) -> Run:
    """The reference's run in float64, on inputs of float32."""
    module = copy.deepcopy(of.reference).double()
    inputs = Inputs.of(dict(of.inputs(quality)), np.dtype("float64"))
    return Reference(module, called, inputs).run("float64", cotangents(of, quality, "float64"))


@cache
def own(of: Subject, quality: str) -> Run:
    """The reference's run in float32."""
    return _reference(of, quality).run("float32", cotangents(of, quality, "float32"))


def of_port(pair: Pair, quality: str, dtype: str = "float32") -> Run:
    """The port's run, jitted, with its gradients under the reference's names."""
    given = Inputs.of(dict(pair.subject.inputs(quality)), np.dtype(dtype))
    port = Port(pair.made if dtype == "float32" else pair.port(dtype), called, given)
    run = port.run(dtype, cotangents(pair.subject, quality, dtype), "jit")
    gradients = pair.subject.translation.layout.to_torch(run.parameter_grads)
    return replace(run, parameter_grads={k: as_numpy(a) for k, a in gradients.items()})


def tensors(run: Run, gradients: bool) -> dict[str, np.ndarray]:
    """All that is compared, by name."""
    found = {f"output {k}": a for k, a in run.outputs.items()}
    if gradients:
        found |= {f"input {k}": a for k, a in run.input_grads.items()}
        found |= {f"parameter {k}": a for k, a in run.parameter_grads.items()}
    return found


def compared(of: Subject, quality: str, gradients: bool, run: Run) -> list[str]:
    """The names of tensors that both sides have and that are not zero in theory."""
    want = tensors(exact(of, quality), gradients)
    most = {name: float(np.abs(a).max(initial=0)) for name, a in want.items()}
    largest = max(most.values())
    got = tensors(run, gradients)
    return [name for name in want if name in got and most[name] > 1e-12 * largest]


Differences = dict[str, dict[str, float]]
"""Quality of inputs -> "outputs" or "gradients" -> the largest relative difference."""


def differences(pair: Pair) -> Differences:
    """What float64 sees of a port: differences over the largest number of their tensor.

    On inputs at random and on those that reveal most; infinite for what is not finite. The
    reference runs in float64 by torch alone, without what `parity.check` does to it.
    """
    found: Differences = {}
    for quality in REVEALING:
        with x64_for("float64"):
            run = of_port(pair, quality, "float64")
        names = compared(pair.subject, quality, True, run)
        got, want = tensors(run, True), tensors(exact(pair.subject, quality), True)
        parts = {"outputs": 0.0, "gradients": 0.0}
        for name in names:
            off = float(np.abs(got[name] - want[name]).max() / np.abs(want[name]).max())
            part = "outputs" if name.startswith("output ") else "gradients"
            parts[part] = max(parts[part], off if np.isfinite(off) else 1e99)
        found[quality] = {part: float(f"{off:.2g}") for part, off in parts.items()}
    return found


def drawn(seed: int, count: int) -> Iterator[Pair]:
    """Yield all right pairs and so many wrong candidates, four of these after each right one."""
    candidates = islice(wrong(seed), count)
    for pair in right():
        yield pair
        yield from islice(candidates, 4)
    yield from candidates


def right() -> Iterator[Pair]:
    """Yield each translation as it is, and in each style that it has a place for."""
    for name in SUBJECTS:
        yield Pair(name)
        source = subject(name).translation.source
        yield from (Pair(name, style=style) for style in STYLES if in_style(source, style))


def wrong(seed: int) -> Iterator[Pair]:
    """Yield wrong candidates in an order that a seed draws: each kind in turn, at any place."""
    rng = np.random.default_rng(seed)
    by_kind: dict[str, list[Pair]] = {kind: [] for kind in MISTAKES}
    for name in SUBJECTS:
        for change in places(subject(name).translation.source, MISTAKES):
            by_kind[change.kind].append(Pair(name, change))
    for pairs in by_kind.values():
        rng.shuffle(pairs)  # type: ignore[arg-type]
    turns = chain.from_iterable(zip_longest(*by_kind.values()))
    yield from (pair for pair in turns if pair is not None)
