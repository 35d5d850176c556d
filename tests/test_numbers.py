"""Numbers on the pages are those of the results that are committed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rewire.studies.paired import Difference, difference

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ["README.md", "docs/limits.md", "docs/guides/which.md"]


def steps() -> dict[str, float]:
    """What a training step costs, by topology, at its defaults."""
    rows = json.loads((RESULTS / "topologies.json").read_text())["rows"]
    return {row["topology"]: row["step"] for row in rows if not row["options"]}


def test_the_table_of_costs() -> None:
    table = (
        (ROOT / "docs" / "topologies.md").read_text().partition("## What they cost")[2].partition("\n- *Weights*")[0]
    )
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    rows = json.loads((RESULTS / "topologies.json").read_text())["rows"]
    assert len(lines) == len(rows) > 20
    for line, row in zip(lines, rows, strict=True):
        options = ", ".join(f"{name}={value}" for name, value in row["options"].items())
        name = f"`{row['topology']}`" + (f", `{options}`" if options else "")
        moved = [f"{row[column]:.1f}" for column in ("states held", "eager", "floor")]
        cells = [name, str(row["units"]), f"{row['parameters']:,}", *moved, f"{row['step']:.2f}"]
        assert line == f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("page", PAGES)
def test_costs_on_other_pages(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    found = re.findall(r"(\d\.\d\d) times \(`([\w-]+)`\)", text)
    assert found
    assert {(number, name) for number, name in found} == {(f"{steps()[name]:.2f}", name) for _, name in found}
    assert not re.findall(r"1\.\d\d times(?! \(`)", text)  # a cost that names no topology is not compared


def test_the_most_and_the_least_that_the_pages_name() -> None:
    costs = {name: round(cost, 2) for name, cost in steps().items()}
    assert max(costs, key=costs.__getitem__) == "hc-gated"
    for page in ("README.md", "docs/limits.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert f"{costs['hc-gated']:.2f} times (`hc-gated`)" in text


def test_the_experiment() -> None:
    page = (ROOT / "docs" / "experiment.md").read_text()
    seeds = json.loads((RESULTS / "train_lm.json").read_text())["seeds"].values()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    shown = {name.strip("`"): (losses, kept) for name, _, *losses, kept in cells[:5]}
    first = next(iter(seeds))
    assert shown.keys() == first.keys()
    for name, (losses, kept) in shown.items():
        assert losses == [f"{seed[name]['validation loss']:.4f}" for seed in seeds]
        assert kept == f"{first[name]['kept MiB']:.1f} MiB"
    plain, gains = [seed["residual"]["validation loss"] for seed in seeds], {}
    for name in ("ancre", "ancre-fixed", "muddformer"):
        ends = [seed[name]["validation loss"] for seed in seeds]
        gains[name] = [p - end for p, end in zip(plain, ends, strict=True)]
    assert {f"{gain:.2f}" for gain in gains["muddformer"]} == {"0.05"}
    assert {f"{gain:.2f}" for gain in gains["ancre"]} == {"0.02"}
    assert [f"{gain:.2f}" for gain in gains["ancre-fixed"]] == ["0.00", "0.02"]
    for page_path in ("README.md", "docs/index.md"):
        text = " ".join((ROOT / page_path).read_text().split())
        assert "`muddformer` ends 0.05 nats per byte below" in text and "`ancre-ingoing`" in text


def test_what_is_said_of_clipping() -> None:
    rows = json.loads((RESULTS / "clipping.json").read_text())["rows"]
    noise = {row["model"]: row["noise"] for row in rows if "noise" in row}
    assert len({row["model"] for row in rows}) == 3 and len({row["topology"] for row in rows}) == 29
    assert max(row["share"] for row in rows) < 1 / 3
    assert all(abs(row["behind"]) < max(noise[row["model"]], 1e-3) for row in rows if "behind" in row)


def test_what_choosing_shows() -> None:
    page = (ROOT / "docs" / "choosing.md").read_text()
    new = page.partition("## Once more, on new seeds")[0]
    new += page.partition("## The plain model's search")[2].partition("## The same on a GPU")[0]
    text = " ".join(new.split())
    found = json.loads((RESULTS / "choosing" / "deep.json").read_text())
    lines = [line.replace("`", "").replace("*", "") for line in new.splitlines() if line.startswith("| ")]
    rows = {row["name"]: row for row in found["rows"]}
    baseline = rows[found["baseline"]]
    tuned = [*baseline["losses"].values()]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    for name, row in rows.items():
        gain = difference(tuned, [*row["losses"].values()])
        p = f"{row['p']:.2g}" if row["compile"] else ""
        compared = ["", "", ""] if row is baseline else [_told(gain), p, f"{_ahead(gain)} of 5"]
        shown = [name, f"{row['mean']:.3f}", *compared]
        (line,) = [each for each in cells if each[:5] == shown]
        assert line[6] == (f"{row['cost']['time']:.2f}" if row["compile"] else "")
    assert not [row for row in found["rows"] if row["verdict"] == "better"]

    one = {"rate": 0.004, "connections": 1.0, "embedding": 64.0, "branch": 4.0}
    earlier = one | {"rate": 0.008, "embedding": 1024.0}
    for name in ("denseformer", "hc-static", "hc-dynamic", "ancre-ingoing"):
        own = _losses_at(found, name, one)
        gain, there = difference(tuned, own), difference(_losses_at(found, "residual", one), own)
        shown = [name, f"{sum(own) / 5:.3f}", f"{there.mean:+.3f}", _told(gain), f"{_ahead(gain)} of 5"]
        assert f"| {' | '.join(shown)} |" in lines
    dense = [*rows["denseformer"]["losses"].values()]
    held = _losses_at(found, "denseformer, held at the end of another run", one)
    mudd, at = [*rows["muddformer:norms=True"]["losses"].values()], rows["muddformer:norms=True"]
    plain_there = [*rows["residual, the setting of muddformer:norms=True"]["losses"].values()]
    for first, other, own in (
        ("muddformer:norms=True and the plain model at its setting", plain_there, mudd),
        ("muddformer:norms=True and its connection weights frozen", [*at["controls"]["end"].values()], mudd),
        ("muddformer:norms=True and the plain model with twice", [*at["longer"].values()], mudd),
        ("denseformer and its connection", held, _losses_at(found, "denseformer", one)),
        ("denseformer and the plain model with 1.25", _losses_at(found, "residual", earlier, 1.25), dense),
    ):
        gain = difference(other, own)
        (line,) = [line for line in lines if line.startswith(f"| {first}")]
        assert line.endswith(f" | {_told(gain)} | {_ahead(gain)} of 5 |")

    searched = _first_seed(found)
    for (rate, embedding, branch), loss in searched.items():
        assert f"| {rate:g} | {embedding:g} | {branch:g} | {loss:.3f} |" in lines
    assert f"with {len(searched)} settings on one seed" in text
    assert f"they end {max(searched.values()) - min(searched.values()):.2f} nats apart" in text
    assert f"best ends {-difference(tuned, _losses_at(found, 'residual', earlier)).mean:.3f} above the best" in text

    short = json.loads((RESULTS / "choosing" / "deep_6.json").read_text())
    assert short["about"]["layers"] == 6 and {row["setting"]["embedding"] for row in short["rows"]} == {16}
    for row in short["rows"][1:]:
        assert "{mean:+.3f} ({low:+.3f} to {high:+.3f})".format(**row["gain"]) in text


def test_what_choosing_shows_on_new_seeds() -> None:
    page = (ROOT / "docs" / "choosing.md").read_text()
    section = page.partition("## Once more, on new seeds")[2].partition("\n## ")[0]
    lines, text = [line.replace("`", "").replace("*", "") for line in section.splitlines()], " ".join(section.split())
    found = json.loads((RESULTS / "choosing" / "deep_again.json").read_text())
    first = json.loads((RESULTS / "choosing" / "deep.json").read_text())
    rows, before = ({row["name"]: row for row in each["rows"]} for each in (found, first))
    losses = {name: [*row["losses"].values()] for name, row in rows.items()}
    best, earlier = losses[found["baseline"]], losses["residual, scaled"]
    for name in ("mhc", "muddformer:norms=True"):
        gain, other, p = difference(best, losses[name]), difference(earlier, losses[name]), rows[name]["p"]
        shown = [name, f"{rows[name]['mean']:.3f}", _told(gain), f"{p:.2g}", f"{_ahead(gain)} of 8"]
        assert f"| {' | '.join([*shown, _told(other), f'{_ahead(other)} of 8'])} |" in lines
        learned = difference([*rows[name]["controls"]["end"].values()], losses[name])
        (line,) = [line for line in lines if line.startswith(f"| {name} and its connection weights frozen")]
        assert line.endswith(f"| {_told(learned)} | {_ahead(learned)} of 8 |")
    assert {name for name, row in rows.items() if row["verdict"] == "better"} == {"mhc"}
    assert len(before["mhc"]["losses"].keys() & rows["mhc"]["losses"].keys()) == 0

    short = json.loads((RESULTS / "choosing" / "deep_again_6.json").read_text())
    mhc, plain = short["rows"]
    gain = difference([*plain["losses"].values()], [*mhc["losses"].values()])
    assert short["about"]["layers"] == 6 and mhc["verdict"] == "no difference"
    assert f"{_told(gain)}, p = {mhc['p']:.3f}, and lower on {_ahead(gain)} of 8 seeds" in text
    tried = {(run["rate"], run["embedding"], run["branch"]) for run in plain["search"]}
    assert f"best of {len(tried)} settings is the best for both" in text
    assert {**mhc["setting"], "connections": 0} == {**plain["setting"], "connections": 0}

    between = json.loads((RESULTS / "choosing" / "deep_again_12.json").read_text())
    mhc, plain, other = between["rows"]
    assert between["about"]["layers"] == 12 and between["baseline"] == plain["name"] and plain["mean"] < other["mean"]
    middle = difference([*plain["losses"].values()], [*mhc["losses"].values()])
    assert f"{_told(middle)}, p = {mhc['p']:.3f}, and lower on {_ahead(middle)} of 8 seeds" in text
    learned = difference([*mhc["controls"]["end"].values()], [*mhc["losses"].values()])
    assert f"from scratch, it is by {_told(learned)}: that" in text and learned.low < 0 < learned.high
    deep = difference(best, losses["mhc"])
    assert f"{gain.mean:+.3f}, {middle.mean:+.3f} and {deep.mean:+.3f} at 6, 12 and 24 layers" in text
    assert middle.high < deep.low < gain.high

    (higher,) = [run["loss"] for run in rows["muddformer:norms=True"]["search"] if run["connections"] == 64]
    (chosen,) = [run["loss"] for run in before["muddformer:norms=True"]["search"] if run["connections"] == 16]
    assert f"is worse on that seed ({higher:.3f}, {chosen:.3f} at times 16)" in " ".join(page.split())
    longer = difference([*before["muddformer:norms=True"]["longer"].values()], [*before["mhc"]["losses"].values()])
    assert f"{-longer.mean:.3f} ({-longer.high:.3f} to {-longer.low:.3f}) below `mhc`" in text
    time = rows["mhc"]["cost"]["time"]
    assert f"takes {time:.2f} times as long" in text and before["muddformer:norms=True"]["cost"]["time"] < time
    short = page.partition("**In short:**")[2].partition("##")[0]
    gain = difference(best, losses["mhc"])
    for text in (" ".join(short.split()), (ROOT / "README.md").read_text()):
        assert f"{time:.1f} times as long" in " ".join(text.split()) and f"{-longer.mean:.2f} lower" in text
    assert f"`mhc` ends {gain.mean:.3f} nats per byte lower (p = {rows['mhc']['p']:.4f})" in " ".join(short.split())


def _losses_at(found: dict[str, Any], name: str, setting: dict[str, float], length: float = 1.0) -> list[float]:
    """The losses of the compared seeds at a setting."""
    runs = [(run["trial"], run["curve"][-1][2]) for run in found["kept"][name]["runs"]]
    at = {trial["seed"]: loss for trial, loss in runs if (trial["setting"], trial["length"]) == (setting, length)}
    return [at[seed] for seed in range(2, 7)]


def _first_seed(found: dict[str, Any]) -> dict[tuple[float, float, float], float]:
    """The plain model's losses on the first seed, by setting."""
    runs = [run for run in found["kept"]["residual"]["runs"] if run["trial"]["seed"] == 0]
    settings = [run["trial"]["setting"] for run in runs]
    return {
        (each["rate"], each["embedding"], each["branch"]): run["curve"][-1][2]
        for each, run in zip(settings, runs, strict=True)
    }


def _told(gain: Difference) -> str:
    return f"{gain.mean:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})"


def _ahead(gain: Difference) -> int:
    return sum(value > 0 for value in gain.values)


def test_what_is_kept_without_checkpointing() -> None:
    table = (ROOT / "docs" / "scale.md").read_text().partition("### Without checkpointing")[2].partition("\n- ")[0]
    shown = {}
    for line in (line for line in table.splitlines() if line.startswith("| `")):
        name, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        shown[name.replace("`", "")] = cells
    wanted: dict[str, list[str]] = {}
    for file in ("memory_plain.json", "memory_layer_norms.json"):
        found = json.loads((RESULTS / file).read_text())
        for row in found["rows"]:
            name = ", ".join([row["topology"], *(f"{option}={value}" for option, value in row["options"].items())])
            cells = [f"{x:.1f} ({x / found['plain']:.0%})" for x in (row["kept"], row["extra peak"])]
            wanted.setdefault(name, []).extend(x.replace("-0.0", "0.0").replace("-0%", "0%") for x in cells)
    assert shown == wanted


def test_peaks_under_checkpointing() -> None:
    found = json.loads((RESULTS / "memory.json").read_text())
    page = (ROOT / "docs" / "scale.md").read_text().partition("## Memory")[2]
    lines = [line for line in page.partition('\n"Autograd')[0].splitlines() if line.startswith("| `")]
    wanted = []
    for row in found["rows"]:
        name = ", ".join([row["topology"], *(f"{option}={value}" for option, value in row["options"].items())])
        wanted.append([name, *(f"{row[key]:.1f}" for key in ("extra peak", "with autograd's sums", "boundary"))])
    assert [[cell.strip().replace("`", "") for cell in line.split("|")[1:-1]] for line in lines] == wanted
    assert f"own peak is {found['peak of the plain model']:.0f} hidden states" in page


def test_what_few_connections_cost() -> None:
    rows = {row["model"]: row for row in json.loads((RESULTS / "few.json").read_text())["rows"]}
    table = (ROOT / "docs" / "topologies.md").read_text().partition("| step, few |")[2].partition("\n\n")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    assert 2 * len(lines) + 2 == len(rows)  # and the plain model twice
    for line in lines:
        few, every = (rows[f"{line.split('`')[1]}, {which}"] for which in ("few", "all"))
        steps = [f"{row['over_plain']:.2f}" for row in (few, every)]
        kept = [f"{row['kept_states']:.1f}" for row in (few, every)]
        assert [cell.strip() for cell in line.split("|")[2:-1]] == [*steps, *kept]


def test_what_a_gpu_has_begun_to_show() -> None:
    page = (ROOT / "docs" / "choosing.md").read_text().partition("## The same on a GPU")[2].partition("\n## ")[0]
    runs = json.loads((RESULTS / "h100" / "grid.json").read_text())["runs"]
    searched = [run | {"loss": run["curve"][-1][2]} for run in runs if run["seed"] == 0]
    best = {run["contender"]: run for run in sorted(searched, key=lambda run: -run["loss"])}  # the last one stays
    for name, run in best.items():
        start = "| plain |" if name == "residual" else f"| `{name.partition(':')[0]}`"
        (line,) = (line for line in page.splitlines() if line.startswith(start))
        below = "" if name == "residual" else f"{best['residual']['loss'] - run['loss']:.3f}"
        setting = f"rate {run['rate']:g}, embeddings × {run['embedding']:g}, ends × {run['branch']:g}"
        assert [cell.strip() for cell in line.split("|")[2:-1]] == [f"{run['loss']:.3f}", below, setting]


def test_registers() -> None:
    """Every line of the tables of docs/kernels.md is one of the result, and none is missing."""
    found = json.loads((RESULTS / "registers.json").read_text())
    page = (ROOT / "docs" / "kernels.md").read_text().partition("## Registers and spills")[2].partition("\n## ")[0]
    shown = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]

    def cell(used: list[int]) -> str:
        registers, spilled, programs = used
        return f"{registers}, {programs}" + (f" ({spilled} B spilled)" if spilled else "")

    mixes = [
        [row[key] for key in ("mix", "D", "states", "kernel", "tile")]
        + [cell(row[target]) if target in row else "" for target in ("sm_80", "sm_90", "sm_100", "gfx942")]
        for row in found["mixes"]
    ]
    trunks = [
        [name, str(of["kernels of 32 blocks"]), "; ".join(f"`{kernel}` {cell(x)}" for kernel, x in of["worst"].items())]
        for name, of in found["trunks"].items()
    ]
    assert [row for row in shown if row[0] not in ("mix", "topology")] == [*mixes, *trunks]
    assert f"Triton {found['triton']};" in page


def test_connections_beside_code_by_hand() -> None:
    found = json.loads((RESULTS / "by_hand.json").read_text())["milliseconds"]
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for size, by_name in found.items():
        numbers = " | ".join(f"{value:.1f}" for name, value in by_name.items() if name != "plain, again")
        assert f"| {size} | {numbers} |" in page
    for size in ("512x256", "1024x512"):
        ours = found[size]["ancre-ingoing"], found[size]["denseformer"]
        assert max(ours) < min(found[size][name] for name in found[size] if name.startswith(("ANCRe", "DenseFormer")))


def test_how_long_compiling_takes() -> None:
    rows = json.loads((RESULTS / "compile_time.json").read_text())["results"]
    page = (ROOT / "docs" / "benchmarks.md").read_text().partition("## Compile time")[2].partition("\n## ")[0]
    plain = {row["layers"]: row for row in rows if row["topology"] == "plain"}
    wanted = []
    for row in rows:
        cells = [str(row["layers"]), row["topology"]]
        for run in ("traced", "first", "again"):
            ratio = "" if row["topology"] == "plain" else f" ({row[run] / plain[row['layers']][run]:.2f})"
            cells.append(f"{row[run]:.{0 if run == 'first' else 1}f}{ratio}")
        wanted.append(cells)
    lines = [line for line in page.splitlines() if re.match(r"\| \d", line)]
    assert [[cell.strip().replace("`", "") for cell in line.split("|")[1:-1]] for line in lines] == wanted


def test_how_long_tracing_takes_with_nothing_else_running() -> None:
    rows = json.loads((RESULTS / "compile_time_traced.json").read_text())["results"]
    page = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    traced = {(row["topology"], row["layers"]): row["traced"] for row in rows}
    names = ("residual", "ancre-ingoing", "hc-dynamic")
    few, many = ([f"{traced[name, n] / traced['plain', n]:.2f}" for name in names] for n in (12, 24))
    assert f"took {few[0]} (`residual`), {few[1]} (`ancre-ingoing`) and {few[2]} times (`hc-dynamic`)" in page
    assert f"the plain model's {traced['plain', 12]:.1f} s at 12 layers" in page
    assert f"and {', '.join(many[:2])} and {many[2]} times its {traced['plain', 24]:.1f} s at 24" in page
