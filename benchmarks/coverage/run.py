"""Rewire every model type of transformers, every module of timm, every model class of diffusers, and code in the wild.

    PYTHONPATH=tests python benchmarks/coverage/run.py [--rows transformers timm diffusers wild] [--jobs 2] [--fresh]

Each model is tiny, has random weights, and gets a process of its own with limits of time and memory. It is run under
the recorder first: the residual adds that the run shows are what has to be connected. Then it is rewired with plain
connections, which validates outputs and gradients in both modes, and with learned ones, whose weights are changed to
see that they are connected. What is done is kept in out/coverage.jsonl: a run that was interrupted goes on from there.
The summary goes to docs/coverage.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import re
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torchvision_stub  # noqa: F401
from rich.progress import Progress
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

import rewire
from rewire.passes.find import find
from rewire.passes.finding.chains import chains
from rewire.passes.inputs import normalise_inputs
from rewire.passes.prepare import prepare
from rewire.passes.validating.tensors import tensors_in
from rewire.patterns import first_given, patterns_for
from rewire.patterns.tiny import timm_model

HERE = Path(__file__).parent
#: What an error says -> why a model does not run, in a few words.
WHY = {
    r"no model class": "a config without a model class",
    r"has no forward": "a model class without a forward",
    r"requires the (\w+) library": r"needs the package \1",
    r"is of no kind": "takes inputs of a kind of its own",
    r"^over \d+ s|process ended|allocate memory": "too large or too slow with all settings that were tried",
    r"": "settings or inputs that were tried do not fit together",
}
ROWS = ("transformers", "timm", "diffusers", "wild")
SECONDS, BYTES = 200, 9 << 30


@dataclasses.dataclass
class Result:
    """What happened to one model.

    Attributes:
        row, name: of the model.
        status: ``connected``; ``refused`` or ``crashed`` with a residual stream in it; ``learned`` if it has learned
            depth connections of its own; ``no stream``; ``does not run`` (by itself, or no inputs are known for it).
        adds: residual adds that are connected.
        shown: residual adds that a run shows.
        seconds: that rewiring without validation took.
        reason: in words.
    """

    row: str
    name: str
    status: str
    adds: int = 0
    shown: int = 0
    seconds: float = 0.0
    reason: str = ""


# -- the models --------------------------------------------------------------------------------------------------------


#: What models need of the libraries.
PRELOADED = {
    "transformers": ["transformers", "transformers.modeling_utils", "transformers.generation"],
    "timm": ["timm"],
    "diffusers": ["diffusers", "diffusers.models.unets.unet_2d_condition", "diffusers.models.autoencoders"],
}


def names(row: str) -> list[str]:
    """All models of a row."""
    if row == "transformers":
        from transformers import CONFIG_MAPPING

        return sorted(CONFIG_MAPPING)
    if row == "timm":
        return sorted(_timm_by_module().values())
    if row == "diffusers":
        from diffusion import DIFFUSION

        return list(DIFFUSION)
    from wild import WILD

    return list(WILD)


def _timm_by_module() -> dict[str, str]:
    """One model for each module of timm: one of the smallest, by its name."""
    import timm

    small = ("test_", "atto", "femto", "pico", "nano", "tiny", "xxs", "xs", "mini", "small", "_s", "18", "26", "b0")
    chosen: dict[str, str] = {}
    for module in timm.list_modules():
        models = timm.list_models(module=module)
        rank = {name: next((n for n, word in enumerate(small) if word in name), len(small)) for name in models}
        if models:
            chosen[module] = min(models, key=lambda name: (rank[name], len(name)))
    return chosen


def model_of(row: str, name: str) -> tuple[nn.Module, Any]:
    """A model and its inputs; None for inputs that the registry makes."""
    torch.manual_seed(0)
    if row == "transformers":
        from hugging_face import running_model

        return running_model(name, _run)
    if row == "timm":
        return _small_images(name)
    if row == "diffusers":
        from diffusion import DIFFUSION

        model, inputs = DIFFUSION[name]()
        return model, inputs
    from wild import WILD

    return WILD[name]()


def _small_images(name: str) -> tuple[nn.Module, Any]:
    """A model of timm, and images smaller than those that it was made for, if it takes them."""
    for size, options in ((112, {"img_size": 112}), (112, {}), (128, {})):
        images = torch.randn(2, 3, size, size)
        try:
            model = timm_model(name, **options)
            _run(model.eval(), ((images,), {}))
            return model, ((images,), {})
        except Exception as error:
            logging.debug("%s does not take small images: %s", name, error)
    return timm_model(name), None


# -- one model ---------------------------------------------------------------------------------------------------------


def examined(row: str, name: str, ran: Callable[[], None]) -> Result:
    """Build, run, record and rewire a model; ``ran`` is called in between."""
    result = Result(row, name, "does not run")
    try:
        model, given = model_of(row, name)
        found = patterns_for(model)
        if given is None:
            make = first_given(found, "example_inputs")
            if make is None:
                result.reason = "no inputs are known for it"
                return result
            given = make(model)
        inputs = normalise_inputs(given)
        for training in (False, True):
            _run(model.train(training), inputs)
    except Exception as error:
        result.reason = _said(error)
        return result
    ran()
    model.eval()
    learned = first_given(found, "learned")
    if learned:
        result.status, result.reason = "learned", learned
        return result
    try:
        _rewired(model, inputs, result)
    except rewire.NoResidualAdds as error:
        result.status, result.reason = "refused" if result.shown > 1 else "no stream", _said(error)
    except rewire.RewireError as error:
        result.status, result.reason = "refused", _said(error)
    except Exception as error:
        result.status, result.reason = "crashed", _said(error) + traceback.format_exc()[-600:]
    return result


def _rewired(model: nn.Module, inputs: Any, result: Result) -> None:
    found = find(prepare(model, inputs)).evaluation
    lengths = [len(chain.adds) for chain in chains(found.flow)[0]]
    result.shown = sum(length for length in lengths if length > 1)
    plain = rewire.compile(model, "residual", example_inputs=inputs)  # validated in both modes
    start = time.process_time()
    rewire.compile(model, "residual", example_inputs=inputs, validate=False)
    result.seconds = time.process_time() - start
    trunks = [connection.layout.trunk for connection in rewire.connections(plain).values()]
    result.adds = sum(len(stream.adds) for name in trunks for stream in found.passes(name))  # some run several times
    if not any(_learns(model, inputs, noise) for noise in (0.02, 0.1)):  # some random models return zeros
        raise RuntimeError("silent: connection weights change nothing")
    result.status = "connected"


def _learns(model: nn.Module, inputs: Any, noise: float) -> bool:
    """Whether the model, rewired, returns something else with other connection weights.

    Args:
        noise: standard deviation of what is added to all weights: heads that start at zero would hide everything.
    """
    learned = rewire.compile(model, "ancre-ingoing", granularity="sublayer", example_inputs=inputs, start="paper")
    with torch.no_grad():
        for weight in learned.parameters():
            weight.data = weight.data + noise * torch.randn_like(weight)
    before = _run(learned, inputs)
    with torch.no_grad():
        for connection in rewire.connections(learned).values():
            for parameter in connection.parameters():
                parameter.add_(torch.randn_like(parameter))
    after = _run(learned, inputs)
    return any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _run(model: nn.Module, inputs: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with torch.no_grad():
        args, kwargs = inputs
        return [t for t in tensors_in(model(*args, **kwargs)) if t.is_floating_point()]


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


# -- processes ---------------------------------------------------------------------------------------------------------


def apart(row: str, name: str) -> Result:
    """`examined`, in a process of its own."""
    mine, theirs = multiprocessing.Pipe(duplex=False)  # the child says when the model has run, and then the result
    process = multiprocessing.get_context("fork").Process(target=_child, args=(row, name, theirs))
    process.start()
    theirs.close()
    result, ran = None, False
    with contextlib.suppress(EOFError):  # processes that were forked meanwhile hold the pipe, too: it may not end
        while result is None and mine in multiprocessing.connection.wait([mine, process.sentinel], SECONDS + 10):
            result, ran = mine.recv(), True
    if process.is_alive() and result is None:
        process.kill()
    process.join()
    if result is not None:
        return result
    why = f"over {SECONDS} s" if process.exitcode == -signal.SIGALRM else f"the process ended with {process.exitcode}"
    return Result(row, name, "crashed" if ran else "does not run", reason=why)


def _child(row: str, name: str, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    signal.alarm(SECONDS)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        result = examined(row, name, lambda: pipe.send(None))
    pipe.send(result)
    pipe.close()
    os._exit(0)


def quiet() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)


# -- the page ----------------------------------------------------------------------------------------------------------


def page(results: Iterable[Result]) -> str:
    """docs/coverage.md."""
    by_row = {row: [r for r in results if r.row == row] for row in ROWS}
    lines = [
        "# Coverage",
        "",
        "Every model type of transformers, a small model of each module of timm, model classes of diffusers, and",
        "architectures written by hand in the style of well-known repositories. Nothing was prepared in any of them.",
        "`PYTHONPATH=tests python benchmarks/coverage/run.py` makes this page; one process per model.",
        "",
        "A model counts if it runs by itself and a run shows a residual stream of two adds or more. Connected means:",
        "outputs and gradients are those of the original in evaluation and in training mode, with the model's weights",
        "and with perturbed ones, and changing connection weights changes the output.",
        "",
        "| | tried | connected | refused | crashed | of | adds connected, of those that a run shows | slowest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, found in by_row.items():
        counted = [r for r in found if r.status in ("connected", "refused", "crashed")]
        if counted:
            numbers = [sum(r.status == status for r in counted) for status in ("connected", "refused", "crashed")]
            share = f"{numbers[0]} ({100 * numbers[0] // len(counted)}%)"
            adds = f"{sum(r.adds for r in counted)} of {sum(max(r.shown, r.adds) for r in counted)}"
            slowest = max((r for r in counted if r.seconds), key=lambda r: r.seconds, default=Result(row, "", ""))
            cells = [row, f"{len(found)} of {len(names(row))}", share, *map(str, numbers[1:]), str(len(counted)), adds]
            lines.append(f"| {' | '.join(cells)} | {slowest.seconds:.1f} s ({slowest.name}) |")
    for row, found in by_row.items():
        others = [r for r in found if r.status in ("refused", "crashed")]
        partly = [r for r in found if r.status == "connected" and r.adds < r.shown]
        apart_ = [r for r in found if r.status in ("no stream", "learned", "does not run")]
        lines += ["", f"## {row}", ""]
        if others:
            lines += ["Not connected:", "", "| model | adds that a run shows | why |", "|---|---|---|"]
            lines += [f"| {r.name} | {r.shown} | {_cell(r.reason)} |" for r in others] + [""]
        if partly:
            lines += ["Connected in part: " + ", ".join(f"{r.name} ({r.adds} of {r.shown})" for r in partly) + ".", ""]
        for kind in sorted({_kind(r) for r in apart_}):
            of_kind = [r.name for r in apart_ if _kind(r) == kind]
            lines += [f"Not counted, {kind} ({len(of_kind)}): {', '.join(of_kind)}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def _kind(result: Result) -> str:
    """Why a model is not counted."""
    if result.status != "does not run":
        return result.status
    found = next(match for pattern, why in WHY.items() if (match := (re.search(pattern, result.reason), why))[0])
    return f"does not run: {found[0].expand(found[1])}"


def _cell(reason: str) -> str:
    reason = re.sub(r"/\S*/site-packages/", "", reason).replace(f"{HERE.parent.parent}/", "")
    return reason.replace("|", "\\|").replace("\n", " ")[:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs found")
    parser.add_argument("--only", nargs="+", help="names of models")
    parser.add_argument("--log", type=Path, default=Path("out/coverage.jsonl"))
    parser.add_argument("--out", type=Path, default=HERE.parent.parent / "docs" / "coverage.md")
    given = parser.parse_args()
    quiet()

    given.log.parent.mkdir(parents=True, exist_ok=True)
    if given.fresh:
        given.log.unlink(missing_ok=True)
    done = _read(given.log)
    wanted = [(row, name) for row in given.rows for name in names(row)]
    if given.only:
        wanted = [(row, name) for row, name in wanted if name in given.only]
        done = {key: result for key, result in done.items() if key not in wanted}
    left = [key for key in wanted if key not in done]
    for library in {row for row, _ in left} - {"wild"}:  # once, rather than in each process
        for name in PRELOADED[library]:
            importlib.import_module(name)
    with given.log.open("a") as log, ThreadPoolExecutor(given.jobs) as pool, Progress() as progress:
        task = progress.add_task("models", total=len(left))
        for result in pool.map(lambda key: apart(*key), left):
            done[result.row, result.name] = result
            log.write(json.dumps(dataclasses.asdict(result)) + "\n")
            log.flush()
            progress.advance(task)
            if result.status in ("refused", "crashed"):
                progress.console.print(f"{result.row} {result.name}: {result.reason[:250]}", markup=False)
    given.out.write_text(page(done.values()))


def _read(log: Path) -> dict[tuple[str, str], Result]:
    lines = log.read_text().splitlines() if log.exists() else []
    results = [Result(**json.loads(line)) for line in lines]
    return {(result.row, result.name): result for result in results}


if __name__ == "__main__":
    main()
