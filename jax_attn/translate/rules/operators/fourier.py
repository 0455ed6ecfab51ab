"""Write Fourier transforms."""

from typing import Any

from jax_attn.translate.rules.calls import call
from jax_attn.translate.rules.rule import Array, Rule


def _one_axis(name: str) -> Any:
    """Make the rule of a transform along one axis."""

    def rule(self: Array, n: Any, dim: int, norm: str | None) -> str:
        return call(
            f"jnp.fft.{name}",
            _floating(self),
            None if n is None else "n",
            axis=None if dim == -1 else dim,
            norm=None if norm in (None, "backward") else "norm",
        )

    return rule


def _floating(self: Array) -> str:
    """Cast integers, of which torch and JAX transform some only."""
    if self.is_floating or self.dtype.startswith("complex"):
        return "self"
    return "self.astype(jnp.float32)"


def _several(name: str, default: tuple[int, ...] | None) -> Any:
    """Make the rule of a transform along several axes."""

    def rule(self: Array, s: Any, dim: Any, norm: str | None) -> str:
        if name.startswith("irfft") and s is not None and s[-1] == -1:
            raise NotImplementedError(f"{name} whose last length is that of its input, doubled")
        if s is not None and dim is None:
            dim = tuple(range(-len(s), 0))
        return call(
            f"jnp.fft.{name}",
            _floating(self),
            s=None if s is None else _lengths(s, dim),
            axes=None if dim is None or tuple(dim) == default else tuple(dim),
            norm=None if norm in (None, "backward") else "norm",
        )

    return rule


def _lengths(s: Any, dim: Any) -> str:
    """Write lengths, where torch has -1 for that of the axis."""
    each = [
        f"self.shape[{d}]" if n == -1 else f"s[{i}]"
        for i, (n, d) in enumerate(zip(s, dim, strict=True))
    ]
    return f"({', '.join(each)},)"


def _shifted(name: str) -> Any:
    def rule(dim: Any) -> str:
        axes = None if dim is None else dim[0] if len(dim) == 1 else tuple(dim)
        return call(f"jnp.fft.{name}", "self", axes=axes)

    return rule


def _frequencies(name: str) -> Any:
    def rule(d: float, out: Array) -> str:
        spaced = None if d == 1 else "d"
        return f"{call(f'jnp.fft.{name}', 'n', spaced)}.astype(jnp.{out.dtype})"

    return rule


_PAD_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def stft(
    self: Array,
    hop_length: Any,
    win_length: Any,
    window: Any,
    n_fft: int,
    normalized: bool,
    onesided: bool | None,
    return_complex: bool | None,
    align_to_window: bool | None,
    center: bool = False,
    pad_mode: str = "reflect",
) -> str:
    if self.dtype.startswith("complex") or return_complex is not True or align_to_window:
        raise NotImplementedError("stft of complex signals, as pairs, or aligned to the window")
    return call(
        "stft",
        *_frames(n_fft, hop_length, win_length, window),
        pad_mode=f"'{_PAD_MODES[pad_mode]}'" if center else None,
        normalized=True if normalized else None,
        onesided=False if onesided is False else None,
    )


def _frames(n_fft: int, hop_length: Any, win_length: Any, window: Any) -> tuple[str | None, ...]:
    """Write the signal and how it is cut in frames, by torch's defaults."""
    return (
        "self",
        "n_fft",
        str(n_fft // 4) if hop_length is None else "hop_length",
        "n_fft" if win_length is None else "win_length",
        None if window is None else "window",
    )


def istft(
    n_fft: int,
    hop_length: Any,
    win_length: Any,
    window: Any,
    center: bool,
    normalized: bool,
    onesided: bool | None,
    length: Any,
    return_complex: bool,
) -> str:
    if return_complex or onesided is False:
        raise NotImplementedError("istft of two-sided spectra")
    return call(
        "istft",
        *_frames(n_fft, hop_length, win_length, window),
        center=None if center else False,
        normalized=True if normalized else None,
        length=None if length is None else "length",
    )


_NORMS = ("backward", "ortho", "forward")


def real_to_complex(dim: Any, normalization: int, onesided: bool) -> str:
    norm = f"'{_NORMS[normalization]}'" if normalization else None
    return call("jnp.fft.rfftn" if onesided else "jnp.fft.fftn", "self", axes=tuple(dim), norm=norm)


def complex_to_complex(dim: Any, normalization: int, forward: bool) -> str:
    if not dim:
        return "self"
    # torch numbers the norms of the sum alone; NumPy names them by the direction.
    norm = _NORMS[normalization] if forward else _NORMS[2 - normalization]
    return call(
        "jnp.fft.fftn" if forward else "jnp.fft.ifftn",
        "self",
        axes=tuple(dim),
        norm=None if norm == "backward" else f"'{norm}'",
    )


def complex_to_real(dim: Any, normalization: int) -> str:
    norm = _NORMS[2 - normalization]
    lengths = [f"self.shape[{axis}]" for axis in dim[:-1]] + ["last_dim_size"]
    return call(
        "jnp.fft.irfftn",
        "self",
        s=f"({', '.join(lengths)},)",
        axes=tuple(dim),
        norm=None if norm == "backward" else f"'{norm}'",
    )


_TRANSFORMS = ("fft", "ifft", "rfft", "irfft")

FOURIER: dict[str, Rule] = {
    **{f"aten.fft_{n}.default": _one_axis(n) for n in (*_TRANSFORMS, "hfft", "ihfft")},
    **{f"aten.fft_{n}2.default": _several(f"{n}2", (-2, -1)) for n in _TRANSFORMS},
    **{f"aten.fft_{n}n.default": _several(f"{n}n", None) for n in _TRANSFORMS},
    "aten.fft_fftshift.default": _shifted("fftshift"),
    "aten.fft_ifftshift.default": _shifted("ifftshift"),
    "aten.fft_fftfreq.default": _frequencies("fftfreq"),
    "aten.fft_rfftfreq.default": _frequencies("rfftfreq"),
    "aten._fft_r2c.default": real_to_complex,
    "aten._fft_c2c.default": complex_to_complex,
    "aten._fft_c2r.default": complex_to_real,
    "aten.stft.default": stft,
    "aten.stft.center": stft,
    "aten.istft.default": istft,
}
