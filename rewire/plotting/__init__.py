"""Pictures of learned weights and of benchmarks. All raise ImportError without matplotlib (extra ``viz``)."""

from rewire.plotting.bars import plot_bars
from rewire.plotting.charts import plot_curves, plot_differences, plot_times
from rewire.plotting.weights import plot_arcs, plot_heatmap

__all__ = [
    "plot_arcs",
    "plot_bars",
    "plot_curves",
    "plot_differences",
    "plot_heatmap",
    "plot_times",
]
