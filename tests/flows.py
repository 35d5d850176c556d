"""Flows that are written by hand, operation by operation: what the finder sees, without a model that makes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rewire.passes.finding.flow import Flow, Op, Scope

SHAPE = (2, 3, 8)
#: The code of some function: a place in it is an expression.
CODE = (lambda: None).__code__


class Written:
    """Makes a flow; paths of modules stand for calls of them, each of which runs once."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.scopes: dict[str, Scope] = {"": Scope(None, "", code=CODE)}

    def scope(self, path: str) -> Scope:
        """The call of the module at a path, from within the call of the module around it."""
        if path not in self.scopes:
            self.scopes[path] = Scope(self.scope(path.rpartition(".")[0]), path, key=object())
        return self.scopes[path]

    def op(self, name: str, *inputs: Op, at: str = "", shape: tuple[int, ...] = SHAPE, **more: Any) -> Op:
        """An operation in the call of the module at a path."""
        made = Op(len(self.ops), name, inputs, self.scope(at), shape=torch.Size(shape), dtype=torch.float32, **more)
        self.ops.append(made)
        return made

    def linear(self, x: Op, at: str, shape: tuple[int, ...] = SHAPE) -> Op:
        return self.op("linear", x, at=at, shape=shape, matrices=1)

    def flow(self) -> Flow:
        return Flow(nn.Identity(), self.ops, outputs=self.ops[-1:])
