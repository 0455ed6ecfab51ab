"""Run recurrent layers. A cell takes `x @ w_ih.T + b_ih`, which is made for all steps at once."""

import jax
import jax.numpy as jnp
from jax import Array


def lstm_cell(
    x: Array, state: tuple[Array, ...], w_hh: Array, b_hh: Array | None, w_hr: Array | None = None
) -> tuple[Array, Array]:
    """Return the next hidden and cell states of (hidden, cell)."""
    hidden, cell = state
    gates = x + hidden @ w_hh.T
    if b_hh is not None:
        gates = gates + b_hh
    into, forget, new, out = jnp.split(gates, 4, axis=-1)
    cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(into) * jnp.tanh(new)
    hidden = jax.nn.sigmoid(out) * jnp.tanh(cell)
    return (hidden if w_hr is None else hidden @ w_hr.T), cell


def gru_cell(x: Array, state: tuple[Array, ...], w_hh: Array, b_hh: Array | None) -> tuple[Array]:
    """Return the next hidden state of (hidden,)."""
    (hidden,) = state
    gates = hidden @ w_hh.T
    if b_hh is not None:
        gates = gates + b_hh
    reset_x, update_x, new_x = jnp.split(x, 3, axis=-1)
    reset_h, update_h, new_h = jnp.split(gates, 3, axis=-1)
    update = jax.nn.sigmoid(update_x + update_h)
    new = jnp.tanh(new_x + jax.nn.sigmoid(reset_x + reset_h) * new_h)
    return (new + update * (hidden - new),)


def rnn_tanh_cell(
    x: Array, state: tuple[Array, ...], w_hh: Array, b_hh: Array | None
) -> tuple[Array]:
    """Return the next hidden state of (hidden,)."""
    gate = x + state[0] @ w_hh.T
    return (jnp.tanh(gate if b_hh is None else gate + b_hh),)


def rnn_relu_cell(
    x: Array, state: tuple[Array, ...], w_hh: Array, b_hh: Array | None
) -> tuple[Array]:
    """Return the next hidden state of (hidden,)."""
    gate = x + state[0] @ w_hh.T
    return (jax.nn.relu(gate if b_hh is None else gate + b_hh),)


def recurrent(
    cell,
    x: Array,
    states: tuple[Array, ...],
    weights: tuple[Array, ...],
    num_layers: int = 1,
    bidirectional: bool = False,
    biases: bool = True,
    batch_first: bool = False,
) -> tuple[Array, ...]:
    """Run layers of a cell over the time axis of x.

    Args:
      cell: one step: its input, states and weights give the next states.
      x: of shape (T, B, D), or (B, T, D) if `batch_first`.
      states: the first states, each (layers × directions, B, H).
      weights: w_ih, w_hh, then b_ih and b_hh if `biases`, then what else the cell takes, for each
        layer and direction.
      num_layers: layers over each other.
      bidirectional: whether each layer also runs backward in time, beside.
      biases: whether `weights` has biases.
      batch_first: whether the batch comes before time.

    Returns:
      The hidden states of the last layer over time, and the last states.
    """
    if batch_first:
        x = x.swapaxes(0, 1)
    directions = 2 if bidirectional else 1
    each = len(weights) // (num_layers * directions)
    last: list[tuple[Array, ...]] = []
    for layer in range(num_layers):
        outputs: list[Array] = []
        for direction in range(directions):
            run = layer * directions + direction
            w_ih, w_hh, *rest = weights[run * each : (run + 1) * each]
            inputs = x @ w_ih.T + rest[0] if biases else x @ w_ih.T
            others = (w_hh, *rest[1:]) if biases else (w_hh, None, *rest)

            def step(
                state: tuple[Array, ...],
                x: Array,
                others: tuple[Array | None, ...] = others,
            ) -> tuple[tuple[Array, ...], Array]:
                state = cell(x, state, *others)
                return state, state[0]

            first = tuple(state[run] for state in states)
            end, hidden = jax.lax.scan(step, first, inputs, reverse=direction == 1)
            last.append(end)
            outputs.append(hidden)
        x = jnp.concatenate(outputs, axis=-1)
    if batch_first:
        x = x.swapaxes(0, 1)
    return x, *(jnp.stack(state) for state in zip(*last, strict=True))
