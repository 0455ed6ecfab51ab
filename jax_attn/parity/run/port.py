"""Run an NNX module on its inputs, and name its outputs, gradients and state."""

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_attn.parity.judge.finding import StandingNote
from jax_attn.parity.run.asked_port import PINNED, PortFacts, refuse_mistyped
from jax_attn.parity.run.call_side import as_raised, call_side, raised_when
from jax_attn.parity.run.inputs_and_runs import (
    Arrays,
    Inputs,
    RaisedError,
    Run,
    named_outputs,
)
from jax_attn.parity.run.placement import MeshPlacement, unlike_copies
from jax_attn.parity.run.programs import float_dtypes
from jax_attn.parity.run.transforms import (
    RUN_UNDER,
    Arguments,
    Forward,
    Outputs,
    Tree,
    forward_and_gradients,
)
from jax_attn.transfer import flatten
from jax_attn.transfer.nnx.variables import spelled


@dataclass(frozen=True)
class Port:
    """An NNX module with its inputs. Runs work on copies, so the module never changes.

    placement: the placement of module and inputs on a mesh; None means JAX's default device.
    """

    module: nnx.Module
    call: Callable[..., Any] | None
    inputs: Inputs
    placement: MeshPlacement | None = field(default=None, kw_only=True)

    @cached_property
    def compiled(self) -> dict[str, Future[jax.stages.Compiled]]:
        """Transform -> its program, compiled ahead for the first run (`run.ahead`)."""
        return {}

    @cached_property
    def _output_shapes(self) -> tuple[Tree, Tree]:
        """The shapes of floating outputs and of the others: traced, or of a call if that fails."""
        try:
            with raised_when("the shapes of its outputs were traced, before it was run"):
                (shapes, after), _ = self._traced
        except RaisedError as error:
            forward, *bound = self.bind()
            args: Any = tuple(bound)
            try:
                shapes, after = jax.eval_shape(lambda outputs: outputs, forward(*args))
            except RaisedError:
                raise error from error.__cause__
        return shapes, after.get("decided", {})

    @cached_property
    def _traced(self) -> tuple[Outputs, Counter[str]]:
        """The shapes of a forward pass's outputs, and its floating-point results by dtype.

        Raises RaisedError if it cannot be traced.
        """
        forward, *args = self.bind()
        jaxpr, shapes = jax.make_jaxpr(forward, return_shape=True)(*args)
        return shapes, Counter(float_dtypes(jaxpr.jaxpr))

    @property
    def sizes_of_outputs(self) -> dict[str, int]:
        """The number of elements of each output, by name."""
        with self.on_mesh():
            return {k: a.size for outputs in self._output_shapes for k, a in outputs.items()}

    def bind(self) -> tuple[Forward, nnx.State, Tree, Tree]:
        """Return (forward, params, floats, others); forward(params, floats, others) calls the port.

        floats and others are the inputs by name: those with a gradient and those without.
        """
        graph, params, *rest = nnx.split(self.module, nnx.Param, ...)
        given = self.inputs.by_name
        if self.placement is None:
            leaves = {name: jnp.array(a) for name, a in given.items()}
        else:
            params, *rest = map(self.placement.put_state, (params, *rest))
            leaves = {name: self.placement.put_input(name, a) for name, a in given.items()}
        floats = {k: a for k, a in leaves.items() if jnp.issubdtype(a.dtype, jnp.floating)}
        others = {k: a for k, a in leaves.items() if k not in floats}

        def forward(params: nnx.State, floats: Tree, others: Tree) -> Outputs:
            named = floats | others
            args = tuple(named.pop(str(i)) for i in range(len(self.inputs.args)))
            # A copy each time, so every run starts from the module's original state.
            module = nnx.merge(graph, params, *rest, copy=True)

            def outputs_of_call() -> Tree:
                call = partial(self.call, module) if self.call else module
                result = call_side("port", self.inputs, call, *args, **named)
                return named_outputs(result, jax.Array, "port")

            before, structure = held(module), nnx.graphdef(module)
            sown = paths_of(module, nnx.Intermediate)
            outputs, decided = _apart(outputs_of_call())
            if not sown:
                nnx.pop(module, nnx.Intermediate)  # sown values are not state that a call changes
            left = {path: a for path, a in held(module).items() if a is not before.get(path)}
            if not left and nnx.graphdef(module) == structure:
                return outputs, decided
            left = {path: _plain(a) for path, a in left.items()}
            try:
                second = outputs_of_call()
            except Exception:  # any error: the module may not accept the state of its first call
                second = {}
            return outputs, {**decided, "left": left, "second": second}

        return forward, params, floats, others

    def run(self, dtype: str, cotangents: Arrays, transform: str) -> Run:
        """Return the outputs and, if there are cotangents, every gradient.

        Raises TypeError if the dtype of an output does not hold every number of `dtype`.
        """
        with self.on_mesh():
            forward, args, fitting = self.called(dtype, cotangents)
            if (ahead := self.compiled.pop(transform, None)) and not ahead.exception():
                (outputs, after), grads = ahead.result()(*args, fitting)
            else:
                with raised_when(f"it was run under {transform}"):
                    (outputs, after), grads = RUN_UNDER[transform](forward, args, fitting)
        refuse_mistyped(outputs, dtype)
        inputs: Tree = {}
        by_path: dict[str, jax.Array] = {}
        if grads is not None:
            params, inputs = grads
            by_path = flatten(params)
        unlike: tuple[str, ...] = ()
        if self.placement is not None:
            named = {f"grad {path}": a for path, a in by_path.items()}
            named |= {f"grad input {name}": a for name, a in inputs.items()}
            changed = (*(after.get(name, {}) for name in ("left", "second", "decided")), named)
            unlike = tuple(unlike_copies(dict(outputs), *changed))
        left, second = self._changes(after)
        # JAX's gradient of a complex number is the conjugate of torch's.
        by_path = {path: a.conj() if jnp.iscomplexobj(a) else a for path, a in by_path.items()}
        outputs = outputs | after.get("decided", {})
        arrays = (_arrays(outputs), _arrays(inputs), _arrays(by_path))
        return Run(*arrays, left, second, unlike)

    def tried(self, dtype: str, inputs: Inputs, transform: str) -> Run | str:
        """Return a forward run on other inputs; if it raises an error, a line that says so."""
        try:
            return replace(self, inputs=inputs).run(dtype, {}, transform)
        except Exception as error:  # the port may raise any error
            return " ".join(as_raised(error).split())

    @contextlib.contextmanager
    def full_precision(self, wanted: bool) -> Iterator[tuple[str, tuple[StandingNote, ...]]]:
        """Run in full precision in this context, as `full_precision` does."""
        with full_precision(wanted) as found:
            yield found

    @cached_property
    def facts(self) -> PortFacts:
        """Facts that judging must know of the module and its placement."""
        is_cut = self.placement is not None and any(
            not a.sharding.is_fully_replicated for a in self.arrays().values()
        )
        drawn, caches = (frozenset(paths_of(self.module, k)) for k in (nnx.RngState, nnx.Cache))
        narrow_rows = frozenset(k for k, a in held(self.module).items() if _is_narrow_row(a))
        return PortFacts(self.placement is not None, is_cut, drawn, caches, narrow_rows)

    def on_one_device(self) -> Self | None:
        """Return the same port on a mesh of one device, or None if it is not on a mesh."""
        if self.placement is None:
            return None
        return replace(self, placement=self.placement.on_one_device)

    def held(self, paths: Collection[str]) -> Arrays:
        """Return arrays of the module, by dotted path, as they are before any call."""
        arrays = held(self.module)
        return {path: np.asarray(arrays[path]) for path in paths}

    def computed_in(self) -> Counter[str]:
        """Count a forward pass's floating-point results by dtype; none if it cannot be traced."""
        with self.on_mesh(), contextlib.suppress(RaisedError):
            return self._traced[1]
        return Counter()

    def programs(self, dtype: str, cotangents: Arrays) -> dict[str, jax.stages.Compiled]:
        """Compile the forward pass and, if there are cotangents, forward and backward together."""
        with self.on_mesh():
            forward, args, fitting = self.called(dtype, cotangents)
            programs = {"forward": jax.jit(forward).lower(*args).compile()}
            if fitting:
                both = jax.jit(partial(forward_and_gradients, forward))
                programs["forward and backward"] = both.lower(*args, fitting).compile()
        return programs

    def after(
        self, step: Callable[..., nnx.State], dtype: str, cotangents: Arrays
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Return the placed parameters by path, before and after a jitted
        `step(forward, *arguments, cotangents)`."""
        with self.on_mesh():
            forward, args, fitting = self.called(dtype, cotangents)
            return flatten(args[0]), flatten(jax.jit(partial(step, forward))(*args, fitting))

    def arrays(self) -> dict[str, jax.Array]:
        """Return parameters by path and floating inputs as "input {name}", placed on the mesh."""
        _, params, floats, _ = self.bind()
        return flatten(params) | {f"input {name}": a for name, a in floats.items()}

    @contextlib.contextmanager
    def on_mesh(self) -> Iterator[None]:
        """Set the placement's mesh, if there is one, as JAX's current mesh.

        Programs are compiled inside even under jax_disable_jit, since that is what is checked.
        """
        with contextlib.ExitStack() as stack:
            if jax.config.jax_disable_jit:  # type: ignore[attr-defined]  # made dynamically
                stack.enter_context(jax.disable_jit(False))
            if self.placement is not None:
                stack.enter_context(jax.set_mesh(self.placement.mesh))
            yield

    def called(self, dtype: str, cotangents: Arrays) -> tuple[Forward, Arguments, Tree]:
        """Return (forward, its arguments, the cotangents); no cotangents if the shapes do not fit.

        Each cotangent has the dtype of its output, which may be finer than `dtype`: many models
        return float32 logits of a computation in bfloat16.

        Raises TypeError if, with cotangents, the dtype of an output does not hold every number of
        `dtype`.
        """
        forward, *bound = self.bind()
        args: Any = tuple(bound)
        if not cotangents:  # the port is not traced for shapes that nothing needs
            return forward, args, {}
        shapes, decided = self._output_shapes
        shapes = shapes | {k: s for k, s in decided.items() if k in cotangents}
        refuse_mistyped(shapes, dtype)
        given = {k: c.shape for k, c in cotangents.items()}
        if {k: s.shape for k, s in shapes.items()} != given:
            # Outputs of other names or shapes have no cotangents; the comparison reports them.
            return forward, args, {}
        fitting = {k: jnp.array(a, shapes[k].dtype) for k, a in cotangents.items()}
        if self.placement is not None:  # each gets the sharding of its output
            lie, _ = jax.jit(forward).lower(*args).compile().output_shardings
            fitting = {k: jax.device_put(a, lie[k]) for k, a in fitting.items()}
        return forward, args, fitting

    def _changes(self, after: dict[str, Tree]) -> tuple[Arrays, Arrays]:
        """Return `left` and `second`, without arrays that were rewritten with the same bits."""
        if "left" not in after:
            return {}, {}
        before = {path: np.asarray(_plain(a)) for path, a in held(self.module).items()}
        left = {
            path: a
            for path, a in _arrays(after["left"]).items()
            if path not in before or a.tobytes() != before[path].tobytes()
        }
        return left, {} if after["left"] and not left else _arrays(after["second"])


def held(module: nnx.Module) -> dict[str, Any]:
    """Return every array that a module holds, by dotted path, except `nnx.Intermediate`."""
    arrays = {}
    for path, leaf in nnx.to_flat_state(nnx.state(module)):
        if not isinstance(leaf, nnx.Intermediate):
            value = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
            for inside, a in jax.tree_util.tree_leaves_with_path(value):
                arrays[spelled(path) + jax.tree_util.keystr(inside)] = a
    return arrays


def _is_narrow_row(a: Any) -> bool:
    """Return whether this is an array in a narrow dtype with at most one axis longer than 1."""
    return (
        isinstance(a, jax.Array)
        and jnp.issubdtype(a.dtype, jnp.floating)
        and a.dtype.itemsize < 4
        and a.size == max(a.shape, default=1)
    )


def paths_of(module: nnx.Module, kind: type[nnx.Variable]) -> set[str]:
    """Return the dotted paths of every Variable of a kind."""
    return {spelled(path) for path, _ in nnx.to_flat_state(nnx.state(module, kind))}


def _apart(outputs: Tree) -> Outputs:
    """Return the outputs that are differentiated, and those that are not: integers, booleans."""
    decided = {k: a for k, a in outputs.items() if not jnp.issubdtype(a.dtype, jnp.inexact)}
    floating = {k: a for k, a in outputs.items() if k not in decided}
    return floating, {"decided": decided} if decided else {}


def _plain(a: Any) -> Any:
    """Return the data of a random key, which NumPy cannot hold; anything else unchanged."""
    is_key = isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(a) if is_key else a


def _arrays(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(a) for name, a in arrays.items()}


def parameters(module: nnx.Module) -> dict[str, np.ndarray]:
    """Return every `nnx.Param` by dotted path, bit for bit."""
    return _arrays(flatten(module))


def x64_is_on() -> bool:
    """Return whether JAX keeps float64."""
    return jax.dtypes.canonicalize_dtype(np.float64) == np.float64


@contextlib.contextmanager
def x64_for(dtype: str) -> Iterator[None]:
    """Turn JAX's x64 mode on if `dtype` is float64, and off otherwise."""
    with jax.enable_x64(dtype == "float64"):
        yield


@contextlib.contextmanager
def full_precision(wanted: bool = True) -> Iterator[tuple[str, tuple[StandingNote, ...]]]:
    """Compute products in full precision on an accelerator, if wanted.

    Yields the platform of JAX's default device, and the notes for a result."""
    platform = next(iter(jnp.zeros(()).devices())).platform
    pinned = wanted and platform != "cpu"
    with jax.default_matmul_precision("highest" if pinned else None):
        yield platform, (PINNED,) if pinned else ()
