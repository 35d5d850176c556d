"""torchft's manager on rewired models: two replicas, one of which ends after four steps of eight, and comes back.

    python benchmarks/coverage/torchft_replicas.py

Needs ``pip install --no-deps torchft`` (run with 0.2.0) beside torch and rewire. CPU, gloo. Both begin with weights of
their own, and so does the one that comes back: it takes those of the other. Compared with one process that makes
all steps.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.nn import functional as F
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

import rewire

TOPOLOGIES = ("ancre-ingoing", "muddformer", "hc-dynamic", "mhc")
WIDTH, STOPS, STEPS = 16, 4, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(F.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def make(topology: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, WIDTH), *(Block() for _ in range(3)), nn.Linear(WIDTH, 1))
    return rewire.compile(model, topology, example_inputs=(batch(0, 0),))


def batch(step: int, replica: int) -> Tensor:
    return torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(100 * step + replica))


def train(topology: str, replica: int, seed: int, end: int, lighthouse: str, results: Any) -> None:
    """One replica, until ``end`` steps are done; the steps that it makes go into ``results``, and its weights."""
    torch.set_num_threads(1)
    model = make(topology, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timedelta(seconds=30)),
        min_replica_size=2,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica_{replica}_",
        lighthouse_addr=lighthouse,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        use_async_quorum=False,
        hostname="127.0.0.1",
    )
    parallel, steps = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    made = []
    while manager.current_step() < end:
        steps.zero_grad()  # asks who is there, and takes their weights
        made.append(manager.current_step())
        parallel(batch(made[-1], replica)).square().mean().backward()
        steps.step()
    results.put((replica, made, weights(model)))
    manager.shutdown(wait=False)


def weights(model: nn.Module) -> dict[str, Any]:
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def one_process(topology: str) -> dict[str, Any]:
    """The same steps on the batches of both."""
    model = make(topology, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(model(batch(step, replica)).square().mean() for replica in range(2)) / 2).backward()
        optimizer.step()
    return weights(model)


def off(a: dict[str, Any], b: dict[str, Any]) -> float:
    return max(float(abs(a[name] - b[name]).max()) for name in a)


def run(topology: str) -> str:
    context = mp.get_context("spawn")
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=60_000)
    address = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    results = context.Queue()

    def begin(replica: int, seed: int, end: int) -> Any:
        process = context.Process(target=train, args=(topology, replica, seed, end, address, results))
        process.start()
        return process

    first, stops = begin(0, 0, STEPS), begin(1, 7, STOPS)
    _, made, _ = results.get(timeout=120)
    assert made == [*range(STOPS)]
    stops.join()
    again = begin(1, 9, STEPS)
    ended = {replica: (made, found) for replica, made, found in (results.get(timeout=120) for _ in range(2))}
    first.join()
    again.join()
    server.shutdown()
    assert ended[0][0] == [*range(STEPS)] and ended[1][0] == [*range(STOPS, STEPS)], ended
    between, apart = off(ended[0][1], ended[1][1]), off(ended[0][1], one_process(topology))
    return f"{topology:14} weights of the two replicas differ by {between:.1e}, from one process by {apart:.1e}"


if __name__ == "__main__":
    for topology in TOPOLOGIES:
        print(run(topology), flush=True)
