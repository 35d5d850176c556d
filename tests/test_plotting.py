from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.image
import pytest
import torch
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from torch import Tensor

from rewire import plotting
from rewire.plotting import plot_arcs, plot_curves, plot_heatmap
from rewire.topologies import ANCRe, DenseFormer
from rewire.topologies.base import Dims


def one_hot(depth: int) -> Tensor:
    topology = ANCRe()
    return topology.weights(topology.parameters(Dims(depth), "preserve"), Dims(depth))


def random(depth: int) -> Tensor:
    torch.manual_seed(0)
    return ANCRe().weights({"logits": torch.randn(depth * (depth + 1) // 2) * 0.03}, Dims(depth))


def dense(depth: int) -> Tensor:
    topology = DenseFormer()
    return topology.matrix(topology.weights(topology.parameters(Dims(depth), "paper"), Dims(depth)), Dims(depth))


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures as they are saved."""
    found: list[Figure] = []
    save = Figure.savefig

    def spy(self: Figure, *args: object, **kwargs: object) -> None:
        found.append(self)
        save(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", spy)
    return found


CASES = {
    "one": {"trunk": random(5)},
    "many": {f"trunk.{k}": random(k) for k in (1, 2, 3, 8, 64)},
    "one-hot": {"trunk": one_hot(12)},
    "dense": {"trunk": dense(6)},
    "grad": {"trunk": random(4).requires_grad_()},
    "bf16": {"trunk": random(4).bfloat16()},
    "negative": {"trunk": -random(4)},
    "zero": {"trunk": torch.zeros(3, 3)},
}


@pytest.mark.parametrize("plot", [plot_heatmap, plot_arcs])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("error")
def test_writes_a_picture(plot: object, case: str, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    plot(CASES[case], path)  # type: ignore[operator]
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[0] > 200
    assert pixels.shape[1] > 200
    assert pixels[..., :3].std() > 0.01


def test_heatmap_values(figures: list[Figure], tmp_path: Path) -> None:
    p = torch.tensor([[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.5, 1e-9, 0.5]])
    plot_heatmap({"a": p, "b": dense(3)}, tmp_path / "h.png", floor=-8)
    first, second, bar = figures[0].axes
    shown: Any = first.images[0].get_array()
    assert shown.mask.tolist() == [[0, 1, 1], [0, 0, 1], [0, 0, 0]]  # blank
    assert shown.compressed().tolist() == pytest.approx([0, math.log(1 / 3), 0, 0, -8, 0])
    shown = second.images[0].get_array()
    assert shown.mask.tolist() == [[0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]
    assert (first.get_title(), second.get_title()) == ("a", "b")
    assert first.get_xlabel() == "source $i$"
    assert first.get_ylabel() == "destination $j$"
    assert first.images[0].get_clim() == (-8, 0)
    assert "log" in bar.get_ylabel()
    assert list(first.images[0].get_extent()) == [-0.5, 2.5, 3.5, 0.5]  # source 0 left, destination 1 on top


@pytest.mark.parametrize("depth", [1, 2, 5, 8, 9, 24, 33, 64, 128])
@pytest.mark.parametrize("plot", [plot_heatmap, plot_arcs])
def test_ticks_are_whole_and_do_not_overlap(plot: object, depth: int, figures: list[Figure], tmp_path: Path) -> None:
    plot({"trunk": random(depth), "other": one_hot(depth)}, tmp_path / "h.png")  # type: ignore[operator]
    figures[0].draw_without_rendering()
    for ax in figures[0].axes[:2]:
        for axis in (ax.xaxis, ax.yaxis):
            ticks = list(axis.get_majorticklocs())
            assert all(tick == int(tick) for tick in ticks)
            boxes = [label.get_window_extent() for label in axis.get_majorticklabels()]
            assert not any(a.overlaps(b) for a, b in itertools.pairwise(boxes))


def test_arcs_are_the_weights(figures: list[Figure], tmp_path: Path) -> None:
    p = torch.tensor([[1.0, 0.0, 0.0], [0.009, 0.991, 0.0], [0.6, 0.1, 0.3]])
    plot_arcs({"trunk": p}, tmp_path / "a.png")
    (ax,) = figures[0].axes
    lines: Any = next(c for c in ax.collections if isinstance(c, LineCollection))
    ends = [(round(path.vertices[0][0]), round(path.vertices[-1][0])) for path in lines.get_paths()]
    assert ends == [(1, 3), (2, 3), (0, 3), (1, 2), (0, 1)]  # by weight; 0.009 is left out
    widths, alphas = list(lines.get_linewidths()), [float(color[3]) for color in lines.get_colors()]
    longer = [color[0] > 0.5 for color in lines.get_colors()]  # red, not grey
    assert longer == [True, False, True, False, False]
    assert widths == sorted(widths)
    assert widths[0] < widths[-1]
    assert alphas == sorted(alphas)
    assert alphas[0] < alphas[-1] <= 1


def test_arcs_draw_a_states_own_weight_as_a_ring(figures: list[Figure], tmp_path: Path) -> None:
    plot_arcs({"trunk": dense(4)}, tmp_path / "a.png")
    rings = figures[0].axes[0].collections[-1]
    assert [x for x, _ in rings.get_offsets().tolist()] == [1, 2, 3, 4]  # type: ignore[union-attr]


@pytest.mark.parametrize("count", [1, 3, 9])
@pytest.mark.filterwarnings("error")
def test_curves(count: int, figures: list[Figure], tmp_path: Path) -> None:
    curves = {f"run {k}": [(0.0, 1.0 + k), (1.0, 0.5), (2.0, 0.25)] for k in range(count)}
    plot_curves(curves, tmp_path / "c.png", "step", "loss")
    (ax,) = figures[0].axes
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "loss")
    assert [line.get_label() for line in ax.lines] == list(curves)
    for line, points in zip(ax.lines, curves.values(), strict=True):
        assert [tuple(point) for point in line.get_xydata().tolist()] == points  # type: ignore[union-attr]
    legend = ax.get_legend() or figures[0].legends[0]
    assert [text.get_text() for text in legend.get_texts()] == list(curves)


@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_the_suffix_selects_the_format(suffix: str, tmp_path: Path) -> None:
    plot_heatmap({"trunk": random(3)}, str(tmp_path / f"h.{suffix}"))
    assert (tmp_path / f"h.{suffix}").stat().st_size > 1000


def test_wrong_inputs(tmp_path: Path) -> None:
    for plot in (plot_heatmap, plot_arcs):
        with pytest.raises(ValueError, match="empty"):
            plot({}, tmp_path / "x.png")
        with pytest.raises(ValueError, match=r"'trunk' has shape \(3,\)"):
            plot({"trunk": torch.ones(3)}, tmp_path / "x.png")
    with pytest.raises(ValueError, match="floor=0"):
        plot_heatmap({"trunk": random(3)}, tmp_path / "x.png", floor=0)
    with pytest.raises(ValueError, match="nothing to plot in an empty dict"):
        plot_curves({}, tmp_path / "x.png", "x", "y")
    with pytest.raises(ValueError, match="nothing to plot in 'b'"):
        plot_curves({"a": [(0, 1)], "b": []}, tmp_path / "x.png", "x", "y")
    assert not (tmp_path / "x.png").exists()


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'rewire\[viz\]'"):
        plot_heatmap({"trunk": random(3)}, tmp_path / "x.png")


def test_style_is_not_left_behind(tmp_path: Path) -> None:
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        before = dict(matplotlib.rcParams)
        plot_arcs({"trunk": random(3)}, tmp_path / "x.png")
        assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("plot", [plot_heatmap, plot_arcs])
def test_the_sign_does_not_count(plot: object, tmp_path: Path) -> None:
    for name, sign in (("plus", 1), ("minus", -1)):
        plot({"trunk": sign * random(4)}, tmp_path / f"{name}.png")  # type: ignore[operator]
    plus, minus = (matplotlib.image.imread(tmp_path / f"{name}.png") for name in ("plus", "minus"))
    assert (plus == minus).all()


def test_matplotlib_is_imported_late_and_without_pyplot(tmp_path: Path) -> None:
    code = (
        "import sys, torch, rewire.plotting as p\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"p.plot_arcs({{'t': torch.eye(3)}}, {str(tmp_path / 'x.png')!r})\n"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    root = Path(plotting.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
