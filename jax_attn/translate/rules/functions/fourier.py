"""Transform short windows of signals, and back."""

import jax.numpy as jnp
from jax import Array


def centered_window(window: Array | None, length: int, n_fft: int, dtype: jnp.dtype) -> Array:
    """Return the window, ones if there is none, with zeros around it up to n_fft."""
    window = jnp.ones(length, dtype) if window is None else window
    before = (n_fft - length) // 2
    return jnp.pad(window, (before, n_fft - length - before))


def stft(
    x: Array,
    n_fft: int,
    hop_length: int,
    win_length: int,
    window: Array | None = None,
    pad_mode: str | None = None,
    normalized: bool = False,
    onesided: bool = True,
) -> Array:
    """Return spectra (..., frequencies, frames) of windows of x (..., T); padded if centered."""
    if pad_mode is not None:
        width = ((0, 0),) * (x.ndim - 1) + ((n_fft // 2, n_fft // 2),)
        x = jnp.pad(x, width, mode=pad_mode)
    starts = jnp.arange(0, x.shape[-1] - n_fft + 1, hop_length)
    frames = x[..., starts[:, None] + jnp.arange(n_fft)]
    frames = frames * centered_window(window, win_length, n_fft, x.dtype)
    transform = jnp.fft.rfft if onesided else jnp.fft.fft
    return transform(frames, norm="ortho" if normalized else None).swapaxes(-1, -2)


def istft(
    x: Array,
    n_fft: int,
    hop_length: int,
    win_length: int,
    window: Array | None = None,
    center: bool = True,
    normalized: bool = False,
    length: int | None = None,
) -> Array:
    """Return the signal (..., T) whose spectra are x (..., frequencies, frames)."""
    frames = jnp.fft.irfft(x.swapaxes(-1, -2), n_fft, norm="ortho" if normalized else None)
    window = centered_window(window, win_length, n_fft, frames.dtype)
    count = frames.shape[-2]
    places = jnp.arange(count)[:, None] * hop_length + jnp.arange(n_fft)
    total = n_fft + hop_length * (count - 1)
    signal = (
        jnp.zeros((*frames.shape[:-2], total), frames.dtype).at[..., places].add(frames * window)
    )
    weight = jnp.zeros(total, frames.dtype).at[places].add(window**2)
    start = n_fft // 2 if center else 0
    end = total - start if length is None else start + length
    signal, weight = signal[..., start:end], weight[start:end]
    signal = signal / jnp.where(weight == 0, 1, weight)
    missing = 0 if length is None else length - signal.shape[-1]
    return jnp.pad(signal, ((0, 0),) * (signal.ndim - 1) + ((0, missing),))
