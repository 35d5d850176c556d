"""Finder: the trunks of a model, from its flows."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Literal, TypeAlias

import torch
from torch import Tensor, fx, nn

from rewire.code.functions import define
from rewire.code.text import written_at
from rewire.console import progress
from rewire.copies import noting_writes, own_inputs, private, seeded
from rewire.errors import BadExampleInputs, NoResidualAdds, RewireError
from rewire.logs import find as log
from rewire.passes.checks import on_meta
from rewire.passes.finding.adds import SELECTIONS, Add, is_view
from rewire.passes.finding.chains import Chain, chains, loops_in
from rewire.passes.finding.channels import are_turned, channels_of
from rewire.passes.finding.cuts import why_cut
from rewire.passes.finding.flow import Flow, Op, reached
from rewire.passes.finding.follow import follow
from rewire.passes.finding.frames import of_library
from rewire.passes.finding.names import named
from rewire.passes.finding.projections import kind_by_use
from rewire.passes.finding.record import record
from rewire.passes.prepare import Prepared
from rewire.patterns import Pattern
from rewire.torch_internals import CHILDREN, backward_hooks, module_at, pytree
from rewire.trunk import LeftAlone, Report, Site, Trunk, told

_SHOWN = 12  # lines of reasons in an error message
_CHILDREN = frozenset({"children", "named_children", CHILDREN})
#: Names in code that asks whether gradients are recorded.
_ASKS = frozenset({"is_grad_enabled", "is_inference_mode_enabled", "is_inference", "requires_grad"})
NOT_RUN = (
    "it did not run, although the blocks beside it did: it is not connected, and running it in the middle of the "
    "trunk is refused"
)
NONE_RAN = (
    "its blocks, of a class that is connected elsewhere, did not run with the example inputs: they are not connected, "
    "and compute what those of the plain model do"
)
TRAINING_ONLY = "it is a residual stream in training mode only: streams of evaluation mode are connected"
SINGLE = "a single residual add: there is nothing to connect it with"
BESIDE = (
    "adds what is not computed from the state that it adds to: it changes the state between two residual adds, as in "
    "the plain model, and is none itself"
)
PART = "adds to a part of the state (`x[:, 1:] + f`), which goes on alone: states of one trunk need one shape"


@dataclasses.dataclass
class Finding:
    """The result of the search in one flow.

    Attributes:
        flow: what was recorded or traced.
        trunks: by name.
        chains: the residual adds of each trunk, by the trunk's name.
        left: adds and trunks that were left alone, and why.
        again: further chains through the code of a trunk, as in a model that encodes two inputs.
        dropped: names of adds that a run in training mode left out.
        gone: chains of trunks that were left alone.
    """

    flow: Flow
    trunks: dict[str, Trunk]
    chains: dict[str, Chain]
    left: list[LeftAlone]
    again: list[Chain] = dataclasses.field(default_factory=list)
    dropped: set[str] = dataclasses.field(default_factory=set)
    gone: list[Chain] = dataclasses.field(default_factory=list)

    @property
    def report(self) -> Report:
        trunks = tuple(self.trunks.values())
        dropped = dict.fromkeys(s.name for trunk in trunks for s in trunk.sites if s.name in self.dropped)
        return Report(trunks, tuple(self.left), tuple(dropped))

    @property
    def adds(self) -> int:
        """Number of residual adds that can be connected."""
        return sum(len(chain.adds) for chain in self.chains.values())

    def passes(self, name: str) -> list[Chain]:
        """All chains that run through the code of a trunk, in order."""
        chain = self.chains.get(name)
        return [] if chain is None else [chain, *(other for other in self.again if _same_code(other, chain))]

    def leave(self, name: str, why: str, place: str = "", written: str = "") -> None:
        """Leave a trunk alone."""
        self.gone.append(self.chains.pop(name))
        del self.trunks[name]
        self.left.append(LeftAlone(name, why, place, written))


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of the search in a model.

    Attributes:
        evaluation: from a run in evaluation mode, or from a trace. Its trunks are the model's.
        training: from a run in training mode, if there was one.
        inference: from a run in evaluation mode without gradients, if the model makes its adds elsewhere in it.
    """

    evaluation: Finding
    training: Finding | None = None
    inference: Finding | None = None

    @property
    def findings(self) -> list[Finding]:
        return [finding for finding in (self.evaluation, self.training, self.inference) if finding is not None]

    @property
    def trunks(self) -> dict[str, Trunk]:
        return self.evaluation.trunks

    @property
    def report(self) -> Report:
        return self.evaluation.report

    def leave(self, name: str, why: str) -> None:
        """Leave a trunk alone."""
        place = written_at(self.evaluation.chains[name].adds[0].op.place)
        for finding in self.findings:
            if name in finding.trunks:
                finding.leave(name, why, *place)

    def drop(self, sites: Iterable[Site]) -> None:
        """Note that a run in training mode left out these adds."""
        self.evaluation.dropped |= {site.name for site in sites}


#: How to get the flow of a model: see `find`.
Method: TypeAlias = Literal["run", "meta", "trace"]


def find(prepared: Prepared, method: Method | None = None, restart: bool = False) -> Found:
    """Find the trunks of a model, which is not changed.

    Args:
        prepared: the model. Without inputs it is traced.
        method: ``"run"``: run copies in evaluation and in training mode. ``"meta"``: run them on the meta device, where
            nothing is computed; run them for real only if that fails. ``"trace"``: trace the model; if the trace is not
            conclusive, run copies as for ``"meta"``. None: ``"run"`` if the caller passed inputs, else ``"trace"``.
        restart: see `chains`.

    Raises:
        BadExampleInputs: the model does not run on the inputs.
    """
    with progress(f"looking at {prepared.name}"):
        return _find(prepared, method or ("run" if prepared.given else "trace"), restart)


def _find(prepared: Prepared, method: Method, restart: bool) -> Found:
    has_inputs = prepared.inputs is not None
    if has_inputs and method == "run" and not on_meta(prepared.model):
        return _recorded(prepared, restart=restart)
    if has_inputs and method != "trace":
        recorded = _recorded_cheaply(prepared, restart)
        if recorded:
            return recorded
    finding = finding_in(follow(prepared.model, prepared.forwards), prepared.patterns, restart)
    if prepared.given:  # the caller has passed inputs: do not advise it
        finding.left = [dataclasses.replace(left, remedy="") for left in finding.left]
    log.info("%s was traced", prepared.name)
    mixed = any(len(trunk.widths) > 1 for trunk in finding.trunks.values())
    if not has_inputs or (finding.trunks and not finding.flow.unread and not mixed):
        return Found(finding)
    log.info("the trace of %s is not conclusive: it is run, too", prepared.name)
    recorded = _recorded_cheaply(prepared, restart)
    certain = recorded is not None and (mixed or recorded.evaluation.adds >= finding.adds)
    return recorded if recorded is not None and certain else Found(finding)


def _recorded_cheaply(prepared: Prepared, restart: bool) -> Found | None:
    """Search runs on the meta device; if they leave doubts and the model has values, real runs. None if all fail."""
    found = None
    for device in ("meta",) if on_meta(prepared.model) else ("meta", None):
        try:
            found = _recorded(prepared, device, restart)
        except BadExampleInputs as error:
            if prepared.given and device is None:  # a real run, on the caller's inputs
                raise
            log.info("%s", error)
        if found and found.trunks and not any(finding.flow.guessed for finding in found.findings):
            break
    return found


def check_found(found: Found, prepared: Prepared) -> None:
    """Refuse a model in which there is nothing to rewire.

    Raises:
        NoResidualAdds: with the adds that were left alone, and why.
    """
    if not found.trunks:
        raise NoResidualAdds(_nothing_found(prepared, found.report, found.evaluation.flow))


def _nothing_found(prepared: Prepared, report: Report, flow: Flow) -> str:
    """The error message: each add that was left alone, and why."""
    name, rows = prepared.name, told(report.left)
    if not rows:
        sums = [f"\n  `{written}`{f' ({place})' if place else ''}" for place, written in _sums_of_branches(flow)]
        seen = f" Its sums, none of which is one:{''.join(sums[:_SHOWN])}" if sums else ""
        return (
            f"no residual stream was found in {name}: nothing in its forwards adds to a whole value what is computed "
            "from that same value through weights."
            f"{'' if prepared.given else ' If only a run shows that, pass example_inputs.'}"
            f"{f' Something hides what it does: {flow.unseen}.' if flow.unseen else ''}{seen}"
        )
    lines = [f"\n  {path}: {why}{f' ({place})' if place else ''}" for path, why, place in rows[:_SHOWN]]
    more = f"\n  ... and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return (
        f"no residual stream of two adds or more was found in {name}. Left alone:{''.join(lines)}{more}\nAn add is "
        "connected where the value that it makes is the shortcut of the next one; weights on the way, other than a "
        "norm's, end the stream."
    )


def _sums_of_branches(flow: Flow) -> list[tuple[str, str]]:
    """Where tensors of one shape are added of which one, at least, is computed through weights, and how."""
    weighted: set[Op] = set()
    found: dict[tuple[str, str], None] = {}
    for op in flow:
        if op.weighted or not weighted.isdisjoint(op.inputs):
            weighted.add(op)
        same = len(op.inputs) == 2 and op.name == "add" and all(each.shape == op.shape for each in op.inputs)
        if same and op.place is not None and not weighted.isdisjoint(op.inputs):
            found[written_at(op.place)] = None
    return list(found)


def _recorded(prepared: Prepared, device: str | None = None, restart: bool = False) -> Found:
    """Search a run in evaluation mode and one in training mode."""
    assert prepared.inputs is not None
    findings, cut = list[Finding](), dict[str, str]()
    for training in (False, True):
        try:
            flow = _flow(prepared, device, training)
            if (flow.strange or flow.unseen) and not all(weight.requires_grad for weight in flow.model.parameters()):
                with contextlib.suppress(Exception):  # not everything has gradients
                    flow = _flow(prepared, device, training, unfrozen=True)
        except RewireError:
            raise
        except Exception as error:
            if training and (device is None or on_meta(prepared.model)):  # otherwise a real run may work
                log.info("%s does not run in training mode: %s", prepared.name, error)
                break
            raise BadExampleInputs(
                f"{prepared.name} does not run on {_inputs_in_words(prepared)}: {type(error).__name__}: {error}"
            ) from error
        with seeded(0, flow.model):
            finding = finding_in(flow, prepared.patterns, restart)
            passes = [(name, chain) for name in finding.chains for chain in finding.passes(name)]
            reasons = [(name, why_cut(flow, chain.adds)) for name, chain in passes]
        findings.append(finding)
        cut |= {name: reason for name, reason in reasons if reason}
        flow.tensors = []
    modes = "evaluation and training mode" if len(findings) > 1 else "evaluation mode"
    log.info("%s was run in %s%s", prepared.name, modes, " on the meta device" if device else "")
    for finding, (name, reason) in itertools.product(findings, cut.items()):
        if name in finding.trunks:
            finding.leave(name, reason)
    found = Found(*findings)
    if found.training is not None:
        found.evaluation.left += _match_names(found.evaluation, found.training)
        _agree(found.evaluation, found.training)
        for name, trunk in found.training.trunks.items():
            ran = collections.Counter(site.name for site in trunk.sites)
            found.drop(site for site in found.trunks[name].sites if not _take_one(ran, site.name))
    if any(_asks_for_gradients(finding.flow) for finding in findings):
        found = dataclasses.replace(found, inference=_in_inference(prepared, found.evaluation, device, restart))
    flows = [finding.flow for finding in findings]
    guesses = dict.fromkeys(flow.guessed for flow in flows if flow.guessed)
    found.evaluation.left += guesses
    if on_meta(prepared.model):
        for guess in guesses:
            log.warning("%s, %s: %s", prepared.name, guess.place, guess.why)
    paths = {call.path for flow in flows for call in flow.calls if not call.helper}
    for trunk in found.trunks.values():  # of a block that another method ran, the children did
        missed = [path for path in not_run(flows, trunk) if not any(child.startswith(f"{path}.") for child in paths)]
        found.evaluation.left += [LeftAlone(path, NOT_RUN) for path in missed]
    found.evaluation.left += [LeftAlone(path, NONE_RAN) for path in _never_run(flows[0].model, found.trunks, paths)]
    return found


def _asks_for_gradients(flow: Flow) -> bool:
    """Whether code of the model asks if gradients are recorded, and may take another way without."""
    codes = {call.code for call in flow.calls if call.code is not None} | {op.place[0] for op in flow if op.place}
    return any(not _ASKS.isdisjoint(code.co_names) for code in codes if not of_library(code))


def _in_inference(prepared: Prepared, evaluation: Finding, device: str | None, restart: bool) -> Finding | None:
    """Search a run in evaluation mode without gradients; None if the adds of the run with gradients are made in it."""
    try:
        flow = _flow(prepared, device, training=False, gradients=False)
    except RewireError:
        raise
    except Exception as error:
        log.info("%s does not run without gradients: %s", prepared.name, error)
        return None
    chains = [chain for name in evaluation.chains for chain in evaluation.passes(name)]
    adds = [op for chain in chains for add in chain.adds for op in (add.op, *add.inner)]
    made, ran = (collections.Counter((op.scope.path, op.place) for op in ops) for ops in (adds, flow))
    if made <= ran:
        return None
    with seeded(0, flow.model):
        finding = finding_in(flow, prepared.patterns, restart)
    flow.tensors = []
    _match_names(evaluation, finding)
    return finding


def _flow(
    prepared: Prepared, device: str | None, training: bool, unfrozen: bool = False, gradients: bool = True
) -> Flow:
    """Record a run of a copy.

    Args:
        prepared, device, training: the model; where, and in which mode it runs.
        unfrozen: with gradients of all weights, which show what hidden code has read.
        gradients: whether autograd records them.
    """
    assert prepared.inputs is not None
    looked_at = private(prepared.model, device)
    for module in looked_at.modules():
        for hooks in backward_hooks(module):
            hooks.clear()  # for modules with such hooks, torch inserts views that are not the model's
        if type(module) in prepared.forwards:
            define(module, prepared.forwards[type(module)])
    looked_at.train(training)
    frozen = [weight for weight in looked_at.parameters() if not weight.requires_grad and unfrozen]
    differentiable = [weight for weight in frozen if weight.is_floating_point() or weight.is_complex()]
    for weight in differentiable:
        weight.requires_grad_()
    noting = noting_writes(prepared.model, looked_at)
    with seeded(0, looked_at), torch.set_grad_enabled(gradients), noting:
        flow = record(looked_at, own_inputs(prepared.inputs, device))
    for weight in differentiable:
        weight.requires_grad_(False)
    return flow


def not_run(flows: Sequence[Flow], trunk: Trunk) -> list[str]:
    """Paths of the siblings of a trunk's blocks that have the same class but did not run."""
    ran = {call.path for flow in flows for call in flow.calls if not call.helper}
    blocks, missed = {site.block for site in trunk.sites if site.block}, list[str]()
    for above in dict.fromkeys(block.rpartition(".")[0] for block in blocks):
        beside = {
            ".".join(filter(None, (above, name))): m for name, m in flows[0].model.get_submodule(above).named_children()
        }
        kinds = {type(child) for path, child in beside.items() if path in blocks}
        missed += [path for path, child in beside.items() if type(child) in kinds and path not in ran]
    return missed


def _never_run(model: nn.Module, trunks: Mapping[str, Trunk], ran: Set[str]) -> list[str]:
    """Paths of modules with several blocks of connected classes, none of which ran: an encoder that had no input."""
    blocks = [model.get_submodule(site.block) for trunk in trunks.values() for site in trunk.sites if site.block]
    kinds = {type(block) for block in blocks if not type(block).__module__.startswith("torch.nn.")}
    found: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        if type(module) in kinds:
            found.setdefault(path.rpartition(".")[0], []).append(path)
    inside = {path.rpartition(".")[0] for path in ran}
    return [above for above, paths in found.items() if len(paths) > 1 and {*paths}.isdisjoint(ran | inside)]


def _inputs_in_words(prepared: Prepared) -> str:
    """The example inputs in words, and whether some that the caller passed are not contiguous."""
    if not prepared.given:
        return "the inputs that the pattern registry makes for it (pass example_inputs that it takes)"
    spread = any(isinstance(t, Tensor) and not t.is_contiguous() for t in pytree.tree_leaves(prepared.inputs))
    return f"the example inputs{', of which some are not contiguous in memory' * spread}"


def _match_names(evaluation: Finding, other: Finding) -> list[LeftAlone]:
    """Name the trunks of another run like those of evaluation mode that have the same blocks.

    Blocks may be left out by chance in training.

    Returns:
        The trunks without a counterpart in evaluation mode, which are left alone.
    """
    trunks, chains, left = other.trunks, other.chains, list[LeftAlone]()
    other.trunks, other.chains = {}, {}
    blocks = {name: collections.Counter(s.block for s in trunk.sites) for name, trunk in evaluation.trunks.items()}
    for own, trunk in sorted(trunks.items(), key=lambda item: -len(item[1].sites)):
        mine = collections.Counter(site.block for site in trunk.sites)
        free = [name for name in blocks if name not in other.trunks and mine <= blocks[name]]
        alike = {name: _overlap(trunk, evaluation.trunks[name]) for name in free}  # of streams through the same blocks
        name = min(free, key=lambda name: (blocks[name].total(), -alike[name]), default=None)
        if name is None:
            place = written_at(chains[own].adds[0].op.place)
            left.append(LeftAlone(own, TRAINING_ONLY, *place))
            continue
        other.trunks[name], other.chains[name] = dataclasses.replace(trunk, name=name), chains[own]
    return left


def _take_one(counts: collections.Counter[str], name: str) -> bool:
    """Take one occurrence of a name; whether there was one left."""
    counts[name] -= 1
    return counts[name] >= 0


def _overlap(one: Trunk, other: Trunk) -> int:
    """How many residual adds of two trunks have the same name."""
    return len({site.name for site in one.sites} & {site.name for site in other.sites})


def _agree(evaluation: Finding, training: Finding) -> None:
    """Let both modes agree on ``post``: operations that follow an add in one mode count in the other, too."""
    for name in evaluation.trunks.keys() & training.trunks.keys():
        one, other = evaluation.trunks[name], training.trunks[name]
        sites = list(zip(one.sites, other.sites, strict=False))
        if len(one.sites) != len(other.sites):
            continue
        posts = [mine.post or yours.post for mine, yours in sites]
        affine = [all(site.affine for site in both if site.post) for both in sites]
        if bool(sites[-1][0].post) != bool(sites[-1][1].post):  # after the last add, they may not be the stream's
            posts[-1] = ()
            for finding in (evaluation, training):
                finding.chains[name].adds[-1].post = []
        agreed = [
            dataclasses.replace(
                mine,
                post=post,
                affine=bool(post) and scales,
                in_place=mine.in_place or yours.in_place,
                overwritten=mine.overwritten and yours.overwritten,  # False where a mode has no operations there
                read_later=tuple(sorted({*mine.read_later, *yours.read_later})),
            )
            for (mine, yours), post, scales in zip(sites, posts, affine, strict=True)
        ]
        evaluation.trunks[name] = dataclasses.replace(one, sites=tuple(agreed))


def finding_in(flow: Flow, patterns: Sequence[Pattern] = (), restart: bool = False) -> Finding:
    """All residual streams of at least two adds, in the order of the model's modules. ``restart``: see `chains`."""
    log.debug("the graph:\n%s", flow)
    linked, rejected = chains(flow, restart)
    left = list(flow.unread.values())
    sums = {add.op for chain in linked for add in chain.adds}
    made = {op for chain in linked for add in chain.adds for op in add.post}  # `l x + m x_0` makes a state
    aside = {add: why for add, why in rejected.items() if add.op not in made or sums.isdisjoint(add.region)}
    left += [LeftAlone(_site(flow, add).name, why, *written_at(add.op.place)) for add, why in aside.items()]
    said = {written_at(add.op.place) for add in aside}
    beside = [(path, written_at(op.place)) for chain in linked for op, path in _beside(chain)]
    left += [LeftAlone(path, BESIDE, *place) for path, place in beside if place not in said]
    left += [LeftAlone(path, PART, *written_at(op.place)) for op, path in _of_parts(flow, linked)]
    position = {path: number for number, (path, _) in enumerate(flow.model.named_modules())}
    rows: list[tuple[Chain, list[Site]]] = []
    for chain in linked:
        sites = _with_one_channel_dim(chain, [_site(flow, add, patterns) for add in chain.adds])
        for number, (add, behind) in enumerate(itertools.pairwise(chain.adds)):
            sites[number] = dataclasses.replace(sites[number], overwritten=overwritten(flow, add.post, behind))
        for number in range(len(sites)):
            sites[number] = dataclasses.replace(sites[number], read_later=_read_later(flow, chain, number))
        if len(sites) == 1:
            left.append(LeftAlone(sites[0].name, SINGLE, *written_at(chain.adds[0].op.place)))
        else:
            rows.append((chain, sites))
    found = Finding(flow, {}, {}, left)
    for chain, sites in sorted(rows, key=lambda row: position.get(row[1][0].block, 0)):
        same = (name for name, known in found.trunks.items() if _unkind(known.sites) == _unkind(sites))
        if any(_same_code(chain, found.chains[name]) for name in same):
            found.again.append(chain)
            continue
        trunk = _trunk(flow, chain, sites, found.trunks)
        found.trunks[trunk.name], found.chains[trunk.name] = trunk, chain
    return found


def _unkind(sites: Iterable[Site]) -> list[Site]:
    """Sites without their kinds: one call of an attention may get keys and values from elsewhere."""
    return [dataclasses.replace(site, kind="") for site in sites]


def _beside(chain: Chain) -> Iterator[tuple[Op, str]]:
    """Sums between a chain's adds with a branch of something else than the state, and that branch's module."""
    for add in chain.adds:
        ours = {add.op, *add.post}
        for op in add.post:
            branch = next((source for source in op.inputs if source not in ours and not source.constant), None)
            if op.name != "add" or branch is None or not branch.shape == op.shape == add.op.shape:
                continue
            made = [each for each in reached([branch], lambda each: each.inputs) if each.index > add.op.index]
            weighted = [each for each in made if each.weighted and ours.isdisjoint(each.inputs)]
            if weighted:
                yield op, _branch_path(op, max(weighted, key=lambda each: each.index))


def _of_parts(flow: Flow, linked: Sequence[Chain]) -> Iterator[tuple[Op, str]]:
    """Sums of a part of a chain's state and a branch of that state, and that branch's module."""
    states = {op for chain in linked for op in (chain.entry, *(add.result for add in chain.adds))}
    own = {op for chain in linked for add in chain.adds for op in (add.op, *add.inner, *add.post)}
    sums = [op for op in flow if op.name == "add" and len(op.inputs) == 2 and op not in own]
    for added, (shortcut, branch) in ((op, pair) for op in sums for pair in itertools.permutations(op.inputs)):
        state = shortcut
        while state not in states and (state.name in SELECTIONS or is_view(state)) and state.inputs:
            state = state.inputs[0]
        if state not in states or state.shape == shortcut.shape:
            continue
        made = _made_since(state, branch)
        weighted = [each for each in made if each.weighted and each is not state]
        if state in made and weighted:
            yield added, _branch_path(added, max(weighted, key=lambda each: each.index))


def _made_since(state: Op, branch: Op) -> set[Op]:
    """What a branch was made of, from the operation ``state`` on."""
    return reached([branch], lambda each: [source for source in each.inputs if source.index >= state.index])


def _branch_path(op: Op, inner: Op) -> str:
    """Path of the module below that of ``op`` in which ``inner`` runs, or of its own."""
    depth = len(op.scope.modules())
    around = inner.scope.modules()
    return around[depth].path if len(around) > depth and op.scope.holds(inner.scope) else inner.scope.path


def _same_code(chain: Chain, other: Chain) -> bool:
    """Whether the adds of both are the same expressions in the same modules; False if that is not known."""
    one, two = ([(add.op.scope.path, add.op.scope.code, add.op.place) for add in c.adds] for c in (chain, other))
    return one == two and all(place is not None for _, _, place in one)


def residual_sites(flow: Flow, patterns: Sequence[Pattern] = ()) -> list[tuple[Add, Site]]:
    """All residual adds of a flow in order, single ones included."""
    adds = [add for chain in chains(flow)[0] for add in chain.adds]
    return [(add, _site(flow, add, patterns)) for add in sorted(adds, key=lambda add: add.op.index)]


def _with_one_channel_dim(chain: Chain, sites: list[Site]) -> list[Site]:
    """If the sites disagree about the channels, the sites with what most of them say.

    States of the same shape have the same channel dimension: one that a site names, else (of a turned state) one of the
    stream's width. Across shapes, it is counted from the end, or from the front where they agree only so. If shapes are
    unknown, the sites are returned unchanged.
    """
    shapes = [add.shape for add in chain.adds]
    if len({(site.width, site.channel_dim) for site in sites if site.width}) < 2 or None in shapes:
        return sites
    widths = [site.width for site in sites if site.width]
    width = max(widths, key=widths.count)
    agreed = []
    for site, shape in zip(sites, shapes, strict=True):
        alike = [s.channel_dim for s, other in zip(sites, shapes, strict=True) if s.width and other == shape]
        said = sorted(alike, key=alike.count, reverse=True) or [site.channel_dim]
        others = range(-len(shape), 0)  # type: ignore[arg-type]
        dim = next((dim for dim in (*said, *others) if shape[dim] == width), said[0])  # type: ignore[index]
        agreed.append(dataclasses.replace(site, width=int(shape[dim]), channel_dim=dim))  # type: ignore[index]
    for count in (_from_the_end, _from_the_front):
        dims = {count(site.channel_dim, len(shape)) for site, shape in zip(agreed, shapes, strict=True)}  # type: ignore[arg-type]
        if len(dims) == 1:
            return [dataclasses.replace(site, channel_dim=next(iter(dims))) for site in agreed]
    return agreed


def _from_the_end(dim: int, of: int) -> int:
    return dim % of - of


def _from_the_front(dim: int, of: int) -> int:
    return dim % of


def _site(flow: Flow, add: Add, patterns: Sequence[Pattern] = ()) -> Site:
    scopes = add.block()
    block = scopes[-1].path
    branch, kind = named(add)
    beside = module_at(flow.model, f"{block}.{branch}") is None and module_at(flow.model, branch) is not None
    name = branch if beside or not block else f"{block}.{branch}"
    post = tuple(dict.fromkeys(_called_in(op, block, len(scopes)) for op in add.post))
    in_place = not flow.held.keys().isdisjoint(add.post)
    site = Site(name, block, branch, kind, post, *channels_of(flow, add), add.affine, in_place)
    for pattern in reversed(patterns):
        site = dataclasses.replace(site, kind=pattern.kind(site))
    return dataclasses.replace(site, kind=kind_by_use(flow, site, patterns, add))


def overwritten(flow: Flow, made: Collection[Op], add: Add) -> bool:
    """Whether an add overwrites in place what the operations ``made`` have computed."""
    writes = any(op in flow.held for op in (add.op, *add.op.inputs) if op.place == add.op.place)
    return writes and add.shortcut in made and add.op.inputs[0] is add.shortcut


def _read_later(flow: Flow, chain: Chain, number: int) -> tuple[int, ...]:
    """The residual adds before one that writes in place whose shortcuts variables hold that are read later."""
    add = chain.adds[number]
    writes = [op for op in (add.op, *add.op.inputs) if op.place == add.op.place and op in flow.held]
    found = set[Op]().union(*(flow.read_later.get(op, ()) for op in writes))
    return tuple(n for n, before in enumerate(chain.adds[:number]) if before.shortcut in found)


def _called_in(op: Op, block: str, depth: int) -> str:
    """Path, below the block, of the innermost module that ``op`` runs in; if that is the block, the name of ``op``."""
    path = op.scope.path.removeprefix(block).lstrip(".")
    return path if len(op.scope.modules()) > depth and path else op.name


def _trunk(flow: Flow, chain: Chain, sites: Sequence[Site], taken: Collection[str]) -> Trunk:
    prefix, above = common_path(sites, flow)
    root = "trunk" if isinstance(flow.model, fx.GraphModule) else type(flow.model).__name__
    name = ".".join(prefix) or root
    while name in taken:
        name += "'"
    units, owner = _units(flow, chain, sites, above), _owner(flow, chain, sites)
    return Trunk(name, tuple(sites), units, owner, loops_in(chain.adds), are_turned(chain.adds, chain.passages, sites))


def _units(flow: Flow, chain: Chain, sites: Sequence[Site], above: Sequence[str]) -> tuple[int, ...]:
    """The unit of each add: each element of the container is a unit, and so is each further call of the same element.

    Args:
        flow: the operations that ran.
        chain: the residual adds.
        sites: the description of each add.
        above: the parts of the container's path.
    """
    units: list[int] = []
    before: object = None
    seen: set[object] = set()
    for add, site, path in zip(chain.adds, sites, _elements(flow, chain, sites, above), strict=True):
        call = next((scope for scope in add.block() if len(path) > len(above) and parts(scope.path) == path), None)
        again = (site.name, add.op.scope.code, add.op.place)
        if not units or (path, call) != before or again in seen:
            units.append(units[-1] + 1 if units else 1)
            seen = set()
        else:
            units.append(units[-1])
        seen.add(again)
        before = path, call
    return tuple(units)


def _elements(flow: Flow, chain: Chain, sites: Sequence[Site], above: Sequence[str]) -> list[list[str]]:
    """The path of each add's unit: below ``above``, a container's element, a block, or what a part of the model holds.

    The parts of a model, or of a module, are lists of early and late blocks, say, or an encoder with its own.
    """
    depth, paths = len(above), [parts(site.name) for site in sites]
    if flow.containers(".".join(above)):
        return [path[: depth + 1] for path in paths]
    ends = dict[str, int]()
    for part in {path[depth] for path in paths if len(path) > depth}:
        _, inside = common_path([s for s, path in zip(sites, paths, strict=True) if path[depth:][:1] == [part]], flow)
        if flow.containers(".".join(inside)):
            ends[part] = len(inside)
    found = []
    for add, path in zip(chain.adds, paths, strict=True):
        made_in = parts(add.op.scope.path)
        lists = (n for n in range(depth + 1, len(made_in)) if flow.containers(".".join(made_in[:n])))
        end = ends.get(path[depth]) if len(path) > depth else depth
        found.append(path[: (next(lists, depth) if end is None else end) + 1])
    return found


def _owner(flow: Flow, chain: Chain, sites: Sequence[Site]) -> str:
    """The nearest module around all adds that does not iterate over its children; else one in the first block."""
    path = chain.home().path
    while flow.containers(path) or _runs_its_children(flow.model, path):
        if not path:
            return _below(flow, sites[0].block)
        path = path.rpartition(".")[0]
    return path


def _below(flow: Flow, path: str) -> str:
    """The first module at or below a path that does not iterate over its children, preferably one that has some."""
    modules = {} if isinstance(flow.model, fx.GraphModule) else dict(flow.model.get_submodule(path).named_modules())
    below = {".".join(filter(None, (path, name))): module for name, module in modules.items()}
    free = [at for at in below if not (flow.containers(at) or _runs_its_children(flow.model, at))]
    return next((at for at in free if any(below[at].children())), (free or [path])[-1])


def _runs_its_children(model: nn.Module, path: str) -> bool:
    """Whether a forward loops over ``self.children()``: it would call a connection that is registered there."""
    if isinstance(model, fx.GraphModule):
        return False
    cls = type(model.get_submodule(path))
    codes = [getattr(getattr(cls, name), "__code__", None) for name in dir(cls) if name.startswith("forward")]
    return any(code and not _CHILDREN.isdisjoint(code.co_names) for code in codes)


def common_path(sites: Sequence[Site], flow: Flow) -> tuple[list[str], list[str]]:
    """The parts that all names of ``sites`` begin with, and the path of the container whose elements are the units."""
    columns = zip(*(parts(site.name) for site in sites), strict=False)
    prefix = [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns)]
    in_one_element = prefix and prefix[-1].isdecimal() and not flow.containers(".".join(prefix))
    return prefix, prefix[:-1] if in_one_element else prefix


def parts(path: str) -> list[str]:
    return path.split(".") if path else []
