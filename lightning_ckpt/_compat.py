"""Private PyTorch names that have no public counterpart, each with its reason."""

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._C._autograd import (
    _disable_profiler,
    _disable_profiler_legacy,
    _enable_profiler,
    _enable_profiler_legacy,
    _prepare_profiler,
    _profiler_enabled,
)
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _EventType,
    _ExperimentalConfig,
)
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.data._utils.pin_memory import pin_memory

# The types of `torch.ops.aten.mm.default` and `torch.ops.aten.mm`. `torch.ops` is public, its element types are not
# exported, and a list of operators has to be told from anything else a user may pass.
# `NormBase` is the one class above every BatchNorm, SyncBatchNorm and InstanceNorm, and `DropoutBase` the one above
# every dropout; the public names list them singly.
# `FakeTensor` has no public name; operators on it are asked for a shape and compute nothing. `FakeTensorMode` makes
# them, and the exceptions of its module are what an operator raises that has to know a value.
# `StorageWeakRef` tells whether memory is still held, and keeps its identity from being given to other memory.
# `TorchDispatchMode` is what every tool that watches operators is made of, PyTorch's own FLOP counter too.
__all__ = [
    "AllocationRecording",
    "CudaAllocationHistory",
    "CudaAllocationRecording",
    "DropoutBase",
    "FakeTensor",
    "FakeTensorMode",
    "NormBase",
    "OpOverload",
    "OpOverloadPacket",
    "StorageWeakRef",
    "TorchDispatchMode",
    "allocations_during",
    "compiled_graphs",
    "composable_checkpoint",
    "in_checkpoint_replay",
    "inside_checkpoint",
    "is_compiled",
    "pinned",
    "store_of_the_process_group",
    "without_modes",
]


class AllocationRecording:
    """What the CPU allocator does from here on: every block that is allocated, and the free of each of these.

    The public profiler reports memory summed by operator, which hides the peak within one. The events behind it have no
    public door. A free is told with the size of whatever PyTorch last recorded at that address, which for a block of
    before may be another, long gone: so only blocks whose allocation was seen count.
    """

    def __init__(self) -> None:
        _refuse_a_second_profiler()
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or some builds tell of every start and stop on the terminal
        self._held: set[int] = set()
        _start()

    def restart(self) -> list[int]:
        """Return the deltas so far, in bytes and in order of time, and record on."""
        with _no_collection():
            ended = _disable_profiler()
            _start()
        return [nbytes for _, nbytes in self._events(ended)]

    def stop(self) -> list[int]:
        """Return the deltas so far, in bytes and in order of time, and stop recording."""
        return [nbytes for _, nbytes in self.stop_timed()]

    def stop_timed(self) -> list[tuple[int, int]]:
        """As `stop`, with the time of each delta: (nanoseconds since the epoch, bytes)."""
        return self._events(_disable_profiler())

    def _events(self, ended: Any) -> list[tuple[int, int]]:
        told = [event for event in ended.experimental_event_tree() if event.tag == _EventType.Allocation]
        events = []
        # Sorted by time alone: of two events in one nanosecond the recorded order is the true one.
        for event in sorted(told, key=attrgetter("start_time_ns")):
            block, nbytes = event.extra_fields.ptr, event.extra_fields.alloc_size
            if event.extra_fields.device.type != "cpu" or (nbytes < 0 and block not in self._held):
                continue
            (self._held.add if nbytes > 0 else self._held.discard)(block)
            events.append((event.start_time_ns, nbytes))
        return events


def allocations_during(call: Callable[[], Any]) -> tuple[Any, list[int]]:
    """Return what a call returns, and the CPU allocator's events meanwhile: deltas in bytes, in order.

    For calls so short, or so many, that `AllocationRecording` would be most of the work: Kineto takes ten times as long
    to start, and prints two lines to stderr each time. This is the profiler before it, which has no public door.
    """
    _refuse_a_second_profiler()
    _enable_profiler_legacy(_configured(ProfilerState.CPU))
    try:
        result = call()
    finally:
        threads: Any = _disable_profiler_legacy()
    events = (event for thread in threads for event in thread if event.kind() == "memory_alloc")
    return result, [event.cpu_memory_usage() for event in events]


def _refuse_a_second_profiler() -> None:
    if _profiler_enabled():  # it would end the first one in silence
        raise RuntimeError("a profiler is running already, and PyTorch runs one at a time: leave that one first")


class CudaAllocationRecording:
    """The CUDA caching allocator's events since this was made, as `AllocationRecording` has the host's.

    PyTorch documents its memory snapshots, and takes them by two private functions.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.memory._record_memory_history("all", context=None, clear_history=True)

    def stop_timed(self) -> list[tuple[int, int]]:
        """Return (nanoseconds since the epoch, bytes) of each allocation and each free, in order, and stop."""
        traces: Any = torch.cuda.memory._snapshot(self._device)["device_traces"]
        torch.cuda.memory._record_memory_history(None)
        sign = {"alloc": 1, "free_completed": -1}
        events = traces[self._device.index or 0]
        return [
            (event["time_us"] * 1000, sign[event["action"]] * event["size"])
            for event in events
            if event["action"] in sign
        ]


class CudaAllocationHistory:
    """What CUDA's allocator does from here on, for PyTorch's visualiser: documented, by functions named as private."""

    def __init__(self) -> None:
        # The latest events at most, or a long run would fill the host's memory with them.
        torch.cuda.memory._record_memory_history(max_entries=100_000)

    def save(self, path: Path) -> None:
        """Write it as a pickle."""
        torch.cuda.memory._dump_snapshot(str(path))

    def stop(self) -> None:
        """Record no longer."""
        torch.cuda.memory._record_memory_history(enabled=None)


def _configured(state: ProfilerState) -> ProfilerConfig:
    """Memory, and nothing else."""
    return ProfilerConfig(state, False, True, False, False, False, _ExperimentalConfig())


def _start() -> None:
    config, activities = _configured(ProfilerState.KINETO), {ProfilerActivity.CPU}
    _prepare_profiler(config, activities)
    # A function that is entered in one recording and left in the next writes into the memory of the first, which is
    # gone: a training step is such a function, since `Optimizer.step` takes it as a closure. So no function is recorded
    # but those of a scope that only TorchScript's static runtime enters. The public profiler records all of them.
    # Its stub leaves out the third argument.
    _enable_profiler(config, activities, {RecordScope.STATIC_RUNTIME_MODEL})  # type: ignore[call-arg]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A tensor that the garbage collector frees between two recordings would count as held for ever."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def in_checkpoint_replay() -> bool:
    """Whether the caller runs within a forward that `torch.utils.checkpoint` replays.

    PyTorch tells nobody, and a model that its owner has checkpointed must not have its work counted twice. Looks
    outward for the frame that replays (`unpack_hook`, or `backward` of the reentrant kind), no further than the
    backward pass that is being run.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name, module = frame.f_code.co_name, frame.f_globals.get("__name__")
        if name == "_engine_run_backward":
            return False
        if module == "torch.utils.checkpoint" and name in ("unpack_hook", "backward"):
            return True
        frame = frame.f_back
    return False


def composable_checkpoint(module: nn.Module) -> Any:
    """What PyTorch's composable `checkpoint` keeps of a module: its `enable_hook` says whether it acts; else `None`.

    The whole of it is private. What nobody has loaded nobody has applied, and to load it would load all of
    `torch.distributed`.
    """
    room: Any = sys.modules.get("torch.distributed._composable.checkpoint_activation")
    states: Any = sys.modules.get("torch.distributed._composable.contract")
    # Asked of a module that has no such state, PyTorch would leave an empty one on it.
    applied = room is not None and states is not None and states.STATE_KEY in vars(module)
    return room.checkpoint.state(module) if applied else None


def inside_checkpoint() -> bool:
    """Whether the caller runs within a forward that `torch.utils.checkpoint` was given, there or in its replay."""
    return getattr(who_saves(), "__module__", None) == "torch.utils.checkpoint" or in_checkpoint_replay()


def compiled_graphs() -> int:
    """How many graphs `torch.compile` has made in this process so far; it has no public count."""
    utils: Any = sys.modules.get("torch._dynamo.utils")  # nothing is compiled before this is imported
    return int(utils.counters["stats"]["unique_graphs"]) if utils is not None else 0


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is `torch.compile`'s wrapper, or was compiled in place; neither leaves a public mark."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def set_activation_memory_budget(share: float) -> Callable[[], None]:
    """Set what part of its activations compiled code may keep, and return what puts the value found back.

    PyTorch documents the setting for users, in a module whose name is private.
    """
    config: Any = import_module("torch._functorch.config")
    found = config.activation_memory_budget
    config.activation_memory_budget = share

    def undo() -> None:
        config.activation_memory_budget = found

    return undo


class _Saving(torch.autograd.Function):
    """Saves tensors and does nothing else; the public way to a saved tensor. Nothing depends on its result."""

    @staticmethod
    def forward(requires_grad: Tensor, *tensors: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])


class SavedInput:
    """A tensor saved as autograd saves it: watched for changes in place, and passed through saved-tensor hooks.

    PyTorch 2.13 has a direct way to it that costs a tenth of the public one, on which earlier releases rely.
    """

    __slots__ = ("_saved",)

    def __init__(self, tensor: Tensor) -> None:
        make: Any = getattr(torch._C._autograd, "_make_saved_tensor", None)
        save: Any = _Saving.apply
        self._saved: Any = make(tensor, is_output=False) if make else save(torch.empty(0, requires_grad=True), tensor)

    def unpack(self) -> Tensor:
        """The tensor. Raises what autograd raises where it was changed in place since."""
        if isinstance(self._saved, Tensor):
            node: Any = self._saved.grad_fn
            return node.saved_tensors[0]  # type: ignore[no-any-return]
        return self._saved.unpack()  # type: ignore[no-any-return]


def early_stop_is_on() -> bool:
    """Whether `torch.utils.checkpoint.set_checkpoint_early_stop` leaves early stop on: it has no getter."""
    enabled = torch.utils.checkpoint._enable_checkpoint_early_stop
    return enabled is None or bool(enabled)


def who_saves() -> object:
    """What saves for backward where the caller runs: the innermost saved-tensor hook; `None` where autograd does.

    Hooks can be set in public, but not seen. The same hook means the same stretch of code: a checkpoint sets its own
    for each call and each replay.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks and hooks[0]


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP gathers and frees the parameters of a module, told by name: to import its class loads all of it."""
    return any(kind.__name__ in ("FSDPModule", "FullyShardedDataParallel") for kind in type(module).__mro__)


def original_class(module: nn.Module) -> type:
    """The class a module was made of, before `fully_shard` put two before it."""
    made_of = type(module).__mro__
    return made_of[2] if made_of[1].__name__ == "FSDPModule" else made_of[0]


def store_of_the_process_group(prefix: str) -> Any:
    """Keys of one's own in the store through which the default process group's ranks have met.

    It is reached without any of them waiting.
    """
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    return PrefixStore(prefix, _get_default_store())


def backward_under_way() -> int:
    """The number of the backward pass that runs on this thread; -1 where none runs."""
    return torch._C._current_graph_task_id()


def at_the_end_of_backward(callback: Callable[[], None]) -> None:
    """Call back when the running backward pass ends.

    Distributed training relies on the engine's queue for the same, and there is no public door to it. An error in the
    callback comes out of `backward()`.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def storage_id(tensor: Tensor) -> int:
    """The identity of the memory behind a tensor, shared by its views; a data pointer does not exist for fake ones."""
    return int(tensor.untyped_storage()._cdata)


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Run operators that no dispatch mode sees, for the bookkeeping of what watches a block's own."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()


def inside_transform() -> bool:
    """Whether a `torch.func` transform (`grad`, `jvp`, `vmap`, ...) is under way: they take no saved-tensor hooks."""
    return torch._C._functorch.maybe_current_level() is not None


# What an operator on fake tensors raises where it can't go on; each names the operator in `func`.
NO_FAKE_RESULT = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


def called_by_the_engine() -> bool:
    """Whether the autograd engine called the operator that a dispatch mode sees, and no Python code in between.

    To be asked in a mode's `__torch_dispatch__`. The engine has no public mark; its frame has a name.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_name == "__torch_dispatch__"
        or frame.f_globals.get("__name__", "").startswith(("torch._dynamo", "torch._compile"))
    ):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def pinned(batch: Any) -> Any:
    """The batch in pinned memory, as a `DataLoader` does it with what it collates; for batches collated elsewhere."""
    return pin_memory(batch) if torch.accelerator.is_available() else batch
