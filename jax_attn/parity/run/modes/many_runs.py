"""Make many perturbed runs in one pass, with tensors that hold the numbers of every run.

A small module spends nearly all of a run's time in Python's dispatch, which one pass pays once for
all runs. Each operator is applied to all runs at once, by torch's own rules for an added axis
(`vmap`); the module, autograd and the modes above see the shapes of one run.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch._ops import OpOverload

from jax_attn.parity.run.modes.constants import each
from jax_attn.parity.run.modes.mode import Mode

_aten = torch.ops.aten
_functorch: Any = torch._C._functorch
_keys = torch._C.DispatchKey
_INCLUDED = torch._C._dispatch_tls_local_include_set()
_EXCLUDED = (
    torch._C._dispatch_tls_local_exclude_set()
    .add(_keys.AutogradFunctionality)
    .add(_keys.ADInplaceOrView)
)
"""Dispatch keys below autograd that keep the rules for an added axis, which torch leaves out of
calls from a tensor class or a mode."""


_COMPUTED = {
    _aten._conj.default: _aten.conj_physical.default,
    _aten._neg_view.default: _aten.neg.default,
}
"""View -> the operator that computes its numbers. These views only set a bit, which is read by keys
above the one that calls a tensor class."""


class UnlikeRunsError(Exception):
    """Runs cannot continue in one pass: one branches differently, or writes to a shared tensor."""


class RunsTensor(torch.Tensor):
    """A tensor that holds the numbers of every run, and has the shape of one.

    each: the numbers, (runs, *shape). Strides and offset are those of the first run.
    """

    each: torch.Tensor
    is_number = False
    """True for a literal number of the program, as each run rounds it."""

    @staticmethod
    def __new__(cls, each: torch.Tensor) -> "RunsTensor":
        runs: RunsTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            each.shape[1:],
            strides=each.stride()[1:],
            storage_offset=each.storage_offset(),
            dtype=each.dtype,
        )
        runs.each = each
        return runs

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RunsTensor({self.each!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        func = _COMPUTED.get(func, func)
        kind = _kind(func)
        if kind == "composite":
            return func.decompose(*args, **kwargs)
        if kind == "view":
            if isinstance(args[0], RunsTensor):
                return _map(RunsTensor, _viewed(func, args, kwargs))
            return func(*_map(first_run, args), **kwargs)  # a view of what all runs read
        if kind == "number":
            return _the_same(args[0].each)[0].item()
        mutable = func._schema.is_mutable
        if mutable and (not isinstance(args[0], RunsTensor) or torch.Tag.inplace_view in func.tags):
            raise UnlikeRunsError(f"{func} writes to what all runs read, or turns it in place")
        if kind == "elementwise":
            given = (*args, *kwargs.values())
            ndim = max([x.ndim for x in given if isinstance(x, torch.Tensor)])
            each = func(
                *[_aligned(x, ndim) if type(x) is RunsTensor else x for x in args],
                **{k: _aligned(x, ndim) if type(x) is RunsTensor else x for k, x in kwargs.items()},
            )
            return args[0] if mutable else RunsTensor(each)
        each = _over_runs(_with_a_rule(func), args, kwargs)
        return args[0] if mutable else _map(RunsTensor, each)


class OneByOne(Mode):
    """Pass on a tensor of runs to its class, under a mode of perturbed runs.

    torch itself would ask for each whether it is a distributed tensor, which imports those (2 s).
    """

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if RunsTensor not in types:
            return func(*args, **(kwargs or {}))
        if _kind(func) != "composite":
            return RunsTensor.__torch_dispatch__(func, types, args, kwargs)
        with self:
            return func.decompose(*args, **(kwargs or {}))


@cache
def _with_a_rule(func: OpOverload) -> OpOverload:
    """Return an equal operator for which torch has a rule, if `func` is a primitive without one.

    Decompositions consist of primitives.
    """
    same = {"div": _aten.div.Tensor, "sum": _aten.sum.dim_IntList, "var": _aten.var.correction}
    return same.get(func.overloadpacket.__name__, func) if func.namespace == "prims" else func


@cache
def _kind(func: OpOverload) -> str:
    """Return how an operator is applied to every run: the name of one of the cases above."""
    if func is _aten._local_scalar_dense.default:
        return "number"
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return "composite"
    if func.is_view:
        return "view"
    copies = func in (_aten.copy_.default, _aten.zero_.default)
    one = len(func._schema.returns) == 1
    return "elementwise" if copies or (torch.Tag.pointwise in func.tags and one) else "other"


def each_run(x: torch.Tensor, runs: int) -> torch.Tensor:
    """Return the numbers of every run, (runs, *shape), even if x is shared by all runs."""
    return x.each if isinstance(x, RunsTensor) else x.expand(runs, *x.shape)


def first_run(x: torch.Tensor) -> torch.Tensor:
    """Return the numbers of the first run; x itself if it is a plain tensor."""
    return x.each[0] if isinstance(x, RunsTensor) else x


def runs_of(x: torch.Tensor, runs: int) -> Sequence[torch.Tensor]:
    """Return the numbers of each run."""
    return x.each.unbind() if isinstance(x, RunsTensor) else [x] * runs


def lifted(x: torch.Tensor, runs: int) -> RunsTensor:
    """Return `x` with numbers of its own for each run, which may be written to."""
    return x if isinstance(x, RunsTensor) else RunsTensor(x.detach().repeat(runs, *[1] * x.ndim))


def _viewed(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Apply a view operator to every run, with the strides that it gives the first one."""
    whole, others = args[0].each, _map(first_run, args[1:])

    def of_all(first: torch.Tensor) -> torch.Tensor:
        stride = whole.stride(0) * whole.itemsize // first.itemsize
        shape, strides = (len(whole), *first.shape), (stride, *first.stride())
        return first.as_strided(shape, strides, first.storage_offset())

    return _map(of_all, func(whole[0], *others, **kwargs))


def _over_runs(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Apply an operator to every run: at once if torch can, else one after another."""
    given = (args, kwargs)
    count = next(len(x.each) for x in _leaves(given) if isinstance(x, RunsTensor))
    falls_back = _functorch._is_vmap_fallback_enabled()
    with torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED):
        level = _functorch._vmap_increment_nesting(count, "same")
        _functorch._set_vmap_fallback_enabled(False)  # torch's own loop warns each time
        try:
            batched_args, batched = _map(lambda x: _batched(x, level), given)
            result = func(*batched_args, **batched)
            each = _map(lambda x: _functorch._remove_batch_dim(x, level, count, 0), result)
            return _map(torch.Tensor.contiguous, each)
        except RuntimeError:  # torch has no such rule for the operator
            pass
        finally:
            _functorch._set_vmap_fallback_enabled(falls_back)
            _functorch._vmap_decrement_nesting()
    return _run_by_run(func, args, kwargs)


@cache
def _takes_tensors(func: OpOverload) -> OpOverload:
    """Return the overload of an operator that takes tensors as its numbers, if any, else itself."""
    other = {"Scalar": "Tensor", "Tensor_Scalar": "Tensor_Tensor"}.get(func._overloadname, "")
    return getattr(func.overloadpacket, other) if other in func.overloadpacket.overloads() else func


def _run_by_run(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Apply an operator to one run after another; its number arguments may differ between runs."""
    slots = {a.name: str(a.type) for a in func._schema.arguments}
    of_args = dict(zip(slots, args, strict=False)) | kwargs
    count = next(len(x.each) for x in _leaves(of_args) if isinstance(x, RunsTensor))

    def of_run(run: int, name: str, value: Any) -> Any:
        value = _map(partial(_one, run=run), value)
        is_number = isinstance(value, torch.Tensor) and "Tensor" not in slots[name]
        return value.item() if is_number else value

    return _stacked(
        [
            func(**{name: of_run(run, name, x) for name, x in of_args.items()})
            for run in range(count)
        ]
    )


def each_called(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call an operator, run by run if it takes numbers that differ by run."""
    if not _has_numbers_of_runs(func, args, kwargs):
        return func(*args, **kwargs)
    func = _takes_tensors(func)
    if not _has_numbers_of_runs(func, args, kwargs):
        return func(*args, **kwargs)
    return each(RunsTensor, _run_by_run(func, args, kwargs))


def _has_numbers_of_runs(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether some argument holds a number for every run where `func` takes no tensor."""
    slots = {a.name: str(a.type) for a in func._schema.arguments}
    given = dict(zip(slots, args, strict=False)) | kwargs
    return any(
        isinstance(x, RunsTensor) and "Tensor" not in slots[name] for name, x in given.items()
    )


def _stacked(results: Sequence[Any]) -> Any:
    if isinstance(results[0], tuple | list):
        return type(results[0])(_stacked(parts) for parts in zip(*results, strict=True))
    if not isinstance(results[0], torch.Tensor):
        return results[0]
    if len({x.shape for x in results}) > 1:
        raise UnlikeRunsError("runs give tensors of different shapes")
    return torch.stack(list(results))


def _the_same(each: torch.Tensor) -> torch.Tensor:
    """Return the numbers of every run; raise UnlikeRunsError if runs differ."""
    if not torch.equal(each, each[:1].expand_as(each)):
        raise UnlikeRunsError("a run would branch otherwise than another")
    return each


def _aligned(x: RunsTensor, ndim: int) -> torch.Tensor:
    """Return a tensor's numbers with the axis of runs before `ndim` other axes."""
    each = x.each
    return each if x.ndim == ndim else each.reshape(len(each), *[1] * (ndim - x.ndim), *x.shape)


def _batched(x: Any, level: int) -> Any:
    return _functorch._add_batch_dim(x.each, 0, level) if isinstance(x, RunsTensor) else x


def _one(x: Any, run: int) -> Any:
    return x.each[run] if isinstance(x, RunsTensor) else x


def _map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return `tree` with `fn` applied to every tensor."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, tuple | list):
        return type(tree)([_map(fn, branch) for branch in tree])
    if isinstance(tree, dict):
        return {name: _map(fn, branch) for name, branch in tree.items()}
    return tree


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, tuple | list):
        return [leaf for branch in tree for leaf in _leaves(branch)]
    return [tree]
