"""For training loops: parameter groups for the optimiser, and a regulariser for the loss."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from rewire.errors import RewireError, UnsupportedTopology, check_positive
from rewire.init import Roles
from rewire.init.initializers.mup import Factors, MuP
from rewire.init.roles import roles as roles_of
from rewire.runtime.connection import Connection, connections, learned_connections

#: Parameter groups of a torch optimiser.
Groups: TypeAlias = list[dict[str, Any]]

#: The most by which an Adam step moves stored connection weights, unless a rate is given: a softmax whose logits move
#: by 0.3 a step saturates within some tens of steps, and learns no more.
_FASTEST = 0.1


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    connection_lr: float | None = None,
    connection_factor: float = 1.0,
    decay_matrices: bool = False,
    muon_lr: float | None = None,
    mup: MuP | None = None,
    roles: Roles | None = None,
) -> Groups:
    """Parameter groups of ``model`` for a torch optimiser, with connection weights in separate groups without decay.

    Weight decay would pull connection weights towards 0, which is not a neutral value: logits towards equal weights,
    scales towards disabled branches. Matrices that compute weights from the input, or map states, are different: many
    of them start at 0. Works on sharded and on plain models, too, and after adapters were added: parameters without
    gradients are left out.

    Connection weights are stored divided by their natural scales (``Topology.natural_scales``; ANCRe's logits by their
    temperature), so that their gradients do not dominate ``clip_grad_norm_`` over all parameters. Their rates make up
    for it: an Adam step changes the weights that the formulas use by about ``connection_lr``.

    Args:
        model: the model, rewired or not.
        lr: learning rate.
        weight_decay: weight decay of all parameters but the connection weights.
        connection_lr: learning rate of the connection weights; default: ``lr``, or the rate that changes stored values
            by 0.1 a step (for ANCRe 1e-3), whichever is less.
        connection_factor: multiplies the rates of the connection weights; `rewire.study` searches and prints it.
        decay_matrices: whether to decay the matrices among the connection weights (``Topology.matrices``), too: the
            low-rank maps of LAuReL, and the projections of muddformer, hc-dynamic, hc-gated, frac-hc and mhc.
        muon_lr: learning rate of the matrices in the blocks of the trunks (linear maps, no embeddings), if Muon is to
            train these. All groups then have a ``use_muon`` entry, for optimisers that combine Muon and AdamW.
        mup: the initialiser of the model. It scales the rates, decay and Adam's ``eps`` (1e-8 in the tuned model) of
            all other parameters, in one group for each scale. With ``base_depth`` it also scales the rates of
            connection weights whose fan-in grows with the depth (``Topology.depth_powers``): those of `denseformer`
            and `ancre-none` are divided by L / base_depth, `muddformer`'s static ones by it, its W2 by its square.
        roles: for ``mup``, if the model is sharded, compiled or wrapped: its roles, as for `rewire.initialize`.

    Returns:
        Groups for ``torch.optim.AdamW(groups)``: all other parameters, then the connection weights, in a group for each
        scale, rate and decay; none is empty. With ``muon_lr`` the matrices are the first group.

    Raises:
        TypeError, ValueError: a rate or decay is negative or not a number; ``mup`` and ``muon_lr`` are both given.

    Example:
        >>> groups = rewire.parameter_groups(rewired, lr=3e-4, weight_decay=0.1, connection_lr=1e-3)
        >>> optimizer = torch.optim.AdamW(groups)

        With ``torch.optim.Muon``, which takes only matrices:

        >>> matrices, *others = rewire.parameter_groups(rewired, lr=3e-4, weight_decay=0.1, muon_lr=0.02)
        >>> optimizers = torch.optim.Muon(matrices["params"], lr=matrices["lr"]), torch.optim.AdamW(others)
    """
    rate, fastest = (lr, _FASTEST) if connection_lr is None else (connection_lr, math.inf)
    _check(lr=lr, weight_decay=weight_decay, connection_lr=rate, connection_factor=connection_factor)
    _check(muon_lr=0 if muon_lr is None else muon_lr)
    if mup is not None:
        if muon_lr is not None:
            raise ValueError("mup= has rates for AdamW alone: leave out muon_lr=.")
        roles = roles_of(model) if roles is None else roles
        mup.check(roles)
    deeper = mup.multipliers(roles)[1] if mup is not None and roles is not None else 1.0
    own: dict[tuple[float, float, float], list[nn.Parameter]] = {}  # by (scale, depth divisor, decay)
    for connection in connections(model).values():
        topology = connection.layout.topology
        decayed, powers = topology.matrices if decay_matrices else (), topology.depth_powers()
        for name, parameter in connection.named_parameters():
            scale, weight = connection.stored_in[name], connection.weight_of(name)
            slower = deeper ** powers.get(weight, 0)
            # An optimiser decays by rate times decay, and the rate is divided by the scale.
            decay = weight_decay * scale * slower if weight in decayed else 0.0
            own.setdefault((scale, slower, decay), []).append(parameter)
    learned = {id(p) for parameters in own.values() for p in parameters}
    matrices = [] if muon_lr is None else _matrices(model)
    learned |= {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in learned]
    groups: Groups = [{"params": others, "lr": lr, "weight_decay": weight_decay}]
    if mup is not None:
        assert roles is not None
        groups = _scaled(model, others, lr, weight_decay, mup, roles)
    for (scale, slower, decay), parameters in own.items():
        of_own = connection_factor * min(rate / scale, fastest) / slower
        groups.append({"params": parameters, "lr": of_own, "weight_decay": decay})
    if muon_lr is not None:
        muon = {"params": matrices, "lr": muon_lr, "weight_decay": weight_decay, "use_muon": True}
        groups = [muon, *({**group, "use_muon": False} for group in groups)]
    trained = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]
    return [group for group in trained if group["params"]]


def _scaled(
    model: nn.Module, parameters: list[nn.Parameter], lr: float, weight_decay: float, mup: MuP, roles: Roles
) -> Groups:
    """Groups of ``parameters`` by the factors of ``mup`` for their rates, decays and epsilons."""
    names, found = {id(p): name for name, p in model.named_parameters()}, dict[Factors, list[nn.Parameter]]()
    for p in parameters:
        weight = next(iter(roles.of(names[id(p)])), None)
        if weight is None:
            raise RewireError(
                f"'{names[id(p)]}' is not in the table of roles: pass roles= of the model as it is trained."
            )
        found.setdefault(mup.factors(weight, roles), []).append(p)
    return [
        {"params": ps, "lr": lr * f.lr, "weight_decay": weight_decay * f.weight_decay, "eps": 1e-8 * f.eps}
        for f, ps in found.items()
    ]


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    """The matrices in the blocks of the model's trunks, except embedding tables."""
    trunks = [connection.trunk for connection in connections(model).values() if connection.trunk is not None]
    blocks = {site.block for trunk in trunks for site in trunk.sites}
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding | Connection) for p in m.parameters()}
    inside = (p for block in sorted(blocks) for p in model.get_submodule(block).parameters())
    return list({id(p): p for p in inside if p.ndim == 2 and id(p) not in tables}.values())


def _check(**numbers: object) -> None:
    """Raise TypeError or ValueError for anything but a number of at least 0, as optimisers do."""
    for name, value in numbers.items():
        if not isinstance(value, (Real, Tensor)):
            raise TypeError(f"{name} must be a number, not {value!r}.")
        if not float(value) >= 0:
            raise ValueError(f"{name}={value!r}: it has to be 0 or more.")


def sparsity_penalty(model: nn.Module, q: float = 2.0) -> Tensor:
    """Mean Tsallis entropy of the normalised connection weights of ``model``; 0 if all are one-hot.

    This is ``S_q(p) = (1 - sum_i p_i^q) / (q - 1)`` of each softmax p (Shannon's entropy in the limit q = 1), averaged
    over all softmaxes with at least two entries, so that its strength does not depend on the depth. The first version
    of ANCRe (arXiv 2602.09009v1, Section 4.1) suggests it to make connections sparse:
    ``loss = loss + 0.01 * rewire.sparsity_penalty(model)``. It is maximal for uniform weights, the paper start, where
    its gradient is zero; the loss itself has to move the weights first.

    Args:
        model: a model rewired with a topology whose weights are normalised (``ancre-ingoing``, ``ancre-outgoing``, both
            with ``start="paper"``: the preserving start adds a difference of such weights to the plain network).
        q: entropic index, above 0; the larger it is, the less small weights count.

    Returns:
        A float32 scalar, differentiable with respect to the connection weights.

    Raises:
        RewireError: the model was not rewired.
        UnsupportedTopology: no trunk has normalised weights of at least two entries.
        ValueError: q is not above 0.

    Example:
        >>> rewired = rewire.compile(model, "ancre-ingoing", start="paper", example_inputs=(x,))
        >>> loss = rewired(x).mean() + 0.01 * rewire.sparsity_penalty(rewired)
    """
    check_positive("q", q, 2.0)
    found, entropies = learned_connections(model), []
    for connection in found.values():
        layout = connection.layout
        for p in layout.topology.distributions(connection.effective(), layout.dims):
            if p.numel() > 1:
                entropies.append(_tsallis(p, q))
    if not entropies:
        raise UnsupportedTopology(
            "sparsity_penalty needs connection weights that are normalised by a softmax: none of the trunks "
            + ", ".join(f"'{name}' ({c.layout.topology.registered_name})" for name, c in found.items())
            + " has such weights. Use ancre-ingoing or ancre-outgoing with start='paper'."
        )
    device = entropies[0].device
    return torch.stack([entropy.to(device) for entropy in entropies]).mean()


def _tsallis(p: Tensor, q: float) -> Tensor:
    p = p.clamp_min(torch.finfo(p.dtype).tiny)  # an entry that underflowed has an infinite slope for q <= 1
    if q == 1:
        return torch.special.entr(p).sum()
    return (1 - p.pow(q).sum()) / (q - 1)
