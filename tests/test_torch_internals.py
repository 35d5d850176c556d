"""Private names of PyTorch: what is expected of each, what is done without it, and that no other file has one."""

from __future__ import annotations

import ast
import copy
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import rewire
from rewire import torch_internals as internals
from rewire.copies import private
from rewire.patterns.torch_layers import encoder_layer
from rewire.runtime.connection import Connection

ROOT = Path(rewire.__file__).parent
OWN = ROOT / "torch_internals.py"


def private_names() -> set[str]:
    """Private names that the module itself reads, and those that modules and tensors have."""
    names = set()
    for node in ast.walk(ast.parse(OWN.read_text())):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
        elif isinstance(node, ast.alias):
            names |= {*node.name.split(".")}
    names |= {*dir(nn.Module()), *dir(nn.Parameter(torch.ones(1)))}
    return {name for name in names if name.startswith("_") and name.isidentifier() and not name.endswith("__")} - {"_"}


def named_in(tree: ast.AST, private: set[str]) -> Iterator[str]:
    """Private names of torch in a file."""
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            whole = ast.unparse(node)
            hidden = node.attr.startswith("_") and not node.attr.endswith("__")
            if node.attr in private - own or (hidden and whole.startswith("torch.")):
                yield whole
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in private - own:
            yield node.value
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            for alias in node.names:
                parts = f"{module}.{alias.name}".strip(".").split(".")
                if parts[0] == "torch" and any(part.startswith("_") for part in parts):
                    yield ".".join(parts)


#: What cannot stand in one module: see there.
ELSEWHERE = {
    "runtime/connection.py": {"super()._apply", "super()._load_from_state_dict"},
    "patterns/torch_layers.py": {"self._sa_block", "self._ff_block"},
    "ejecting/runtime.py": {"_load_from_state_dict"},  # which ejected models do without
}


def test_no_other_file_has_a_private_name_of_torch() -> None:
    private = private_names()
    found = {
        path.relative_to(ROOT).as_posix(): {*named_in(ast.parse(path.read_text()), private)}
        for path in ROOT.rglob("*.py")
        if path != OWN
    }
    unexpected = {path: names - ELSEWHERE.get(path, set()) for path, names in found.items()}
    assert {path: names for path, names in unexpected.items() if names} == {}


@pytest.mark.parametrize(
    "text",
    [
        *(
            "torch._C.x()",
            "from torch._dynamo import config",
            "from torch.utils import _pytree",
            "import torch._guards",
        ),
        *("module._forward_hooks", "getattr(module, '_buffers')", "tensor._base", "torch.cuda._sleep(1)"),
    ],
)
def test_private_names_are_found_in_texts(text: str) -> None:
    assert list(named_in(ast.parse(text), private_names()))


def test_rewire_is_imported_where_names_are_missing() -> None:
    missing = """
import torch, torch.distributed, torch.distributed.fsdp
del torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active
del torch._C._autograd._top_saved_tensors_default_hooks, torch._C._functorch.is_legacy_batchedtensor
del torch.autograd.forward_ad._current_level, torch._ops.HigherOrderOperator
del torch.utils._python_dispatch._get_current_dispatch_mode, torch.utils._python_dispatch._pop_mode_temporarily
import sys; sys.modules["torch._C._dynamo.guards"] = None
import rewire
from rewire import torch_internals as internals
x = torch.ones(2)
assert internals.in_dispatch_mode() and internals.under_functorch() and internals.in_transform()
assert internals.is_batch_of_gradients(x) and internals.saved_tensor_hooks() == (None, None)
assert internals.tensor_guards([x]) is None
module = torch.nn.Linear(1, 1)
module._get_fsdp_state = None
with internals.unseen_by_selective_checkpoints(module):
    pass
"""
    ran = subprocess.run([sys.executable, "-c", missing], capture_output=True, text=True, env=dict(os.environ))
    assert ran.returncode == 0, ran.stderr


# -- modules


def test_tables_of_modules_can_be_read_and_written() -> None:
    module = nn.BatchNorm1d(3)
    module.nothing, module.child, module.twin = None, nn.Linear(1, 1), None
    module.register_module("gone", None)
    assert {*internals.children_of(module)} == {"child", "gone"} and internals.children_of(module)["gone"] is None
    assert {*internals.parameters_of(module)} == {"weight", "bias"}
    assert {*internals.buffers_of(module)} == {"running_mean", "running_var", "num_batches_tracked"}
    internals.children_of(module)["child"] = nn.ReLU()
    assert isinstance(module.child, nn.ReLU)
    for name in (internals.CHILDREN, internals.PARAMETERS, internals.BUFFERS):
        assert isinstance(vars(module)[name], dict)


def test_parameters_are_dropped_from_a_shallow_copy_alone() -> None:
    module = nn.Linear(2, 2)
    other = copy.copy(module)
    internals.drop_parameters(other)
    assert not list(other.parameters()) and len(list(module.parameters())) == 2


def test_hooks_are_found() -> None:
    module = nn.Linear(2, 2)
    assert not internals.has_hooks(module)
    tables = {
        "register_forward_hook": internals.forward_hooks(module),
        "register_forward_pre_hook": internals.forward_pre_hooks(module),
        "register_full_backward_hook": internals.backward_hooks(module)[0],
        "register_full_backward_pre_hook": internals.backward_hooks(module)[1],
    }
    for register, table in tables.items():
        handle = getattr(module, register)(hook := lambda *_: None)
        assert list(table.values()) == [hook] and internals.has_hooks(module)
        handle.remove()
        assert not internals.has_hooks(module)


def test_hooks_on_all_modules_are_found() -> None:
    assert not internals.has_global_hooks()
    for number, register in enumerate(
        (nn.modules.module.register_module_forward_pre_hook, nn.modules.module.register_module_forward_hook)
    ):
        handle = register(hook := lambda *_: None)
        try:
            assert list(internals.global_forward_hooks()[number].values()) == [hook] and internals.has_global_hooks()
        finally:
            handle.remove()
    backward = (
        nn.modules.module.register_module_full_backward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
    )
    for number, register in enumerate(backward):
        handle = register(hook := lambda *_: None)
        try:
            assert list(internals.global_backward_hooks()[number].values()) == [hook] and internals.has_global_hooks()
        finally:
            handle.remove()
    assert not internals.has_global_hooks()


@pytest.mark.parametrize("name", ["_apply", "_load_from_state_dict"])
def test_what_connections_override_has_the_known_arguments(name: str) -> None:
    own, base = (list(inspect.signature(getattr(cls, name)).parameters) for cls in (Connection, nn.Module))
    assert own == base if name == "_apply" else base[:3] == own[:3] == ["self", "state_dict", "prefix"]


def test_torch_calls_what_connections_override() -> None:
    calls = []

    class Overriding(nn.Linear):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            calls.append("apply")
            return super()._apply(fn, recurse)

        def _load_from_state_dict(self, *args: Any) -> None:
            calls.append("load")
            super()._load_from_state_dict(*args)

    module = nn.Sequential(Overriding(1, 1)).double()
    module.load_state_dict(module.state_dict())
    assert calls == ["apply", "load"]


@pytest.mark.parametrize("norm_first", [True, False])
def test_torchs_encoder_layer_is_what_its_definition_says(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, norm_first=norm_first, batch_first=True)
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(encoder_layer(layer, x), layer(x))


# -- tensors


def test_containers_are_mapped() -> None:
    values = {"a": [1, (2,)]}
    assert internals.pytree.tree_leaves(values) == [1, 2]
    assert internals.pytree.tree_map(lambda x: x + 1, values) == {"a": [2, (3,)]}
    assert internals.pytree.tree_map_only(int, str, values) == {"a": ["1", ("2",)]}
    leaves, structure = internals.pytree.tree_flatten(values)
    assert internals.pytree.tree_unflatten(leaves, structure) == values
    assert {dict, list, tuple} <= {*internals.pytree.SUPPORTED_NODES}
    assert internals.pytree.register_pytree_node and internals.pytree.register_dataclass


def test_writes_are_counted() -> None:
    x = torch.ones(2)
    before = internals.writes_to(x)
    x[:1].add_(1)
    assert internals.writes_to(x) == before + 1


def test_inference_mode_is_left_without_recording_gradients() -> None:
    weight = nn.Parameter(torch.ones(2))
    with torch.inference_mode():
        with internals.outside_inference_mode():
            made = weight * 2
            assert not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        assert not (made.is_inference() or made.requires_grad)
        assert torch.is_inference_mode_enabled() and (weight * 2).is_inference()
    assert torch.is_grad_enabled() and (weight * 2).requires_grad


def test_memory_within_transforms_is_that_of_the_tensors_inside() -> None:
    x, sparse = torch.zeros(2, 2), torch.eye(2).to_sparse()
    memory = internals.memory_within(x)
    assert memory == internals.memory_within(x[1:].detach()) and memory is not None
    assert memory != internals.memory_within(x.clone())
    assert internals.memory_within(sparse) is None
    inside = list[int | None]()
    torch.func.vmap(lambda row: inside.extend(map(internals.memory_within, (row, row * 2))) or row)(x)
    assert inside[0] == memory != inside[1]


def test_the_mode_of_a_fake_tensor_within_transforms() -> None:
    from torch._subclasses import FakeTensorMode

    inside = list[object]()
    with FakeTensorMode() as mode:
        x = torch.zeros(2, 2)
        torch.func.vmap(lambda row: inside.append(internals.fake_mode_within(row)) or row)(x)
    assert inside == [mode] and internals.fake_mode_within(x) is mode


def test_views_and_memory_are_told() -> None:
    x = torch.ones(4)
    view = x[1:][1:]
    assert internals.viewed(view) is x and internals.viewed(x) is None
    for device in ("cpu", "meta"):
        x = torch.ones(4, device=device)
        assert internals.memory_of(x[2:]) == internals.memory_of(x) != internals.memory_of(torch.ones(4, device=device))


def test_special_parameters_share_memory() -> None:
    class Special(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    for needs in (True, False):
        given = Special(torch.ones(2), requires_grad=needs)
        made = internals.same_memory(given)
        assert type(made) is Special and made is not given and made.requires_grad == needs and made.is_leaf
        assert made.data_ptr() == given.data_ptr()


def test_fake_tensors_are_known() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        assert internals.is_fake(torch.ones(2))
    assert not internals.is_fake(torch.ones(2)) and not internals.is_fake(3)


def test_operators_say_whether_they_write() -> None:
    assert internals.writes_to_argument(torch.ops.aten.dropout_.default)
    assert not internals.writes_to_argument(torch.ops.aten.dropout.default)


def test_which_tensors_a_call_writes_to() -> None:
    aten, (x, y, out) = torch.ops.aten, torch.ones(3, 2)
    assert [*map(id, internals.written_by(aten.add_.Tensor, (x, y), {}))] == [id(x)]
    assert [*map(id, internals.written_by(aten.add.out, (x, y), {"out": out}))] == [id(out)]
    assert [*map(id, internals.written_by(aten._foreach_add_.List, ([x, y], [out, out]), {}))] == [id(x), id(y)]
    assert not internals.written_by(aten.view.default, (x, [2]), {})  # its result is an alias
    assert not internals.written_by(aten.native_batch_norm_backward, (x,), {})


def test_functions_that_write_are_among_the_c_functions() -> None:
    assert {name for name in dir(internals.C_FUNCTIONS) if name.endswith("_") and not name.startswith("__")}


# -- who else looks on


class Watching(internals.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


def test_dispatch_modes_are_known_and_can_be_left() -> None:
    assert not internals.in_dispatch_mode()
    with Watching() as mode:
        assert internals.in_dispatch_mode()
        torch.ones(2).add(1)
        seen = len(mode.seen)
        with internals.without_dispatch_modes():
            assert not internals.in_dispatch_mode()
            torch.ones(2).add(1)
    assert seen and len(mode.seen) == seen


def test_selective_checkpoints_do_not_see_modules_with_hooks_of_fsdp() -> None:
    """Others they do, and so do other modes see these."""
    plain, sharded = nn.Linear(1, 1), nn.Linear(1, 1)
    vars(sharded)["_get_fsdp_state"] = lambda: None
    checkpointed, _ = create_selective_checkpoint_contexts([torch.ops.aten.mm.default])
    for mode, module, seen in (
        (checkpointed, plain, True),
        (checkpointed, sharded, False),
        (Watching(), sharded, True),
    ):
        with mode, internals.unseen_by_selective_checkpoints(module):
            assert internals.in_dispatch_mode() == seen
        assert not internals.in_dispatch_mode()


def test_torch_function_can_be_left() -> None:
    class Loud(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError

    x = torch.ones(2).as_subclass(Loud)
    with pytest.raises(AssertionError):
        torch.add(x, 1)
    with internals.WithoutTorchFunction():
        torch.add(x, 1)


def test_checkpoints_of_compiled_models_are_higher_order() -> None:
    assert isinstance(torch.ops.higher_order.tag_activation_checkpoint, internals.HIGHER_ORDER)
    assert not isinstance(torch.add, internals.HIGHER_ORDER)


def test_what_traces_a_checkpoint_is_known() -> None:
    def function(x: Tensor) -> Tensor:
        return x + int(internals.in_higher_order())

    @torch.compile(backend="eager", fullgraph=True)
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return function(x), torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)

    seen = [bool(y) for y in both(torch.zeros((), requires_grad=True))]
    assert seen == [False, True] and not internals.in_higher_order()


def test_transforms_are_known() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append((internals.under_functorch(), internals.in_transform()))
        return x.square().sum()

    x = torch.ones(2)
    function(x)
    torch.func.grad(function)(x)
    torch.func.vmap(function)(x[None])
    with torch.autograd.forward_ad.dual_level():
        function(torch.autograd.forward_ad.make_dual(x, x))
    assert seen == [(False, False), (True, True), (True, True), (False, True)]


def test_batches_of_gradients_are_known() -> None:
    seen = []

    class Looking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append(internals.is_batch_of_gradients(grad))
            return grad

    x = torch.ones(2, requires_grad=True)
    y = Looking.apply(x)
    torch.autograd.grad(y, x, torch.ones(2), retain_graph=True)
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)
    assert seen == [False, True]


def test_checkpoints_are_known_by_their_hooks() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(internals.saved_tensor_hooks())
        return x.square()

    x = torch.ones(2, requires_grad=True)
    function(x)
    checkpoint(function, x, use_reentrant=False)
    assert seen[0] is None and len(seen[1]) == 2


def test_hooks_on_saved_tensors_are_replaced_until_their_context_ends() -> None:
    packed = []

    def pack(saved: Tensor) -> Tensor:
        packed.append(saved)
        return saved

    internals.replace_saved_tensor_hooks(pack, lambda kept: kept)
    assert internals.saved_tensor_hooks() is None
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: 0, lambda kept: x.detach()):
        internals.replace_saved_tensor_hooks(pack, lambda kept: kept)
        y = x.square()
    assert internals.saved_tensor_hooks() is None and len(packed) == 1
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 2]


# -- torch.compile


def test_tensors_are_guarded() -> None:
    x = torch.ones(2, 3)
    check = internals.tensor_guards([x])
    assert check is not None
    assert check(torch.zeros(2, 3)) and not check(torch.zeros(3, 2)) and not check(x.double())


def test_graphs_are_compiled_by_others() -> None:
    graph = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    x = torch.randn(3)
    assert torch.equal(internals.compiled_by("eager", graph, [x], None)(x), F.relu(x))


@pytest.mark.slow
def test_graphs_are_compiled_by_inductor() -> None:
    graph = fx.symbolic_trace(lambda x: (torch.relu(x),))
    x = torch.randn(3)
    assert torch.equal(internals.compiled_by("inductor", graph, [x], {"max_autotune": False})(x)[0], F.relu(x))


def test_modes_of_compilation_have_options() -> None:
    assert internals.options_of_mode("max-autotune-no-cudagraphs")["max_autotune"] is True


def test_frames_are_told_apart_and_counted() -> None:
    frames = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        frames.append(internals.compiled_frame())
        return graph

    assert internals.compiled_frame() is None
    function = torch.compile(lambda x: x + 1, backend=backend, dynamic=False)
    function(torch.ones(2)), function(torch.ones(3))
    torch.compile(lambda x: x + 2, backend=backend)(torch.ones(2))
    assert frames[0] == frames[1] != frames[2] and None not in frames
    assert internals.recompile_limit() > 1


def test_parameters_are_declared() -> None:
    graph = fx.GraphModule({"weight": nn.Parameter(torch.ones(1))}, fx.Graph())
    graph.register_parameter("weight", nn.Parameter(torch.ones(1)))
    internals.declare_parameters(graph)  # not Dynamo's: nothing asks
    graph._param_name_to_source = sources = {}
    internals.declare_parameters(graph)
    assert [source.name if isinstance(source.name, str) else source.name() for source in sources.values()] == ["weight"]


def test_dynamo_marks_parameters_and_asks_for_their_sources() -> None:
    seen: dict[str, Any] = {}

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        seen["marked"] = [internals.is_parameter_input(node) for node in graph.graph.nodes if node.op == "placeholder"]
        seen["sources"] = hasattr(graph, "_param_name_to_source")
        return graph

    torch.compile(nn.Linear(2, 2), backend=backend)(torch.ones(1, 2))
    assert sorted(seen["marked"]) == [False, True, True] and seen["sources"]


@pytest.mark.parametrize("describes", [True, False])
def test_inductor_is_told_of_operators(describes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it would describe their arguments; and as it lowers them itself, with strides as they are."""
    from torch._inductor import lowering

    library = torch.library.Library("rewire_test", "FRAGMENT")
    library.define("doubled(Tensor x) -> Tensor")
    operator = torch.ops.rewire_test.doubled.default
    monkeypatch.setattr(internals, "INDUCTOR_DESCRIBES", describes)
    try:
        internals.spare_inductor_a_description(operator)
        assert (operator in lowering.lowerings) == describes
        assert not describes or lowering.maybe_layout_constraints(operator) is not None
        internals.spare_inductor_a_description(operator)  # it is told once
    finally:
        lowering.lowerings.pop(operator, None)


def test_what_torch_compile_was_called_on() -> None:
    def double(x: Tensor) -> Tensor:
        return 2 * x

    compiled = torch.compile(torch.compile(double, backend="eager"), backend="eager")
    assert compiled is not double and internals.uncompiled(compiled) is internals.uncompiled(double) is double


def test_shapes_are_propagated() -> None:
    graph = fx.symbolic_trace(nn.Linear(2, 3))
    internals.propagate(graph, [torch.ones(4, 2)])
    (result,) = graph.graph.find_nodes(op="output")[0].args
    assert result.meta["val"].shape == (4, 3)


def test_exported_graphs_assert_what_they_are_given() -> None:
    class Casting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.float64) + 1

    program = torch.export.export(Casting(), (torch.ones(2),))
    nodes = program.graph.nodes
    assert [internals.is_assertion(node.target) for node in nodes].count(True) == 1
    named = {node.target for node in program.module().graph.nodes if node.op == "call_module"}
    assert named <= {internals.EXPORT_GUARDS}


# -- others


def test_a_running_ddp_is_known() -> None:
    seen = []

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(internals.running_ddp())
            return super().forward(x)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Model(1, 1))
        model(torch.ones(1, 1))
        assert seen == [model] and internals.running_ddp() is None
        internals.default_store().set("key", "value")
        assert internals.default_store().get("key") == b"value"
    finally:
        dist.destroy_process_group()


def test_process_groups_are_known_and_shared_by_copies() -> None:
    assert internals.process_groups() == []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert internals.process_groups() == [dist.group.WORLD]
        module = nn.Linear(2, 2)
        module.held = {"group": dist.group.WORLD}
        assert private(module).held["group"] is dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_keeping_busy_needs_no_gpu_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(torch.cuda._sleep)
    monkeypatch.delattr(torch.cuda, "_sleep")
    internals.keep_busy(1)
