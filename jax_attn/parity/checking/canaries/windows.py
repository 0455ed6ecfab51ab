"""Canaries of masks that are off by one at a query's first or last key, and of unused windows."""

from collections.abc import Iterator
from typing import Any

import torch

from jax_attn.parity.bugs.planting import run_planted
from jax_attn.parity.bugs.softmax import EDGES
from jax_attn.parity.checking.canaries.attention_facts import AttentionFacts
from jax_attn.parity.checking.canaries.findings import doubt
from jax_attn.parity.checking.canaries.seen import settings
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.finding import Finding, Findings


def try_windows(prepared: Prepared, facts: AttentionFacts) -> Findings:
    """Doubt masks that could be off by one unseen, and windows that a port could ignore."""
    if not facts.longest:
        return Findings()
    unreached = _unreached_windows(prepared.reference.module, facts)
    edges = _unseen_edges(prepared) if facts.hides else ()
    return Findings(doubts=(*edges, *unreached))


def _unseen_edges(prepared: Prepared) -> Iterator[Finding]:
    for bugs in EDGES.values():
        modes = [bug.planted() for bug in bugs]
        runs = [run_planted(prepared.reference, mode) for mode in modes]
        planted = [run for mode, run in zip(modes, runs, strict=True) if mode.planted and run]
        if not all(map(prepared.would_fail, planted)):
            bug, *_ = bugs
            yield doubt(bug.kind, bug.says, bug.hidden_by, bug.revealed_by)


# --- windows that no row reaches ------------------------------------------------------------------

_WINDOWS = frozenset(
    """
    attention_chunk_size attention_window local_attention local_attention_window local_window
    local_window_size sliding_window sliding_window_size window window_size
    """.split()  # noqa: SIM905
)
# Settings that, next to a window, list the kind of each layer.
_KINDS_OF_LAYERS = ("layer_types", "attention_layers")
_WINDOWED = ("sliding", "local", "chunk", "window")


def _unreached_windows(module: torch.nn.Module, facts: AttentionFacts) -> Iterator[Finding]:
    """Doubt windows in the attributes of a module or of its configs that hide no key."""
    for name, window in dict.fromkeys(_windows(module)):
        # With window + 1 keys, a window that counts the query's own hides the first; another none.
        if facts.longest <= window + (not facts.hides_first):
            yield doubt(
                "window",
                f"that the window `{name}={window}` is ignored or wrong",
                f"no query has more than {facts.longest} keys",
                f"sequences of more than {window + 1} tokens, or a smaller window on both sides",
            )


def _windows(module: torch.nn.Module) -> Iterator[tuple[str, int]]:
    for named in settings(module):
        for name in sorted(_WINDOWS & named.keys()):
            if _is_used(named):
                yield from ((name, size) for size in _sizes(named[name]))


def _is_used(named: dict[str, Any]) -> bool:
    """Return whether some layer has the window, according to the settings next to it."""
    kinds = [kind for name in _KINDS_OF_LAYERS for kind in named.get(name) or ()]
    if named.get("use_sliding_window") is False:
        return False
    return not kinds or any(word in str(kind) for kind in kinds for word in _WINDOWED)


def _sizes(value: Any) -> Iterator[int]:
    for size in value if isinstance(value, list | tuple) else (value,):
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            yield size
