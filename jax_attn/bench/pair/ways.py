"""The ways to run a pair."""

from dataclasses import dataclass, field

from jax_attn.bench.implementations import JAX, TORCH
from jax_attn.bench.workload import CACHED, PAIR_MODES, STEP


@dataclass(frozen=True)
class Way:
    """One of the two sides of a pair, compiled in one way.

    options: options of torch.compile. modes, devices: those for which this way makes a difference.
    environment: variables to set before anything is imported.
    """

    name: str
    framework: str
    is_compiled: bool = True
    options: dict[str, str] = field(default_factory=dict)
    donates: bool = False
    modes: tuple[str, ...] = (*PAIR_MODES, *CACHED)
    devices: tuple[str, ...] = ("cpu", "gpu")
    environment: dict[str, str] = field(default_factory=dict)


# Compile in the worker's own process: helper processes would outlive the compilation.
_ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
EAGER = "torch eager"
_ALL = (
    Way(EAGER, TORCH, is_compiled=False),
    Way("torch.compile", TORCH, environment=_ALONE),
    Way(
        "torch.compile reduce-overhead",
        TORCH,
        options={"mode": "reduce-overhead"},
        devices=("gpu",),  # it uses CUDA graphs; elsewhere it equals torch.compile
        environment=_ALONE,
    ),
    Way("jax.jit", JAX),
    Way("jax.jit donated", JAX, donates=True, modes=(STEP,)),
)
WAYS = {way.name: way for way in _ALL}


def ways_on(device: str) -> tuple[str, ...]:
    """Return the names of the ways that make a difference on a device, "cpu" or "gpu"."""
    return tuple(name for name, way in WAYS.items() if device in way.devices)
