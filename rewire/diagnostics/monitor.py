"""rewire.Monitor: connection weights and diagnostics as time series while a model trains."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from rewire.diagnostics.measure import diagnose
from rewire.diagnostics.moves import look, starts
from rewire.diagnostics.signals import TrunkSignals
from rewire.plotting import plot_heatmap
from rewire.runtime.connection import coefficients, connections

Values: TypeAlias = dict[str, float | Tensor]  #: by name
#: Called with values by name and the number of the step.
Log = Callable[[Values, int], object]


class Monitor:
    """Logs connection weights, and on request diagnostics, of a model while it trains.

    ```python
    monitor = rewire.Monitor(model, SummaryWriter("runs/1"), every=100)
    for batch in batches:
        ...
        optimizer.step()
        monitor.step()
    ```

    Series are named ``rewire/<trunk>/..``. For the connection weights p_ji [destination, source] of a trunk, as
    `rewire.coefficients` returns them:

    - ``weights/min``, ``weights/max``, ``weights/mean``: over the connections whose weight is or at first was not 0;
    - ``weights/input``, ``weights/previous``: share of |p| that falls on the trunk's input, and on the newest state (or
      increment) before the destination, averaged over the destinations;
    - ``weights/sources``: effective number of sources, the exponential of the entropy of the shares, averaged likewise;
    - ``weights/change``: relative change since the monitor was made, ``||P - P_0|| / ||P_0||``;
    - ``weights/speed``: ``||P - P'|| / ||P_0||`` per step since the last log, when P was P': 0 where they have stopped;
    - ``weights/moved``: largest change of a stored weight since the monitor was made, at natural scales
      (``Topology.natural_scales``): if logits moved by more than about 5, their softmax has one choice left;
    - ``weights/gradient``: norm of their gradient, if it is still there: call `step` before ``zero_grad``.

    With ``matrices``, ``weights/matrix`` is P itself: a tensor for a callable, a heatmap for a SummaryWriter. From a
    diagnosis (see `rewire.diagnose`): ``chi``, ``effective_depth``, ``gradient/input``, ``stream/output``, and for each
    residual add ``stream/<number> <branch>``, likewise ``branch``, ``update``, ``cosine``, ``gradient`` and
    ``weight_gradient``; ``influence/<number> <block>``.

    In a distributed run make one on rank 0 only, with the model from before it was wrapped by DDP. Weights that FSDP2
    shards are gathered by all ranks together: call `step` on all of them, with a ``log`` that does nothing on the
    others; sharded models cannot be diagnosed.

    Args:
        model: a rewired model; or, for diagnostics only, a plain one.
        log: a SummaryWriter (of TensorBoard, tensorboardX: anything with ``add_scalar`` and ``add_image``), or a
            callable that takes a dict of values by name, floats and perhaps tensors, and the number of the step.
        every: steps between two logs of the connection weights.
        diagnose_every: steps between two diagnoses; None: never. Each costs some forward and backward passes.
        batch: the batch for all diagnoses, which is kept: see `rewire.diagnose`.
        matrices: log the whole matrices, too.
        options: for `rewire.diagnose`, such as ``loss`` and ``probes``.

    Raises:
        TypeError: ``log`` is neither.
        ValueError: a number of steps is below 1.

    Example:
        >>> logged = {}
        >>> monitor = rewire.Monitor(rewired, lambda values, step: logged.update(values), every=1)
        >>> monitor.step()
        >>> logged["rewire/blocks/weights/change"]
        0.0
    """

    def __init__(
        self,
        model: nn.Module,
        log: Any,
        every: int = 100,
        diagnose_every: int | None = None,
        batch: Any = None,
        matrices: bool = False,
        **options: Any,
    ) -> None:
        for name, steps in (("every", every), ("diagnose_every", diagnose_every)):
            if steps is not None and steps < 1:
                raise ValueError(f"{name}={steps}: it has to be 1 or more.")
        self.model, self.every, self.diagnose_every, self.batch = model, every, diagnose_every, batch
        self.matrices, self.options = matrices, options
        self.count = 0
        self._log = _logger(log)
        self._start = starts(connections(model))
        self._first = {name: matrix.clone() for name, matrix in self._coefficients().items()}
        self._last, self._logged = self._first, 0

    def step(self, number: int | None = None) -> None:
        """Count one training step, and log what is due; call it after each step of the optimiser.

        Args:
            number: of the step, from 1, if the caller counts itself (for example after resuming).
        """
        self.count = self.count + 1 if number is None else number
        values: Values = {}
        if self.count % self.every == 0:
            for trunk, matrix in self._coefficients().items():
                values |= _named(
                    f"{trunk}/weights", _statistics(matrix, self._first[trunk]) | self._moves(trunk, matrix)
                )
                values |= {f"rewire/{trunk}/weights/matrix": matrix.cpu()} if self.matrices else {}
                self._last = {**self._last, trunk: matrix}
            self._logged = self.count
        if self.diagnose_every is not None and self.count % self.diagnose_every == 0:
            for signals in diagnose(self.model, self.batch, **self.options).trunks:
                values |= _named(signals.name, _series(signals))
        if values:
            self._log(values, self.count)

    def callback(self) -> Any:
        """A ``transformers.TrainerCallback`` that calls `step` after each optimiser step, on the first process only.

        ``Trainer(.., callbacks=[monitor.callback()])``; the model is the one that the Trainer was given.

        Raises:
            ImportError: transformers is missing.
        """
        from transformers import TrainerCallback

        monitor = self

        class MonitorCallback(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.is_world_process_zero:
                    monitor.step(state.global_step)

        return MonitorCallback()

    def _moves(self, trunk: str, matrix: Tensor) -> dict[str, float]:
        """How far and how fast the weights of a trunk moved, and the norm of their gradient."""
        now = look(connections(self.model)[trunk], self._start[trunk], self.count)
        steps = max(1, self.count - self._logged)
        size = self._first[trunk].norm().clamp_min(torch.finfo(matrix.dtype).tiny)
        found = {"moved": now.moved, "speed": float((matrix - self._last[trunk]).norm() / size / steps)}
        return found if now.gradient is None else {**found, "gradient": now.gradient}

    def _coefficients(self) -> dict[str, Tensor]:
        return coefficients(self.model) if connections(self.model) else {}


def _named(prefix: str, values: Mapping[str, float | Tensor]) -> Values:
    return {f"rewire/{prefix}/{name}": value for name, value in values.items()}


def _statistics(matrix: Tensor, first: Tensor) -> dict[str, float]:
    """The series of a matrix [destination, source]."""
    matrix, first = matrix.double(), first.double()
    offset = matrix.shape[1] - matrix.shape[0]
    exists = matrix[(matrix != 0) | (first != 0)]  # with `units=` and `sources=` few of the matrix
    exists = exists if len(exists) else matrix.new_zeros(1)
    shares = matrix.abs() / matrix.abs().sum(1, keepdim=True).clamp_min(torch.finfo(matrix.dtype).tiny)
    newest = shares.diagonal(offset)  # the last existing source in each row
    return {
        "min": float(exists.min()),
        "max": float(exists.max()),
        "mean": float(exists.mean()),
        "input": float(shares[:, 0].mean()),
        "previous": float(newest.mean()),
        "sources": float(torch.special.entr(shares).sum(1).exp().mean()),
        "change": float((matrix - first).norm() / first.norm().clamp_min(torch.finfo(matrix.dtype).tiny)),
    }


def _series(trunk: TrunkSignals) -> dict[str, float]:
    """The series of a diagnosed trunk."""
    values = {
        "effective_depth": trunk.effective_depth,
        "gradient/input": trunk.input_gradient,
        "stream/output": trunk.output,
    }
    if trunk.chi is not None:
        values["chi"] = trunk.chi.value
    for number, site in enumerate(trunk.sites, start=1):
        name = f"{number:03d} {site.name.removeprefix(f'{trunk.name}.')}"
        for quantity in ("stream", "branch", "update", "cosine", "gradient", "weight_gradient"):
            value = getattr(site, quantity)
            values |= {} if value is None else {f"{quantity}/{name}": value}
    for number, block in enumerate(trunk.blocks, start=1):
        values[f"influence/{number:03d} {block.path.removeprefix(f'{trunk.name}.')}"] = block.influence
    return values


def _logger(log: Any) -> Log:
    if hasattr(log, "add_scalar"):
        return _Writer(log)
    if callable(log):
        return log
    raise TypeError(
        f"log is a {type(log).__name__}: it has to be a SummaryWriter, or a callable that takes a dict of values and "
        "the number of the step."
    )


class _Writer:
    """Writes floats as scalars and matrices as heatmaps."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def __call__(self, values: Values, step: int) -> None:
        for name, value in values.items():
            if isinstance(value, Tensor):
                self.writer.add_image(name, _picture(value), step, dataformats="HWC")
            else:
                self.writer.add_scalar(name, value, step)


def _picture(matrix: Tensor) -> Any:
    """A heatmap as pixels, uint8 [height, width, RGB]."""
    from matplotlib.image import imread

    file = io.BytesIO()
    plot_heatmap({"": matrix}, file)
    file.seek(0)
    return (255 * imread(file)[..., :3]).round().astype("uint8")
