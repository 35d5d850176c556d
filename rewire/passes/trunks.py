"""Pass: find the blocks of a model, and link their residual adds into trunks.

Modules are visited from the root. One whose own forward holds residual adds is a block and is not entered further,
except where the stream runs through one of its children. Blocks in a row in a container, or called in a row by a
parent whose forward can be traced, belong to one trunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType

from torch import nn

from rewire.errors import TraceError
from rewire.passes.naming import branch_kind, branch_name, channels_of
from rewire.passes.residuals import Add, Chain, Found, Passage, find_chains, joins
from rewire.passes.values import STREAM_ATTRIBUTES, Values
from rewire.tracing import Leaf, PathTracer, Traced, child_calls_recorded, trace
from rewire.tracing.forwards import adds_values, parameters_of, plain_forward
from rewire.trunk import Report, Site, Trunk

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclasses.dataclass
class Block:
    """A module whose forward holds residual adds.

    Attributes:
        path: its path from the model's root.
        traced: its forward.
        found: the chains on each of its paths that has a graph.
        main: index of the path with the longest chain.
    """

    path: str
    traced: Traced
    found: list[Found | None]
    main: int

    @property
    def chains(self) -> list[Chain]:
        found = self.found[self.main]
        assert found is not None
        return found.chains


@dataclasses.dataclass(frozen=True)
class Step:
    """One residual add of a trunk: add number ``add`` of chain number ``chain`` of ``block``."""

    block: Block
    chain: int
    add: int
    site: Site


@dataclasses.dataclass
class Strand:
    """Residual adds in a row, with how the stream gets into the module that holds them, and out of it.

    Attributes:
        steps: the adds.
        passage: how the stream leaves that module, and how it enters it; None if it ends inside.
        opens: whether the stream enters that module from outside.
        home: path of the innermost module that holds all steps and is called once for all of them.
    """

    steps: list[Step]
    home: str
    passage: Passage | None = None
    opens: bool = False


@dataclasses.dataclass
class LinkedTrunk:
    """A trunk with the blocks behind it.

    Attributes:
        home: path of the innermost module that holds all steps and is called once for all of them.
    """

    trunk: Trunk
    steps: list[Step]
    home: str


class Finder:
    """Finds the trunks of one model.

    Args:
        model: the model; it is only read.
        forwards: functions to trace in place of the forward of modules of these classes.
        leaves: library attributes to replace while tracing.
    """

    def __init__(
        self,
        model: nn.Module,
        forwards: Mapping[type[nn.Module], FunctionType] | None = None,
        leaves: Sequence[Leaf] = (),
    ) -> None:
        self.model = model
        self.forwards = forwards or {}
        self.leaves = leaves
        self.skipped: dict[str, str] = {}
        self._strands: dict[int, list[Strand]] = {}
        self._running: list[PathTracer] | None = None
        self._joins: dict[type[nn.Module], bool] = {}

    def run(self) -> list[LinkedTrunk]:
        """All trunks of at least two residual adds, in the order of the model's modules."""
        trunks: list[LinkedTrunk] = []
        position = {path: number for number, (path, _) in enumerate(self.model.named_modules())}
        with child_calls_recorded() as self._running:
            strands = self.strands("", self.model)
        for strand in sorted(strands, key=lambda strand: position[strand.steps[0].site.block]):
            if len(strand.steps) == 1:
                site = strand.steps[0].site
                self.skipped.setdefault(site.name, "a single residual add: there is nothing to connect it with")
                continue
            names = {linked.trunk.name for linked in trunks}
            trunks.append(self._trunk(strand, names))
        return trunks

    def report(self, trunks: Sequence[LinkedTrunk]) -> Report:
        return Report(tuple(linked.trunk for linked in trunks), dict(self.skipped))

    # -- visiting ---------------------------------------------------------------------------------------------------

    def strands(self, path: str, module: nn.Module) -> list[Strand]:
        """Strands in ``module``; those of a module that stands at several places are found once."""
        if id(module) not in self._strands:
            self._strands[id(module)] = []  # a module that contains itself
            self._strands[id(module)] = self._visit(path, module)
        return self._strands[id(module)]

    def _visit(self, path: str, module: nn.Module) -> list[Strand]:
        if type(module).forward in (nn.Sequential.forward, nn.ModuleList.forward, nn.ModuleDict.forward):
            return _linked(path, list(self._children(path, module)))
        if not _has_own_forward(module) and type(module) not in self.forwards:
            return [strand for strands in self._children(path, module) for strand in strands]
        try:
            block = self._block(path, module)
        except TraceError as error:
            strands = [strand for below in self._children(path, module) for strand in below]
            cls: type = type(module)
            if not strands and adds_values(cls):
                self.skipped[path] = f"its forward cannot be traced: {error}"
            return strands
        return self._of_block(path, module, block)

    def _children(self, path: str, module: nn.Module) -> Iterator[list[Strand]]:
        for name, child in module._modules.items():
            if child is not None:
                yield self.strands(f"{path}.{name}" if path else name, child)

    def _block(self, path: str, module: nn.Module) -> Block:
        traced = trace(module, self._is_join, self.forwards.get(type(module)), self.leaves, self._running)
        wrappers = plain_forward(type(module))[1]

        def carries(child: str) -> list[Passage]:
            below = self.strands(f"{path}.{child}" if path else child, module.get_submodule(child))
            return [strand.passage for strand in below if strand.passage is not None]

        found = [None if p.graph is None else find_chains(p.graph, module, carries) for p in traced.paths]
        longest = [-1 if f is None else max((len(c.links) for c in f.chains), default=0) for f in found]
        block = Block(path, traced, found, longest.index(max(longest)))
        for chain in block.chains:
            reason = ""
            if chain.adds and self._holds_trunk(path, module, chain):
                reason = "a shortcut around a whole trunk"
            elif chain.adds and wrappers:
                reason = f"its forward is decorated (by {', '.join(wrappers)}), which a rewrite would lose"
            if reason:
                self.skipped[path] = reason
                raise TraceError(reason)
        return block

    def _holds_trunk(self, path: str, module: nn.Module, chain: Chain) -> bool:
        """Whether a branch of ``chain`` holds residual adds in a row of its own (a long skip around a body)."""
        values = Values(chain.entry.graph, module)
        for add in chain.adds:
            for branch in add.branches:
                for node in values.between(add.source, branch):
                    child = values.child(node)
                    if child is None or not any(len(m) > 1 for m in child.modules() if isinstance(m, CONTAINERS)):
                        continue
                    below = self.strands(f"{path}.{node.target}" if path else str(node.target), child)
                    if any(len(strand.steps) > 1 for strand in below):
                        return True
        return False

    def _is_join(self, child: nn.Module) -> bool:
        """Whether ``child`` is a helper that does the add of the block that calls it; found once per class."""
        cls = type(child)
        if cls not in self._joins:
            self._joins[cls] = False
            if _has_own_forward(child):
                try:
                    paths = trace(child, leaves=self.leaves, running=self._running).paths
                    self._joins[cls] = any(p.graph is not None and joins(p.graph, child) for p in paths)
                except TraceError:
                    pass
        return self._joins[cls]

    # -- blocks -----------------------------------------------------------------------------------------------------

    def _of_block(self, path: str, module: nn.Module, block: Block) -> list[Strand]:
        found = block.found[block.main]
        assert found is not None
        for name, reason in found.rejected:
            self.skipped[f"{path}.{name}" if path else name] = reason
        own = [chain for chain in block.chains if chain.adds]
        if not own:
            found.chains = [piece for chain in found.chains for piece in _handed_on(chain, module)]
        strands = []
        for number, chain in enumerate(block.chains):
            steps, home = list[Step](), path
            values = Values(chain.entry.graph, module)
            for link in chain.links:
                if isinstance(link, Add):
                    steps.append(Step(block, number, chain.adds.index(link), _site(path, values, link)))
                else:
                    child = module.get_submodule(str(link.node.target))
                    inner = next(strand for strand in self.strands("", child) if strand.passage == link.passage)
                    steps += inner.steps
                    home = inner.home
            home = home if len(chain.links) == 1 and not chain.adds else path
            strands.append(Strand(steps, home, _passage(block.traced, chain), chain.opens_outside))
        if own:
            return strands
        known = {id(step) for strand in strands for step in strand.steps}
        below = [strand for row in self._children(path, module) for strand in row]
        return strands + [_inner(s) for s in below if not any(id(step) in known for step in s.steps)]

    # -- trunks -----------------------------------------------------------------------------------------------------

    def _trunk(self, strand: Strand, taken: set[str]) -> LinkedTrunk:
        steps = strand.steps
        sites = tuple(step.site for step in steps)
        prefix, above = common_path(sites, lambda path: isinstance(self.model.get_submodule(path), CONTAINERS))
        name = ".".join(prefix) or type(self.model).__name__
        while name in taken:
            name += "'"
        # a unit is an element of the container, or one more call of the same
        keys = [_parts(site.name)[len(above) : len(above) + 1] for site in sites]
        units: list[int] = []
        seen: set[int] = set()
        for number, (step, key) in enumerate(zip(steps, keys, strict=True)):
            if number == 0 or key != keys[number - 1] or id(step) in seen:
                units.append(units[-1] + 1 if units else 1)
                seen = set()
            else:
                units.append(units[-1])
            seen.add(id(step))
        return LinkedTrunk(Trunk(name, sites, tuple(units), self._owner(strand)), steps, strand.home)

    def _owner(self, strand: Strand) -> str:
        """The nearest module at or above the trunk's home that is no container; else the first block."""
        path = strand.home
        while isinstance(self.model.get_submodule(path), CONTAINERS):
            if not path:
                return strand.steps[0].site.block
            path = path.rpartition(".")[0]
        return path


def common_path(sites: Sequence[Site], is_container: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """The parts that all names of ``sites`` begin with, and the path of the container whose elements are the units."""
    prefix = common([_parts(site.name) for site in sites])
    in_one_element = prefix and prefix[-1].isdecimal() and not is_container(".".join(prefix))
    return prefix, prefix[:-1] if in_one_element else prefix


def _linked(home: str, rows: Sequence[list[Strand]]) -> list[Strand]:
    """Strands of a container's children, those in a row joined where the stream runs from one to the next."""
    strands: list[Strand] = []
    tail: Strand | None = None  # the strand that leaves the previous child
    for number, row in enumerate(rows):
        heads = [strand for strand in row if strand.opens]
        tails = [strand for strand in row if strand.passage is not None]
        joined: Strand | None = None
        if tail is not None and tail.passage is not None and len(heads) == 1:
            head = heads[0]
            passage = None
            if head.passage is not None:
                passage = dataclasses.replace(tail.passage, element=head.passage.element)
            joined = Strand(tail.steps + head.steps, home, passage, tail.opens)
            strands[-1] = joined
            row = [strand for strand in row if strand is not head]
            tails = [strand for strand in tails if strand is not head]
        elif strands:
            strands[-1] = _inner(strands[-1])
        strands += [strand if number == 0 else _begins_inside(strand) for strand in row]
        if len(tails) == 1:  # the one that leaves comes last
            strands.append(strands.pop(next(i for i, s in enumerate(strands) if s.steps is tails[0].steps)))
        tail = strands[-1] if strands and (tails or (joined is not None and joined.passage)) else None
        if tail is None and strands:
            strands[-1] = _inner(strands[-1])
    return strands


def _inner(strand: Strand) -> Strand:
    """The strand as seen from further out: it ends inside."""
    return Strand(strand.steps, strand.home)


def _begins_inside(strand: Strand) -> Strand:
    passage = strand.passage and dataclasses.replace(strand.passage, argument=None)
    return Strand(strand.steps, strand.home, passage)


def _handed_on(chain: Chain, module: nn.Module) -> list[Chain]:
    """A chain of children only, cut where ``module`` does more with the stream than hand it from child to child.

    Its forward is not rewritten, and what it uses between its children has to be a tensor.
    """
    values = Values(chain.entry.graph, module)
    pieces, start = [], 0
    for number, (link, following) in enumerate(zip(chain.links[:-1], chain.links[1:], strict=True), 1):
        others = [user for user in link.state.users if user is not following.node and not values.transparent(user)]
        if all(user.target is getattr and user.args[1] in STREAM_ATTRIBUTES for user in others):
            continue
        piece = dataclasses.replace(chain, links=chain.links[start:number], exit=link.state, closes_outside=False)
        pieces.append(piece if start == 0 else dataclasses.replace(piece, opens_outside=False))
        start = number
    last = dataclasses.replace(chain, links=chain.links[start:])
    return [*pieces, last if start == 0 else dataclasses.replace(last, opens_outside=False)]


def _passage(traced: Traced, chain: Chain) -> Passage | None:
    if not chain.closes_outside:
        return None
    names = [parameter.name for parameter in parameters_of(traced.function)]
    argument = str(chain.entry.target) if chain.opens_outside else None
    return Passage(argument, names.index(argument) if argument in names else 0, chain.element)


def _site(path: str, values: Values, add: Add) -> Site:
    branch = branch_name(values, add.source, add.branches)
    name = f"{path}.{branch}" if path else branch
    kind = branch_kind(values, add.source, add.branches)
    post = tuple(str(node.target) if node.op == "call_module" else node.name for node in add.post)
    return Site(name, path, branch, kind, post, *channels_of(values, add.shortcut, add.post))


def _has_own_forward(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("torch.nn.") and type(module).forward is not nn.Module.forward


def common(paths: list[list[str]]) -> list[str]:
    """The longest list that all ``paths`` begin with."""
    shortest = min(paths, key=len)
    differ = (n for n, part in enumerate(shortest) if any(path[n] != part for path in paths))
    return shortest[: next(differ, len(shortest))]


def _parts(path: str) -> list[str]:
    return path.split(".") if path else []
