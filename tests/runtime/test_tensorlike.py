from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rewire.errors import OutOfOrder
from rewire.runtime.tensorlike import TensorLike


class Held(TensorLike):
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def value(self) -> Tensor:
        return self.tensor

    def written_to(self, how: str) -> OutOfOrder:
        return OutOfOrder(how)


X = torch.arange(6.0).view(2, 3)


def test_it_reads_as_its_value() -> None:
    held = Held(X)
    for got, want in [
        (torch.stack([held, held]), torch.stack([X, X])),
        (nn.functional.relu(held), X),
        (held.mean(-1), X.mean(-1)),
        (2 * held - held @ X.T.new_ones(3, 3), 2 * X - X @ torch.ones(3, 3)),
        (held[0], X[0]),
        (-held > held, -X > X),
    ]:
        assert type(got) is Tensor and torch.equal(got, want)
    assert len(held) == 2 and len(list(held)) == 2 and held.ndim == 2
    assert hash(held) == hash(held) and {held: 1}[held] == 1


def test_it_cannot_be_written_to() -> None:
    held = Held(X.clone())
    with pytest.raises(OutOfOrder, match="add_"):
        held.add_(1)
    with pytest.raises(OutOfOrder, match="an assignment to its elements"):
        held[0] = 0
    with pytest.raises(OutOfOrder, match="relu"):
        nn.functional.relu(held, inplace=True)
    with pytest.raises(OutOfOrder, match="add"):
        torch.add(X, held, out=held)
    for function in (torch.relu_, nn.functional.elu_, nn.init.zeros_):
        with pytest.raises(OutOfOrder, match=r"_$"):
            function(held)
    assert torch.equal(held.tensor, X)


def test_torch_compile_follows_it() -> None:
    def read(x: Tensor) -> Tensor:
        return nn.functional.linear(Held(x), x.mT) + torch.stack([x, Held(x)]).sum()  # type: ignore[arg-type]

    def write(x: Tensor) -> Tensor:
        return torch.relu_(Held(x))  # type: ignore[arg-type]

    x = X[:, :2]
    assert torch.equal(torch.compile(read, backend="eager", fullgraph=True)(x), read(x))
    with pytest.raises(OutOfOrder, match="relu_"):
        torch.compile(write, backend="eager")(x)
