"""Plot a record: time and memory against length, and the share of the roofline.

matplotlib is imported only here, when something is drawn. With the same matplotlib, the same record
gives the same SVG byte for byte, because it contains no date and no random identifiers.
"""

import io
import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax_attn.bench.implementations import OURS
from jax_attn.bench.record import Record
from jax_attn.bench.results import series, words
from jax_attn.bench.results.series import Line, Quantity, Shares
from jax_attn.bench.results.table import PRODUCTS
from jax_attn.bench.workload import CACHED, PAIR_MODES, PairWorkload, Workload
from jax_attn.environment import install_line

# Okabe and Ito's palette, which the colour-blind can tell apart; others have less vivid colours.
VERMILION, ORANGE, BLUE, SKY_BLUE, GREY = "#D55E00", "#E69F00", "#0072B2", "#56B4E9", "#8C8C8C"
INK, FAINT = "#222222", "#666666"
_IN_DARK = {
    "#ffffff": "#14171a",
    INK: "#e7eaed",
    FAINT: "#a3abb3",
    "#E4E4E4": "#3a4047",
    BLUE: "#6aa7e8",
    GREY: "#a3a3a3",
}
"""Colours on a light background → their replacements on a dark background."""
MARKERS = "osD^vPX*ph<>"
_MODES = (*PAIR_MODES, *CACHED)
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    **dict.fromkeys(("axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK),
    "svg.hashsalt": "jax-attn",
    "svg.fonttype": "none",  # keep text as text, which can be searched, compared and read aloud
}


def draw(record: Record, folder: Path) -> list[Path]:
    """Draw every figure that the record has data for, as SVG and PNG; return the paths.

    Raises ModuleNotFoundError, which says how to install it, if matplotlib is absent.
    """
    drawn = figures(record)
    folder.mkdir(parents=True, exist_ok=True)
    return [
        save(figure, folder / f"{name}.{kind}")
        for name, figure in drawn.items()
        for kind in ("svg", "png")
    ]


def figures(record: Record) -> dict[str, Any]:
    """Return the matplotlib Figures by name. Raises ModuleNotFoundError, as `draw` does."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        line = install_line("bench")
        raise ModuleNotFoundError(f"matplotlib, for plots, is not installed: {line}") from error
    with matplotlib.rc_context(STYLE):
        return dict(_figures(record))


def save(figure: Any, path: Path) -> Path:
    """Write the figure to `path`, a .svg or a .png, whole or not at all."""
    import matplotlib

    beside = path.with_name(f".{path.name}.{os.getpid()}")
    if path.suffix == ".svg":
        beside.write_text(as_svg(figure), encoding="utf-8")
    else:
        with matplotlib.rc_context(STYLE):
            figure.savefig(beside, format="png", dpi=130, metadata={"Software": None})
    beside.replace(path)
    return path


def as_svg(figure: Any) -> str:
    """Return the figure as SVG, which follows the viewer's preference for light or dark."""
    import matplotlib

    text = io.StringIO()
    # Leave out the date and matplotlib's version, which are not part of the record.
    with matplotlib.rc_context(STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    rules = (
        f'[style*="{part}: {light.lower()}"] {{ {part}: {dark} !important; }}'
        for light, dark in _IN_DARK.items()
        for part in ("fill", "stroke")
    )
    style = f"@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}"
    return text.getvalue().replace("<defs>", f"<defs>\n  <style>{style}</style>", 1)


def _figures(record: Record) -> Iterator[tuple[str, Any]]:
    for key, members in series.families(record).items():
        for mode in _MODES:
            for quantity in series.QUANTITIES:
                if against_length := series.lines(record, members, mode, quantity):
                    name = f"{quantity.name}-{_slug(key, mode)}"
                    yield name, _against_length(record, key, mode, quantity, against_length)
    for mode in PRODUCTS:
        if panels := series.shares(record, mode):
            yield f"roofline-{mode.replace('+', '-')}", _shares(record, mode, panels)


def _colour(implementation: str, framework: str, baseline: str) -> str:
    if words.is_ours(implementation):
        return VERMILION if implementation == OURS else ORANGE
    if implementation == baseline:
        return BLUE
    return SKY_BLUE if framework == "torch" else GREY


def _against_length(
    record: Record,
    key: Workload | PairWorkload,
    mode: str,
    quantity: Quantity,
    curves: list[Line],
) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    baseline = record.settings["baseline"]
    figure = Figure(figsize=(8.4, 5.2))
    about = quantity.about.format(baseline=baseline)
    shape = key.name
    if isinstance(key, Workload):
        shape = words.shape(replace(key, T=1, S=1)).replace(" T=1", "")
    below, above = _frame(figure, record, f"{quantity.title}: {mode}", shape, about)
    bottom = below + 0.07
    axes = figure.add_axes((0.09, bottom, 0.56, above - bottom))
    axes.set(xscale="log", xlabel="length T")
    axes.set_yscale("log", base=quantity.base)
    marks = dict(zip(sorted(line.implementation for line in curves), MARKERS * 2, strict=False))
    for line in curves:
        weight: dict[str, Any] = {"markersize": 4.5, "linewidth": 1.3, "zorder": 3}
        if line.implementation == OURS:
            weight = {"markersize": 6, "linewidth": 2.6, "zorder": 4}
        colour = _colour(line.implementation, line.framework, baseline)
        x, low, middle, high = zip(*line.points, strict=True)
        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(x, middle, color=colour, marker=marks[line.implementation], **weight)
    lengths = sorted({point[0] for line in curves for point in line.points})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    bottom, top = axes.get_ylim()
    if quantity.base == 10 and top < 100 * bottom:  # powers of ten would be one tick or two
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    # Drop trailing zeros, which show the precision of a measurement; a tick is not one.
    tick = FuncFormatter(lambda y, _: re.sub(r"\.0+ ", " ", quantity.in_words(y)))
    axes.yaxis.set_major_formatter(tick)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.7)
    axes.set_axisbelow(True)
    _label_ends(axes, curves, baseline)
    return figure


def _label_ends(axes: Any, curves: list[Line], baseline: str) -> None:
    """Write each line's name to the right of the axes, with a thin line leading to it."""
    to_axes = (axes.transData + axes.transAxes.inverted()).transform
    axes.autoscale_view()
    rising = curves[::-1]
    ends = [to_axes((line.points[-1][0], line.points[-1][2])) for line in rising]
    thin = {"arrowstyle": "-", "linewidth": 0.6, "shrinkA": 2, "shrinkB": 4, "relpos": (0, 0.5)}
    places = series.spread_out([y for _, y in ends], gap=0.055)
    for line, end, place in zip(rising, ends, places, strict=True):
        colour = _colour(line.implementation, line.framework, baseline)
        axes.annotate(
            line.label,
            xy=end,
            xytext=(1.08, place),
            **dict.fromkeys(("xycoords", "textcoords"), "axes fraction"),
            va="center",
            color=colour if colour in (VERMILION, BLUE) else INK,
            fontweight="bold" if line.implementation == OURS else "normal",
            arrowprops=thin | {"color": colour},
            annotation_clip=False,
        )


def _shares(record: Record, mode: str, panels: list[tuple[Workload | PairWorkload, Shares]]) -> Any:
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    grid = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    # Inches: height of a bar, width of a panel, height of its title, height of the page's frame.
    bar, panel, beside, frame = 0.17, 4.0, 0.45, 1.6
    heights = [bar * max(len(rows) for _, rows in line) + beside for line in grid]
    height, width = sum(heights) + frame, panel * columns
    figure = Figure(figsize=(width, height))
    about = (
        "Useful floating-point operations per second, over those of a matrix product measured in "
        "the same run (dashed)."
    )
    _, above = _frame(figure, record, "Share of the GEMM roofline", mode, about)
    farthest = max([1.0, *(share for _, rows in panels for _, share in rows)])
    top = above * height
    for line, tall in zip(grid, heights, strict=True):
        for i, (workload, rows) in enumerate(line):
            bars = bar * len(rows)
            left, bottom = (panel * i + 1.7) / width, (top - 0.1 - bars) / height
            axes = figure.add_axes((left, bottom, 2.1 / width, bars / height))
            _panel(axes, workload, rows, record.settings["baseline"], farthest)
        top -= tall
    return figure


def _panel(
    axes: Any, workload: Workload | PairWorkload, rows: Shares, baseline: str, farthest: float
) -> None:
    names = [row.implementation for row, _ in rows]
    colours = [_colour(row.implementation, row.framework, baseline) for row, _ in rows]
    places = range(len(rows))
    axes.barh(places, [share for _, share in rows], color=colours, height=0.72)
    for place, (row, share) in zip(places, rows, strict=True):
        bold = "bold" if row.implementation == OURS else "normal"
        axes.text(
            share + 0.02,
            place,
            words.percent(share),
            va="center",
            fontsize=7,
            fontweight=bold,
            bbox={"facecolor": "white", "linewidth": 0, "pad": 0.5},  # over the line at 100%
        )
    axes.axvline(1, color=INK, linewidth=0.9, linestyle=(0, (4, 2)), zorder=2)
    axes.set_title(workload.name, loc="left", fontsize=9, fontweight="bold", pad=4)
    axes.set_yticks(places, names, fontsize=7)
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() == OURS else "normal")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, farthest + 0.08)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)


def _frame(
    figure: Any, record: Record, title: str, subtitle: str, about: str
) -> tuple[float, float]:
    """Draw the title above and the caption below: what is shown, and where it was measured.

    Returns (bottom, top) of the space between, as fractions of the figure's height.
    """
    width, height = figure.get_size_inches()
    left, line = 0.2 / width, 0.125
    figure.text(left, 1 - 0.15 / height, title, fontsize=12, fontweight="bold", va="top")
    figure.text(left, 1 - 0.40 / height, subtitle, color=FAINT, va="top")
    wide = int(width * 19)
    caption = [part for text in (about, *words.place(record)) for part in textwrap.wrap(text, wide)]
    lines_below = "\n".join(caption)
    figure.text(left, 0.1 / height, lines_below, fontsize=6.5, color=FAINT, va="bottom")
    return (0.25 + line * len(caption)) / height, 1 - 0.75 / height


def _slug(key: Workload | PairWorkload, mode: str) -> str:
    if isinstance(key, PairWorkload):
        return f"{re.sub(r'[^A-Za-z0-9]+', '-', key.name).strip('-')}-{mode.replace('+', '-')}"
    parts = ["layer" if key.layer else "attention", f"{key.B}x{key.N}x{key.H}"]
    parts += [f"{key.K}kv"] if key.K != key.N else []
    parts += ["causal"] if key.is_causal else []
    return "-".join([*parts, key.dtype, mode.replace("+", "-")])
