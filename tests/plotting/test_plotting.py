from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.image
import pytest
import torch
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from models import PreNorm, Stack, vectors
from torch import Tensor, nn

import rewire
from rewire.diagnostics.plot import plot_signals
from rewire.diagnostics.signals import BlockSignals, Chi, SiteSignals, TrunkSignals
from rewire.plotting import charts, plot_arcs, plot_bars, plot_curves, plot_heatmap
from rewire.topologies import ANCRe, DenseFormer
from rewire.topologies.base import Dims


def one_hot(depth: int) -> Tensor:
    return torch.eye(depth)


def random(depth: int) -> Tensor:
    torch.manual_seed(0)
    return shortcuts(torch.randn(depth * (depth + 1) // 2) * 0.03, depth)


def shortcuts(logits: Tensor, depth: int) -> Tensor:
    topology = ANCRe()
    return topology.matrix(topology.weights({"logits": logits}, Dims(depth)), Dims(depth))


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


@pytest.mark.each_once
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
    assert first.get_xlabel() == "source $i$, dot: the newest"
    assert first.get_ylabel() == "destination $j$"
    assert first.images[0].get_clim() == (-8, 0)
    assert "log" in bar.get_ylabel()
    assert list(first.images[0].get_extent()) == [-0.5, 2.5, 3.5, 0.5]  # source 0 left, destination 1 on top


@pytest.mark.each_once
@pytest.mark.parametrize("depth", [1, 2, 9, 33, 128])
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


@pytest.mark.parametrize("largest", [0.0011, 0.004, 0.009, 0.064, 3.0])
def test_labels_of_logarithms_do_not_overlap(largest: float, figures: list[Figure], tmp_path: Path) -> None:
    plot_curves({"run": [(0.001, 2.0), (largest, 1.0)]}, tmp_path / "c.png", "rate", "loss", log="x")
    (ax,) = figures[0].axes
    labels = [label for label in ax.xaxis.get_ticklabels(which="both") if label.get_text()]
    low, high = ax.get_xlim()
    boxes = sorted(
        label.get_window_extent().extents.tolist() for label in labels if low <= label.get_position()[0] <= high
    )
    assert len(boxes) > 1
    assert all(left[2] < right[0] for left, right in itertools.pairwise(boxes))


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
    with pytest.raises(ImportError, match=r"pip install 'rewire-torch\[viz\]'"):
        plot_heatmap({"trunk": random(3)}, tmp_path / "x.png")


def test_style_is_not_left_behind(tmp_path: Path) -> None:
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        before = dict(matplotlib.rcParams)
        plot_arcs({"trunk": random(3)}, tmp_path / "x.png")
        assert dict(matplotlib.rcParams) == before


def test_heatmaps_tell_signs(figures: list[Figure], tmp_path: Path) -> None:
    p = torch.tensor([[1.0, 0.0, 0.0], [-0.5, 0.5, 0.0], [0.0, -1e-3, -2.0]])
    plot_heatmap({"signed": p, "positive": random(3)}, tmp_path / "h.png")
    first, second, bar = figures[0].axes
    shown: Any = first.images[0].get_array()
    assert shown.mask.tolist() == [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    assert shown.compressed().tolist() == pytest.approx([1, -1, 1, 0, -5e-4, -1])  # parts of the row's largest
    assert first.images[0].get_clim() == second.images[0].get_clim() == (-1, 1)
    assert "red: negative" in bar.get_ylabel()
    red, blue, small, zero = (first.images[0].to_rgba(x)[:3] for x in (-1.0, 1.0, -0.01, 0.0))
    assert red[0] > 2 * red[2] and blue[2] > 2 * blue[0]
    assert small[0] > 1.05 * small[2] and zero == pytest.approx([zero[0]] * 3, abs=0.01)


def test_arcs_tell_signs(figures: list[Figure], tmp_path: Path) -> None:
    plot_arcs({"trunk": torch.tensor([[1.0, 0.0, 0.0], [0.5, -0.9, 0.0], [-0.4, 0.3, 0.8]])}, tmp_path / "a.png")
    lines: Any = next(c for c in figures[0].axes[0].collections if isinstance(c, LineCollection))
    ends = [(round(path.vertices[0][0]), round(path.vertices[-1][0])) for path in lines.get_paths()]
    assert ends == [(1, 3), (0, 3), (0, 2), (2, 3), (1, 2), (0, 1)]
    red = [bool(color[0] > 1.5 * color[2]) for color in lines.get_colors()]
    assert red == [False, True, False, False, True, False]
    assert "negative" in [text.get_text() for text in figures[0].legends[0].get_texts()]


# -- bars ----------------------------------------------------------------------------------------------


def reads(depth: int, ways: int = 1, channels: int = 8) -> dict[str, Tensor]:
    return {f"unit {t}": torch.randn(ways, t, channels) for t in range(1, depth + 1)}


@pytest.mark.parametrize(("depth", "ways"), [(1, 1), (4, 3), (17, 1), pytest.param(24, 3, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("error")
def test_bars_are_written_at_any_depth(depth: int, ways: int, figures: list[Figure], tmp_path: Path) -> None:
    plot_bars({"layers": reads(depth, ways)}, tmp_path / "b.png")
    pixels = matplotlib.image.imread(tmp_path / "b.png")
    assert pixels[..., :3].std() > 0.01 and len(figures[0].axes) == depth
    assert [ax.get_title() for ax in figures[0].axes] == [f"unit {t}" for t in range(1, depth + 1)]
    assert bool(figures[0].legends) == (ways == 3)


def test_bars_are_medians_with_percentiles(figures: list[Figure], tmp_path: Path) -> None:
    values = {"a": torch.randn(3, 2, 101), "b": torch.randn(1, 4)}
    plot_bars({"layers": values}, tmp_path / "b.png")
    first, second = figures[0].axes
    heights = [bar.get_height() for bar in first.patches]  # type: ignore[attr-defined]
    assert heights == pytest.approx(values["a"].sort(-1).values[..., 50].flatten().tolist())
    segments: list[Any] = [s for lines in first.collections for s in lines.get_segments()]  # type: ignore[attr-defined]
    ends = values["a"].sort(-1).values[..., [5, 95]].flatten(0, 1).tolist()
    assert [[low[1], high[1]] for low, high in segments] == [pytest.approx(pair) for pair in ends]
    assert [bar.get_height() for bar in second.patches] == pytest.approx(values["b"][0].tolist())  # type: ignore[attr-defined]
    assert not second.collections


def test_many_sources_are_lines(figures: list[Figure], tmp_path: Path) -> None:
    values = torch.randn(1, 20, 101)
    plot_bars({"layers": {"output": values}}, tmp_path / "b.png")
    (ax,) = figures[0].axes
    assert not ax.patches
    assert list(ax.lines[0].get_ydata()) == pytest.approx(values.median(-1).values[0].tolist())


def test_bars_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_bars({"layers": {}}, tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"'unit 1' in 'layers' have shape \(2, 1\)"):
        plot_bars({"layers": {"unit 1": torch.ones(2, 1)}}, tmp_path / "x.png")


# -- signals ----------------------------------------------------------------------------------------------


def trunk(depth: int, name: str = "layers") -> TrunkSignals:
    sites = [
        SiteSignals(f"{name}.{n}.{kind}", kind, 2.0 + n, 0.5 + n, 0.7 + n, 0.9, 10.0 / (n + 1), 0.0 if n == 1 else 3.0)
        for n in range(depth)
        for kind in ("attention", "ffn")
    ]
    blocks = [BlockSignals(f"{name}.{n}", 0.1 * (n + 1)) for n in range(depth)]
    return TrunkSignals(name, tuple(sites), tuple(blocks), 9.0, 1.0, Chi(1.25, 0.01, 16))


@pytest.mark.parametrize("depth", [1, 4, 48])
@pytest.mark.filterwarnings("error")
def test_signals(depth: int, figures: list[Figure], tmp_path: Path) -> None:
    plot_signals([trunk(depth), trunk(3, "decoder")], tmp_path / "s.png")
    norms, gradients, influences, *below = figures[0].axes
    assert len(below) == 3 and below[0].get_title(loc="left").startswith("decoder")
    stream, attention, ffn, *updates = norms.lines
    assert list(stream.get_ydata()) == [2.0 + n // 2 for n in range(2 * depth)] + [9.0]
    assert list(attention.get_xdata()) == list(range(1, 2 * depth, 2))
    assert list(ffn.get_ydata()) == [0.5 + n for n in range(depth)]
    assert [list(line.get_ydata()) for line in updates] == [[0.7 + n for n in range(depth)]] * 2
    assert list(gradients.lines[0].get_ydata()) == [10.0 / (n + 1) for n in range(depth)]
    assert list(gradients.lines[2].get_ydata()) == [3.0] * (depth - (depth > 1))  # zero has no logarithm
    assert "chi 1.25 ± 0.01" in gradients.get_title(loc="left")
    assert norms.get_yscale() == gradients.get_yscale() == "log"
    heights = [bar.get_height() for bar in influences.patches]  # type: ignore[attr-defined]
    assert heights == pytest.approx([0.1 * (n + 1) for n in range(depth)])
    assert f"of {depth} blocks" in influences.get_title(loc="left")


def test_signals_of_a_diagnosis(tmp_path: Path) -> None:
    rewire.diagnose(Stack(PreNorm), vectors(), probes=0).plot(tmp_path / "s.svg")
    text = (tmp_path / "s.svg").read_text()
    assert text.startswith("<?xml") and len(text) > 5000
    with pytest.raises(ValueError, match="no trunks"):
        plot_signals([], tmp_path / "x.png")


# -- rewire.plot ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["heatmap", "arcs", "bars"])
def test_a_model_and_its_checkpoint_have_the_same_picture(kind: Any, tmp_path: Path) -> None:
    model = rewire.compile(Stack(PreNorm), "ancre-ingoing", start="paper", validate=False)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    rewire.plot(model, tmp_path / "a.png", kind)
    rewire.plot(tmp_path / "model.pt", tmp_path / "b.png", kind)
    a, b = (matplotlib.image.imread(tmp_path / f"{name}.png") for name in "ab")
    assert (a == b).all()


@pytest.mark.parametrize(("topology", "last"), [("grn-v1", None), ("grn-v3", None), ("grn-v3", 1)])
def test_biases_of_generalised_residual_networks(
    topology: str, last: int | None, figures: list[Figure], tmp_path: Path
) -> None:
    model = rewire.compile(Stack(PreNorm), topology, validate=False, last=last)
    (connection,) = rewire.connections(model).values()
    with torch.no_grad():
        connection.b.copy_(torch.randn(connection.b.shape))  # type: ignore[operator, union-attr]
    rewire.plot(model, tmp_path / "b.png", "bars")
    assert [ax.get_title() for ax in figures[0].axes] == ["unit 1", "unit 2", "unit 3", "output"]
    topology, dims = connection.layout.topology, connection.layout.dims
    biases = connection.values()["b"].split(topology.sizes(dims))  # type: ignore[attr-defined]
    for t, (ax, b) in enumerate(zip(figures[0].axes, biases, strict=True), start=1):
        heights = [bar.get_height() for bar in ax.patches]
        stack = [0, *range(1, t)] if last is None else {1: [0], 2: [0, 1], 3: [0, 1, 2], 4: [0, 1, 1, 2]}[t]
        of_channels = b.double() if b.dim() == 2 else b.double()[:, None]
        assert heights == pytest.approx(of_channels.quantile(0.5, -1)[stack].tolist())


def test_plots_of_what_has_no_weights(tmp_path: Path) -> None:
    for kind in ("heatmap", "bars"):
        with pytest.raises(rewire.RewireError, match="Linear was not rewired"):
            rewire.plot(nn.Linear(2, 2), tmp_path / "x.png", kind)  # type: ignore[arg-type]
    with pytest.raises(rewire.RewireError, match="on the meta device: load its weights before it is plotted"):
        rewire.plot(rewire.compile(Stack(PreNorm).to("meta"), validate=False), tmp_path / "x.png")
    with pytest.raises(ValueError, match="kind must be 'heatmap', 'arcs' or 'bars', not 'pie'"):
        rewire.plot(nn.Linear(2, 2), tmp_path / "x.png", "pie")  # type: ignore[arg-type]


def test_differences_that_are_far_off_are_arrows_at_the_edge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures: list[Figure] = []

    @contextlib.contextmanager
    def kept(path: Path, width: float, height: float) -> Iterator[Figure]:
        figures.append(Figure((width, height)))
        yield figures[-1]

    monkeypatch.setattr(charts, "saved_figure", kept)
    differences = {"near": [0.01, -0.02] * 10, "far": [5.0, -0.01], "none": []}
    charts.plot_differences(differences, tmp_path / "x.png", "loss", {"far": (-0.01, 5.0)})
    (axes,) = figures[0].axes
    left, right = axes.get_xlim()
    marks = [(line.get_marker(), float(line.get_xdata()[0])) for line in axes.lines if line.get_marker() in "o<>"]
    (interval,) = [line.get_xdata() for line in axes.lines if line.get_marker() == "None" and line.get_ydata()[0] == 1]
    assert tuple(interval) == (-0.01, pytest.approx(right / 1.05))
    assert [marker for marker, _ in marks].count("o") == 21 and ("<" not in dict(marks))
    assert dict(marks)[">"] < right < 0.1 and all(left < x < right for _, x in marks)
