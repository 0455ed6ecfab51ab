"""Compute losses that a translated file may contain."""

import jax
import jax.numpy as jnp
from jax import Array


def huber(difference: Array, delta: float = 1.0) -> Array:
    """Return half the square up to delta, and beyond it a line."""
    size = jnp.abs(difference)
    inside = 0.5 * jnp.square(difference)
    return jnp.where(size < delta, inside, delta * (size - 0.5 * delta))


def binary_cross_entropy(probability: Array, target: Array) -> Array:
    """Return the loss of each element; a logarithm is at least -100, a gradient finite."""

    @jax.custom_jvp
    def loss(p: Array, t: Array) -> Array:
        return -(t * jnp.maximum(jnp.log(p), -100) + (1 - t) * jnp.maximum(jnp.log1p(-p), -100))

    @loss.defjvp
    def tangent(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
        (p, t), (p_dot, t_dot) = primals, tangents
        slope = (p - t) / jnp.maximum(p * (1 - p), 1e-12)
        return loss(p, t), slope * p_dot + (jnp.log1p(-p) - jnp.log(p)) * t_dot

    return loss(probability, target)


def nll_loss(
    log_probabilities: Array,
    target: Array,
    weight: Array | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Array:
    """Return the negative log likelihood of class indices, (B, ...) of (B, C, ...)."""
    axis = 1 if log_probabilities.ndim > 1 else 0
    counts = target != ignore_index
    label = jnp.where(counts, target, 0)
    scale = counts.astype(log_probabilities.dtype)
    if weight is not None:
        scale = scale * weight[label]
    chosen = jnp.take_along_axis(log_probabilities, jnp.expand_dims(label, axis), axis)
    losses = -scale * chosen.squeeze(axis)
    if reduction == "none":
        return losses
    return losses.sum() / scale.sum() if reduction == "mean" else losses.sum()


def smooth_cross_entropy(
    logits: Array,
    target: Array,
    smoothing: float,
    weight: Array | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Array:
    """Return the cross entropy of class indices, with some probability spread over all classes."""
    axis = 1 if logits.ndim > 1 else 0
    log_probabilities = jax.nn.log_softmax(logits, axis)
    hard = nll_loss(log_probabilities, target, weight, ignore_index, "none")
    if weight is not None:
        shape = [-1 if each == axis else 1 for each in range(logits.ndim)]
        log_probabilities = log_probabilities * weight.reshape(shape)
    counts = target != ignore_index
    spread = jnp.where(counts, -log_probabilities.mean(axis), 0)
    losses = (1 - smoothing) * hard + smoothing * spread
    if reduction == "none":
        return losses
    scale = counts if weight is None else jnp.where(counts, weight[jnp.where(counts, target, 0)], 0)
    return losses.sum() / scale.sum() if reduction == "mean" else losses.sum()


def soft_cross_entropy(
    logits: Array,
    target: Array,
    weight: Array | None = None,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Array:
    """Return the cross entropy of probabilities, both (B, C, ...) or (C,)."""
    axis = 1 if logits.ndim > 1 else 0
    classes = logits.shape[axis]
    target = target * (1 - label_smoothing) + label_smoothing / classes
    log_probabilities = jax.nn.log_softmax(logits, axis)
    if weight is not None:
        shape = [-1 if each == axis else 1 for each in range(logits.ndim)]
        log_probabilities = log_probabilities * weight.reshape(shape)
    losses = -(target * log_probabilities).sum(axis)
    if reduction == "none":
        return losses
    return losses.sum() / max(losses.size, 1) if reduction == "mean" else losses.sum()
