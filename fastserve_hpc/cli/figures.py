"""Figures of measured and simulated curves. Needs matplotlib, an extra of the package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastserve_hpc.errors import ConfigError

if TYPE_CHECKING:
    from fastserve_hpc.sim.study import Point


def draw_curves(points: Sequence[Point], path: Path) -> None:
    """Seconds per output token over the rate, mean and P99, a line for each policy. Raises `ConfigError`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--figure needs matplotlib: pip install 'fastserve-hpc[figures]'") from None
    from fastserve_hpc.sim.report import curve, grouped, latency

    groups = grouped(points)
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, which in zip(figure.subplots(1, 2), ("mean", "p99"), strict=True):
        for name in dict.fromkeys(group.name for group in groups):
            line = curve(groups, name, latency(which))
            axes.plot([rate for rate, _ in line], [value for _, value in line], marker="o", label=name)
        axes.set(xlabel="requests/s", ylabel=f"{which} s/token", yscale="log")
        axes.grid(True, alpha=0.3)
        axes.legend()
    figure.savefig(str(path), format="png", dpi=120)
