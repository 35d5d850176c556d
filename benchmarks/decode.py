"""A token of decoding: plain, rewired and frozen models in turn, with a cache of keys and values.

    python benchmarks/decode.py [--json FILE] [--rounds N] [--layers N] [--width N] [topology ..]

The model is a Llama with random weights in evaluation mode. Each takes one token after the same prompt, again and
again; what is reported is the processor time of a token beside the plain model's: the median over rounds of the ratio
within a round, as other programs on the machine slow all of a round down. Topologies with weights per token have no
frozen form.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import rewire
from rewire.bench import harness

TOPOLOGIES = ("ancre-ingoing", "denseformer", "grn-v3", "hc-static", "hc-dynamic", "mhc", "attnres", "muddformer")
PROMPT = 32


def token_of(model: Any) -> Callable[[], Tensor]:
    """Decodes one token; the cache is cut back to the prompt afterwards."""
    ids = torch.arange(PROMPT)[None]
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values

    def token() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(ids[:, :1], past_key_values=cache, use_cache=True).logits
        cache.crop(-1)
        return logits

    return token


def models_of(plain: nn.Module, topologies: list[str]) -> dict[str, nn.Module]:
    models = {"plain": plain}
    for name in topologies:
        models[name] = rewire.compile(copy.deepcopy(plain), name, start="paper", validate=False).eval()
        with contextlib.suppress(rewire.UnsupportedTopology):  # weights per token
            models[f"{name}, frozen"] = rewire.freeze(models[name], 0.0)[0].eval()
    return models


def ratios(timings: dict[str, harness.Timing]) -> dict[str, float]:
    plain = timings["plain"].seconds
    return {
        name: statistics.median(own / base for own, base in zip(timing.seconds, plain, strict=True))
        for name, timing in timings.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topologies", nargs="*", default=[*TOPOLOGIES])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    given = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"hidden_size": given.width, "intermediate_size": 3 * given.width, "num_hidden_layers": given.layers}
    plain = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, vocab_size=1000)).eval()
    steps = {name: token_of(model) for name, model in models_of(plain, given.topologies).items()}
    timings = harness.side_by_side(steps, given.rounds, torch.device("cpu"), clock=time.process_time)
    found = ratios(timings)
    table = Table("model", "ms a token", "over plain")
    for name, timing in timings.items():
        table.add_row(name, f"{1e3 * statistics.median(timing.seconds):.2f}", f"{found[name]:.2f}")
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps({"sizes": sizes, "over plain": found, **harness.as_json(timings)}, indent=1))


if __name__ == "__main__":
    main()
