"""The private names of PyTorch that rewire uses: why each is needed, and what happens without it.

No other file of the package uses private names, so that renames in a new version of PyTorch are mended here;
``tests/test_torch_internals.py`` finds them. A missing name without a substitute raises when it is used, not when
rewire is imported.

There are two exceptions. `Connection` overrides ``nn.Module._apply`` and ``_load_from_state_dict``: a module has no
other way to follow moves but not casts, and to convert what it loads. And the definition of torch's encoder layer in
``patterns/torch_layers.py`` calls the layer's ``_sa_block`` and ``_ff_block``, as the original does.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch._library.utils
import torch.utils._python_dispatch
import torch.utils._pytree
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

#: A module's table of hooks of one kind, by the ids of their handles.
Hooks = dict[int, Callable[..., Any]]

#: Torch's pytrees. There is no public module for Python; users are told to use this one.
pytree = torch.utils._pytree

#: The base of modes that see each operator; PyTorch's documentation uses this private path.
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode

#: A context without dispatch modes, in which the values of real tensors can be read.
without_dispatch_modes = torch.utils._python_dispatch._disable_current_modes

#: The innermost dispatch mode, and a context without it; if they are missing, all modes stay.
_first_mode = getattr(torch.utils._python_dispatch, "_get_current_dispatch_mode", lambda: None)
_without_first_mode = getattr(torch.utils._python_dispatch, "_pop_mode_temporarily", nullcontext)

#: A context in which ``__torch_function__`` of classes is not called.
WithoutTorchFunction = torch._C.DisableTorchFunctionSubclass
#: The same for modes, too: within it nothing sees which functions of torch are called.
Unseen = torch._C.DisableTorchFunction

#: The functions of ``torch.nn.functional`` that are written in C++: some of them write to their argument.
C_FUNCTIONS = getattr(torch._C, "_nn", None)

#: Operators that call functions, such as torch.compile's form of activation checkpointing; without it, none is known.
HIGHER_ORDER: Any = getattr(torch._ops, "HigherOrderOperator", ())

#: The attributes in which modules hold their children, parameters and buffers; users' code reads them, too.
CHILDREN, PARAMETERS, BUFFERS = "_modules", "_parameters", "_buffers"

#: Name of the module that torch.export puts into a graph to check its inputs.
EXPORT_GUARDS = "_guards_fn"


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The table of a module's children. ``named_children`` leaves out None and duplicates."""
    return module._modules


def module_at(root: nn.Module, path: str) -> nn.Module | None:
    """`get_submodule`, or None if there is no module at that path."""
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The table of a module's own parameters, in which FSDP and tensor parallelism put other objects."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The table of a module's own buffers, including those that are None."""
    return module._buffers


def drop_parameters(module: nn.Module) -> None:
    """Remove all parameters of a shallow copy of a module, but not those of the original."""
    module._parameters = {}


def casts_inputs(module: nn.Module) -> bool:
    """Whether FSDP2's mixed precision casts the module's arguments."""
    state_of: Any = getattr(module, "_get_fsdp_state", None)
    policy = None if state_of is None else state_of()._mp_policy
    return policy is not None and policy.cast_forward_inputs and policy.param_dtype is not None


def gather_for_forward_only(module: nn.Module) -> None:
    """Make FSDP2 gather the weights of a module with its own group for forward only, not again for backward."""
    state_of: Any = getattr(module, "_get_fsdp_state", None)
    if state_of is not None and all(group.modules == (module,) for group in state_of()._fsdp_param_groups):
        module.set_unshard_in_backward(False)  # type: ignore[operator]


def unseen_by_selective_checkpoints(module: nn.Module) -> AbstractContextManager[Any]:
    """A context for calling a module whose FSDP2 hooks run different operations in backward than in forward.

    Selective checkpointing counts operations, so torch 2.13 would raise (github.com/pytorch/pytorch/pull/196862).
    """
    mode = _first_mode() if hasattr(module, "_get_fsdp_state") and not torch.compiler.is_compiling() else None
    counts = any(cls.__module__ == "torch.utils.checkpoint" for cls in type(mode).__mro__)
    return _without_first_mode() if counts else nullcontext()


def has_groups_inside(module: nn.Module) -> bool:
    """Whether FSDP2 has groups of weights for modules inside this one."""
    return any(hasattr(inner, "_get_fsdp_state") for inner in module.modules() if inner is not module)


def is_first_of_two(node: Any) -> bool:
    """Whether the running backward skips ``node`` and keeps the graph, so that a second pass will follow."""
    keeps: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return keeps and not torch._C._will_engine_execute_node(node)


def forward_hooks(module: nn.Module) -> Hooks:
    """The table of a module's forward hooks: there is no public way to find or wrap one."""
    return module._forward_hooks


def forward_pre_hooks(module: nn.Module) -> Hooks:
    """The table of a module's forward pre-hooks."""
    return module._forward_pre_hooks


def backward_hooks(module: nn.Module) -> tuple[Hooks, Hooks]:
    """The tables of a module's backward hooks and backward pre-hooks."""
    return module._backward_hooks, module._backward_pre_hooks


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of any kind, forward or backward."""
    return any((module._forward_hooks, module._forward_pre_hooks, *backward_hooks(module)))


def global_forward_hooks() -> tuple[Hooks, Hooks]:
    """The tables of global forward pre-hooks and forward hooks, which run for all modules."""
    return nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks


def global_backward_hooks() -> tuple[Hooks, Hooks]:
    """The tables of global backward hooks and backward pre-hooks."""
    return nn.modules.module._global_backward_hooks, nn.modules.module._global_backward_pre_hooks


def has_global_hooks() -> bool:
    """Whether there are global hooks, which run for all modules."""
    return nn.modules.module._has_any_global_hook()


#: A tensor's version counter: how often it was written to in place; not counted for inference tensors.
writes_to: Callable[[Tensor], int] = operator.attrgetter("_version")


def writes_within(tensor: Tensor) -> int | None:
    """`writes_to`, with those to the tensors that transforms of torch.func have wrapped: `vmap` counts no others.

    None for inference tensors.
    """
    try:
        own = tensor._version
    except RuntimeError:  # an inference tensor; to ask `is_inference` first would cost a call for all others
        return None
    if _transforms_active is not None and not _transforms_active():
        return own
    inner = _unwrapped_once(tensor)
    within = 0 if inner is tensor else writes_within(inner)
    return None if within is None else within + own


def memory_within(tensor: Tensor) -> int | None:
    """`memory_of` the tensor inside of all that transforms of torch.func have wrapped; None if it has none."""
    inner = _unwrapped_once(tensor)
    try:
        return memory_of(tensor) if inner is tensor else memory_within(inner)
    except (NotImplementedError, RuntimeError):
        return None


def fake_mode_within(fake: Tensor) -> Any:
    """The mode of the fake tensor inside of all that transforms of torch.func have wrapped."""
    inner = _unwrapped_once(fake)
    return fake.fake_mode if inner is fake else fake_mode_within(inner)  # type: ignore[attr-defined]


def _unwrapped_once(tensor: Tensor) -> Tensor:
    """The tensor that the innermost transform of torch.func has wrapped; others as they are."""
    if not under_functorch() or not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return tensor
    inner: Tensor = torch._C._functorch.get_unwrapped(tensor)
    return inner


class outside_inference_mode:  # noqa: N801 (as torch names its contexts)
    """A context in which torch counts writes to the tensors that are made, and records no gradients.

    Made of `torch.inference_mode` and `torch.no_grad`, it would take three times as long, for each residual add.
    """

    __slots__ = ("_guard",)

    def __enter__(self) -> None:
        self._guard = torch._C._InferenceMode(False)
        self._guard.__enter__()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        self._guard.__exit__(*error)  # and gradients are as before


def viewed(tensor: Tensor) -> Tensor | None:
    """The tensor that ``tensor`` is a view of; None if it is not a view."""
    return tensor._base


def unviewed(tensor: Tensor) -> Tensor:
    """``tensor`` as one that is no view, as sums are none: Megatron makes a new tensor of a view between its blocks."""
    if tensor._base is None or torch.compiler.is_compiling():
        return tensor
    made: Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)  # a tensor of the same memory
    return made


def gradient_of(tensor: Tensor) -> Any:
    """A tensor's ``grad_fn``; None where asking for it raises, as for a view that was made under `no_grad`, in an
    autograd function for example, of a tensor that was written to since.
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def memory_of(tensor: Tensor) -> int:
    """A number that identifies a tensor's storage; on the meta device, addresses would not.

    Raises:
        NotImplementedError, RuntimeError: the tensor has no storage of its own.
    """
    return tensor.untyped_storage()._cdata


def same_memory(parameter: nn.Parameter) -> nn.Parameter:
    """A leaf parameter of the same class around the same memory.

    ``Tensor.as_subclass`` would call the class's ``__torch_function__``.
    """
    return torch.Tensor._make_subclass(type(parameter), parameter.data, parameter.requires_grad)


def is_fake(value: object) -> bool:
    """Whether it is one of torch's fake tensors, which have no values. By name: importing their module takes long."""
    return any(cls.__name__ == "FakeTensor" for cls in type(value).__mro__)


def writes_to_argument(operator: Any) -> bool:
    """Whether the schema of an operator (``torch.ops.aten..``) says that it writes to one of its arguments."""
    return operator._schema.is_mutable


def written_by(operator: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> list[Tensor]:
    """The tensors to which a call of an operator writes, by its schema; none of a higher-order operator's."""
    if not getattr(getattr(operator, "_schema", None), "is_mutable", False):
        return []
    written = [each for each in operator._schema.arguments if each.alias_info and each.alias_info.is_write]
    named = dict(zip((each.name for each in operator._schema.arguments), args, strict=False)) | {**kwargs}
    values = [named.get(each.name) for each in written]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


# Looked up once: every sum calls these.
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", None)
_function_modes = getattr(torch._C, "_len_torch_function_stack", None)
_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", None)
_is_tracing = getattr(torch._C, "_is_tracing", torch.jit.is_tracing)  # type: ignore[attr-defined]
_is_batched = getattr(torch._C._functorch, "is_legacy_batchedtensor", None)
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_push_hooks = getattr(torch._C._autograd, "_push_saved_tensors_default_hooks", None)
_pop_hooks = getattr(torch._C._autograd, "_pop_saved_tensors_default_hooks", None)


def in_dispatch_mode() -> bool:
    """Whether a dispatch mode is active; if that cannot be told, yes: then results are computed anew."""
    return _dispatch_modes is None or _dispatch_modes() > 0


def in_function_mode() -> bool:
    """Whether a torch-function mode is active, such as a default device; if that cannot be told, yes."""
    return _function_modes is None or _function_modes() > 0


def under_functorch() -> bool:
    """Whether a transform of torch.func is running; if that cannot be told, yes: then autograd computes gradients."""
    return _transforms_active is None or _transforms_active()


def in_transform() -> bool:
    """Whether a transform of torch.func or forward-mode AD is running; if that cannot be told, yes."""
    return under_functorch() or getattr(torch.autograd.forward_ad, "_current_level", 0) >= 0


def is_followed() -> bool:
    """Whether a dispatch mode, such a transform, or ``torch.jit.trace`` is active."""
    return _dispatch_modes is None or _dispatch_modes() > 0 or in_transform() or _is_tracing()


def is_batch_of_gradients(grad: Tensor) -> bool:
    """Whether a gradient is a batch of several (``is_grads_batched=True``); if that cannot be told, yes."""
    return _is_batched is None or _is_batched(grad)


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The active saved-tensor hooks, such as those of activation checkpointing; None if there are none.

    (None, None) if that cannot be told: there may be some.
    """
    return (None, None) if _top_hooks is None else _top_hooks(True)


def replace_saved_tensor_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    """Put other hooks in the place of the active saved-tensor hooks, until the context that set these ends.

    Where that cannot be done, they stay.
    """
    if _top_hooks and _pop_hooks and _push_hooks and _top_hooks(True) is not None:
        _pop_hooks()
        _push_hooks(pack, unpack)


def tensor_guards(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """The C++ check by which torch.compile guards its graphs: do other tensors have the properties of ``tensors``?

    None if it is missing or has changed: then callers check in Python each time, which is slower.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (ImportError, TypeError):
        return None
    return check


def compiled_by(backend: str, graph: torch.fx.GraphModule, inputs: Sequence[Any], options: Any) -> Callable[..., Any]:
    """A graph compiled by another backend of torch.compile; only Inductor takes options."""
    if backend == "inductor":
        return torch._inductor.compile(graph, list(inputs), options)
    return torch._dynamo.lookup_backend(backend)(graph, inputs)  # type: ignore[arg-type]


#: Whether Inductor describes the arguments of each operator that is new to it: torch 2.11's does, 2.13's does not.
INDUCTOR_DESCRIBES = torch.torch_version.TorchVersion(torch.__version__) < "2.13"


def spare_inductor_a_description(operator: torch._ops.OpOverload) -> None:
    """Register the lowering of an operator that Inductor itself would choose when it first meets it in a graph.

    Inductor would then describe the arguments for its log, what these were computed from, and so on, which takes time
    exponential in the depth, whether or not anyone reads the log.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if not INDUCTOR_DESCRIBES or lowering is None or operator in lowering.lowerings:
        return
    tag = torch._library.utils.get_layout_constraint_tag(operator, with_default=True)
    lowering.make_fallback(operator, layout_constraint=lowering.tag_to_layout_constraint(tag), warn=False)


def options_of_mode(mode: str) -> dict[str, Any]:
    """The options of torch.compile that a ``mode`` stands for."""
    return torch._inductor.list_mode_options(mode)


def compiled_frame() -> Any:
    """An object that identifies the frame that Dynamo is compiling; None if it is not compiling."""
    compilation = torch._guards.CompileContext.current_compile_id()
    return None if compilation is None else compilation.frame_id


def uncompiled(function: object) -> Any:
    """The function on which ``torch.compile`` was called, from its result; anything else unchanged."""
    while hasattr(function, "_torchdynamo_orig_callable"):
        function = function._torchdynamo_orig_callable
    return function


def recompile_limit() -> int:
    """The number of graphs after which Dynamo stops compiling a frame, and runs it as Python."""
    return torch._dynamo.config.recompile_limit


def declare_parameters(graph: torch.fx.GraphModule) -> None:
    """Tell AOTAutograd the sources of parameters that Dynamo did not put into its graph: it needs one for each."""
    sources = getattr(graph, "_param_name_to_source", None)
    if sources is not None:
        from torch._dynamo.source import ConstantSource

        names = [name for name, _ in (*graph.named_parameters(), *graph.named_buffers())]
        sources.update({name: ConstantSource(name) for name in names if name not in sources})


def propagate(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> None:
    """Annotate the nodes of a graph with their shapes, without computing anything."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    with torch.no_grad():
        FakeTensorProp(graph, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*inputs)


def is_parameter_input(node: torch.fx.Node) -> bool:
    """Whether an input of Dynamo's graph is a parameter or buffer of the model."""
    return node.op == "placeholder" and "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})


def is_assertion(target: object) -> bool:
    """Whether a node's target only asserts a dtype or device, as the nodes that torch.export adds to casts do."""
    packet = getattr(torch.ops.aten, "_assert_tensor_metadata", None)
    return packet is not None and target is packet.default


def _constant(function: Callable[[], bool]) -> Callable[[], bool]:
    """Make Dynamo call it during tracing. ``torch.compiler.assume_constant_result`` would import all of Dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def in_traced_transform() -> bool:
    """While torch.compile traces: whether a transform of torch.func or forward-mode AD runs in what it traces."""
    return in_transform()


@_constant
def in_higher_order() -> bool:
    """Whether torch.compile is tracing the inside of a higher-order operator, such as a checkpoint.

    There Dynamo refuses code that changes objects from outside. If it cannot be told, no.
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        return InstructionTranslator.current_tx().output.current_tracer.parent is not None
    except (ImportError, AttributeError):
        return False


#: Whether ``torch.compiler.is_compiling()`` is true in functions that torch.compile runs rather than traces, too.
SESSIONS_ARE_SEEN = hasattr(torch.compiler, "_compile_session_context")


def while_traced(function: Callable[[list[Tensor]], None], *values: Tensor) -> None:
    """While torch.compile traces: call a function at once, with the fake tensors that stand for ``values``."""
    from torch._dynamo.comptime import comptime

    comptime(_called_while_traced)


def _called_while_traced(context: Any) -> None:
    function, values = context.get_local("function"), context.get_local("values")
    function.as_python_constant()([proxy.node.meta["example_value"] for proxy in values.as_proxy()])


def only_inlined(*functions: object) -> None:
    """Let Dynamo trace functions, or all of a class, only where functions that it compiles call them.

    Behind a graph break that it cannot resume from, it would compile each call by itself.
    """
    eval_frame = torch._C._dynamo.eval_frame
    set_strategy: Any = getattr(eval_frame, "set_code_exec_strategy", None)
    if set_strategy is None:
        return
    action: Any = eval_frame._FrameAction
    codes = [code for function in functions for code in _codes(function)]
    for code in codes:
        set_strategy(code, eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT))
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]


def _codes(function: object) -> list[CodeType]:
    if isinstance(function, type):
        return [code for each in vars(function).values() for code in _codes(each)]
    function = getattr(function, "fget", getattr(function, "__func__", function))  # of properties and class methods
    return [function.__code__] if isinstance(function, FunctionType) else []


def running_ddp() -> Any:
    """The DistributedDataParallel whose forward is running; None if none is, or that cannot be told."""
    from torch.nn.parallel import DistributedDataParallel

    active = getattr(DistributedDataParallel, "_get_active_ddp_module", None)
    return None if active is None else active()


def process_groups() -> list[Any]:
    """All process groups: modules hold some (Megatron, nanotron), and they cannot be copied."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return []
    world: Any = getattr(distributed.distributed_c10d, "_world", None)
    return [*getattr(world, "pg_map", ())]


def default_store() -> Store:
    """The store through which the ranks of the default process group found each other."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def keep_busy(cycles: int) -> None:
    """Keep the current GPU busy for so many cycles, where torch knows how."""
    sleep = getattr(torch.cuda, "_sleep", None)
    if sleep is not None:
        sleep(cycles)
