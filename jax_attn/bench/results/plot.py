"""Plot a record: time and memory against length, and the share of the roofline.

matplotlib is imported only here, when something is drawn. With the same matplotlib, the same record
gives the same SVG byte for byte, because it contains no date and no random identifiers.
"""

import io
import os
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax_attn.bench.implementations import OURS
from jax_attn.bench.record import Record
from jax_attn.bench.results import series, words
from jax_attn.bench.results.series import PlottedLine, Quantity, Shares
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
    curves: list[PlottedLine],
) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    baseline = record.settings["baseline"]
    shape = key.name
    if isinstance(key, Workload):
        shape = words.shape(replace(key, T=1, S=1)).replace(" T=1", "")
    figure = Figure(figsize=(8.4, 5.2), layout="constrained")
    _frame(figure, record, f"{quantity.title}: {mode}", quantity.about.format(baseline=baseline))
    axes = figure.subplots()
    axes.set_title(shape, loc="left", color=FAINT, fontsize=9)
    axes.set(xscale="log", xlabel="length T")
    axes.set_yscale("log", base=quantity.base)
    marks = dict(zip(sorted(line.implementation for line in curves), MARKERS * 2, strict=False))
    for line in curves:
        is_ours = line.implementation == OURS
        colour = _colour(line.implementation, line.framework, baseline)
        x, low, middle, high = zip(*line.points, strict=True)
        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(
            x,
            middle,
            color=colour,
            label=line.label,
            marker=marks[line.implementation],
            markersize=6 if is_ours else 4.5,
            linewidth=2.6 if is_ours else 1.3,
            zorder=4 if is_ours else 3,
        )
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
    # In the order of the lines' ends, so that a name is near its line.
    legend = axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False)
    _embolden(legend.get_texts(), [line.implementation for line in curves])
    return figure


def _shares(record: Record, mode: str, panels: list[tuple[Workload | PairWorkload, Shares]]) -> Any:
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    tallest = max(len(rows) for _, rows in panels)
    # Inches: a bar is .17 high, the title of a panel .45, title and caption together 1.6.
    size = 4.0 * columns, (0.17 * tallest + 0.45) * lines + 1.6
    figure = Figure(figsize=size, layout="constrained")
    about = (
        "Useful floating-point operations per second, over those of a matrix product measured in "
        "the same run (dashed)."
    )
    _frame(figure, record, f"Share of the GEMM roofline: {mode}", about)
    farthest = max([1.0, *(share for _, rows in panels for _, share in rows)])
    every = [*figure.subplots(lines, columns, squeeze=False).flat]
    for axes in every:
        axes.set_axis_off()
    for axes, (workload, rows) in zip(every, panels, strict=False):
        axes.set_axis_on()
        _panel(axes, workload, rows, record.settings["baseline"])
        axes.set(xlim=(0, farthest + 0.25), ylim=(tallest - 0.4, -0.6), xticks=[])
    return figure


def _panel(axes: Any, workload: Workload | PairWorkload, rows: Shares, baseline: str) -> None:
    names = [row.implementation for row, _ in rows]
    colours = [_colour(row.implementation, row.framework, baseline) for row, _ in rows]
    bars = axes.barh(range(len(rows)), [share for _, share in rows], color=colours, height=0.72)
    # Over the line at 100%.
    white = {"facecolor": "white", "linewidth": 0, "pad": 0.5}
    figures = [words.percent(share) for _, share in rows]
    texts = axes.bar_label(bars, figures, padding=3, fontsize=7, bbox=white)
    axes.axvline(1, color=INK, linewidth=0.9, linestyle=(0, (4, 2)), zorder=2)
    axes.set_title(workload.name, loc="left", fontsize=9, fontweight="bold", pad=4)
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    _embolden(texts, names)
    _embolden(axes.get_yticklabels(), names)
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)


def _embolden(texts: Iterable[Any], names: Iterable[str]) -> None:
    """Set the texts of our own implementation in bold."""
    for text, name in zip(texts, names, strict=True):
        text.set_fontweight("bold" if name == OURS else "normal")


def _frame(figure: Any, record: Record, title: str, about: str) -> None:
    """Write the title above and the caption below: what is shown, and where it was measured."""
    figure.suptitle(title, x=0.02, ha="left", fontsize=12, fontweight="bold")
    wide = int(figure.get_figwidth() * 19)
    caption = [part for text in (about, *words.place(record)) for part in textwrap.wrap(text, wide)]
    below = {"x": 0.02, "ha": "left", "fontsize": 6.5, "color": FAINT}
    figure.supxlabel("\n".join(caption), **below)


def _slug(key: Workload | PairWorkload, mode: str) -> str:
    if isinstance(key, PairWorkload):
        return f"{re.sub(r'[^A-Za-z0-9]+', '-', key.name).strip('-')}-{mode.replace('+', '-')}"
    parts = ["layer" if key.layer else "attention", f"{key.B}x{key.N}x{key.H}"]
    parts += [f"{key.K}kv"] if key.K != key.N else []
    parts += ["causal"] if key.is_causal else []
    return "-".join([*parts, key.dtype, mode.replace("+", "-")])
