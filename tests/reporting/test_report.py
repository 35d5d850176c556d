"""The page of `rewire.report`: what is on it, that it needs nothing else, and how it does in a browser."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from every_topology import mixed
from torch import nn

import rewire
from rewire.bench.harness import Timing
from rewire.patterns import tiny
from rewire.reporting.costs import Measured
from rewire.reporting.page import page

HOSTILE = '"><script>alert(1)</script><b id="x" onload=\'alert(2)\'>&amp;'


class Tags(HTMLParser):
    """Elements with their attributes, texts, and whether each element is closed."""

    VOID = frozenset({"meta", "link", "br"})
    OPTIONAL = frozenset({"th", "td", "tr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID | self.OPTIONAL:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.OPTIONAL:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def tips(self) -> list[str]:
        return [attrs["data-tip"] or "" for _, attrs in self.elements if "data-tip" in attrs]


def stack() -> tuple[nn.Module, tuple[Any, ...]]:
    case = models.CASES["pre-norm"]
    return mixed(case.make(), "ancre-ingoing"), case.inputs()


def test_it_shows_streams_changes_weights_and_costs() -> None:
    model, inputs = stack()
    found = Tags(page(model, inputs))
    assert not found.open
    for title in ("Streams", "Learned weights", "What was changed", "What it costs", "What was left alone"):
        assert title in found.text
    assert "6 residual adds in 3 blocks, width 32, pre-norm." in found.text
    assert sum(tip.startswith("residual add") for tip in found.tips) == 6
    assert found.tips.count("layers.0.attn (branch)") + found.tips.count("layers.0.attn (attention)") == 1
    matrix = rewire.coefficients(model)["layers"]
    for row in range(3):
        for column in range(row + 1):
            assert f"from state {column} into state {row + 1}: {matrix[row, column]:.4g}" in found.tips
    for line in rewire.diff(model).splitlines()[2:]:
        assert line in found.text
    assert re.search(r"takes \d+\.\d\d times as long \(median of the rounds; quartiles \d.* to \d", found.text)
    assert re.search(r"rewired\d+\.\d\d ms \(\d+\.\d\d to \d+\.\d\d\)", found.text)
    assert "layers64" in found.text  # the stream's name, 6 learned weights, 4 states held


def test_the_depth_graph_is_drawn() -> None:
    """Each unit, state and read once; edges of more than a hundredth of the largest weight, with their values."""
    model, _ = stack()
    found, graph = Tags(page(model)), rewire.graph(model)
    classes = [attrs.get("class") for tag, attrs in found.elements if tag in ("rect", "circle")]
    assert [classes.count("unit"), classes.count("read")] == [3, 0]
    assert len([tip for tip in found.tips if re.fullmatch(r"x\d(, the output)?", tip)]) == 4
    weights = dict(zip(graph.edges, (weight for *_, weight in graph.edges(data="weight")), strict=True))
    told = {f"{a.split('/')[1]} into {b.split('/')[1]}: {weight:.4g}" for (a, b), weight in weights.items()}
    assert told == {tip for tip in found.tips if " into " in tip and "state" not in tip}
    assert f"Effective depth {graph.effective_depth('layers'):.1f} of 3 units." in found.text


def test_without_numpy_it_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    text = page(stack()[0])
    assert "The depth graph is drawn where NumPy is installed." in text and 'svg class="depth"' not in text


def test_what_an_ablation_found_is_told() -> None:
    model, inputs = stack()
    ablation = rewire.ablate(model, [inputs], loss=lambda model, batch: model(*batch).square().mean())
    found = Tags(page(model, ablation=ablation))
    assert f"Rank correlation of |weight| and rise over the edges: {ablation.correlation():.2f}" in found.text
    for unit in ablation.units:
        assert f"{unit.path}{unit.without:.3g}" in found.text
        assert any(tip.endswith(f"; without it the loss rises by {unit.without:.3g}") for tip in found.tips)
    assert "What counts" not in page(model)


def test_a_topology_without_a_graph_is_told_so() -> None:
    class Odd(rewire.Residual):
        """With a matrix that nobody can read."""

        def matrix(self, weights: None, dims: rewire.Dims) -> torch.Tensor:
            return torch.zeros(1, 7)

        def program(self, weights: None, dims: rewire.Dims) -> Any:
            raise rewire.UnsupportedTopology("none")

    case = models.CASES["pre-norm"]
    assert "has no graph: its matrix" in page(rewire.compile(case.make(), Odd(), example_inputs=case.inputs()))


@pytest.mark.parametrize(
    ("seconds", "noisy"), [((0.9, 1.0, 1.3), True), ((0.75, 0.89, 1.1), True), ((2, 2.1, 9), False)]
)
def test_what_is_noise_is_called_noise(
    seconds: tuple[float, ...], noisy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = stack()
    times = Measured(Timing((0.8, 1.0, 1.4)), Timing(seconds), (1, 1), torch.device("cpu"))
    monkeypatch.setattr("rewire.reporting.page.measured", lambda *_: times)
    assert ("that is within the noise of these rounds" in Tags(page(model, inputs)).text) == noisy


def test_it_leaves_the_model_alone() -> None:
    model, inputs = stack()
    model.eval()
    model(*inputs).sum().backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    state = torch.get_rng_state()
    page(model, inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, before[name])


def test_of_plain_and_of_other_models() -> None:
    plain = Tags(page(models.CASES["two-widths"].make()))
    assert "It is not rewired." in plain.text
    assert "Learned weights" not in plain.text
    assert "No residual stream was found." in Tags(page(nn.Linear(2, 2))).text
    t5 = Tags(page(mixed(tiny.tiny_model("t5"), "denseformer")))
    assert "15 residual adds in 2 streams; 18 learned connection weights." in t5.text
    assert "that takes example_inputs" in t5.text
    part = Tags(page(rewire.compile(tiny.tiny_model("t5"), {"decoder": "ancre-ingoing"}, validate=False)))
    assert "6 residual adds in 3 blocks, width 64, pre-norm; left as it was." in part.text
    frozen, _ = rewire.freeze(stack()[0])
    assert "0 learned connection weights" in Tags(page(frozen)).text


class NamedByAStranger(nn.Module):
    """Has a class name, module names and a source with markup in them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, models.WIDTH)
        self.layers = nn.ModuleDict({f"{n}{HOSTILE}": models.PreNorm() for n in range(3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)  # <script>alert(3)</script>
        for layer in self.layers.values():
            x = layer(x)
        return x


NamedByAStranger.__name__ = f"Net{HOSTILE}"


def test_what_the_model_says_is_text() -> None:
    model = rewire.compile(NamedByAStranger(), "ancre-ingoing", example_inputs=(models.vectors(),))
    text = page(model)
    found = Tags(text)
    assert not found.open
    assert [tag for tag, _ in found.elements].count("script") == 1
    assert {"b", "img", "iframe"}.isdisjoint(tag for tag, _ in found.elements)
    assert not any(name.startswith("on") for _, attrs in found.elements for name in attrs)
    assert "x" not in {attrs.get("id") for _, attrs in found.elements}
    assert any(HOSTILE in tip for tip in found.tips)
    assert "alert(3)" in found.text


def test_it_needs_nothing_else(tmp_path: Path) -> None:
    model, _ = stack()
    rewire.report(model, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    for _, attrs in Tags(text).elements:
        assert "src" not in attrs
        assert (attrs.get("href") or "#").startswith(("#", "data:,"))
    assert "default-src 'none'" in text
    assert "@import" not in text and "url(" not in text
    assert page(model) == text  # the same each time


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    model = mixed(NamedByAStranger(), "denseformer", granularity="sublayer")
    rewire.report(model, path, (models.vectors(),))
    return path


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (390, "dark"),
        (820, "light"),
        *(pytest.param(*slow, marks=pytest.mark.slow) for slow in [(390, "light"), (820, "dark")]),
        *(pytest.param(1440, scheme, marks=pytest.mark.slow) for scheme in ("light", "dark")),
    ],
)
def test_in_a_browser(browser: Any, written: Path, width: int, scheme: str) -> None:
    shown = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    said: list[str] = []
    requests: list[str] = []
    shown.on("console", lambda message: said.append(message.text))
    shown.on("pageerror", lambda error: said.append(str(error)))
    shown.on("dialog", lambda dialog: said.append(dialog.message))
    shown.on("request", lambda request: requests.append(request.url))
    shown.goto(written.as_uri())
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
    ends = "[...document.querySelectorAll('.stream svg')].map(drawn => drawn.getBoundingClientRect().right)"
    assert max(shown.evaluate(ends)) <= width  # nothing has to be scrolled sideways
    back = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", back)[:3])) > 382
    assert light == (scheme == "light")
    cell = shown.locator("svg.heatmap rect").nth(2)
    cell.scroll_into_view_if_needed()
    cell.hover()
    tip = shown.locator("#tip")
    assert tip.is_visible()
    assert re.fullmatch(r"from state \d+ into state \d+: -?[\d.e-]+", tip.inner_text())
    box = tip.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width
    shown.locator("h1").hover()
    assert not tip.is_visible()
    shown.get_by_role("link", name="What was changed").click()
    assert shown.url.endswith("#changes")
    assert shown.locator("pre .added").count() == shown.locator("pre span").filter(has_text=re.compile(r"^\+")).count()
    assert said == []
    assert all(url.startswith(("file:", "data:")) for url in requests)
    shown.close()
