"""Out-of-memory errors: which exceptions are, which are not, and what is freed with one."""

import errno
import gc
import weakref

import pytest
import torch

from lightning_ckpt.oom import is_out_of_memory, is_refused_by_a_kernel, release

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("any text"),
    torch.OutOfMemoryError(),
    torch.OutOfMemoryError("two", "arguments"),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("HIP out of memory. Tried to allocate 1.5 GiB"),
    RuntimeError("XPU out of memory."),
    RuntimeError("MPS backend out of memory (MPS allocated: 18 GB)"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("UR backend failed. UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES), XPU out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("[enforce fail] data. DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    RuntimeError("unable to mmap 64 bytes from file </torch_1_2_0>: Cannot allocate memory (12)"),
]

SOMETHING_ELSE = [
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: invalid configuration argument"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)"),
    RuntimeError("the disk is out of memory blocks"),
    ValueError("CUDA out of memory"),
    OSError(errno.ENOSPC, "No space left on device"),
    KeyError("out of memory"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=repr)
def test_every_way_of_saying_out_of_memory_is_understood(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", SOMETHING_ELSE, ids=repr)
def test_other_errors_are_not_taken_for_it(error: BaseException) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("CUDA error: invalid configuration argument", True),
        ("Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true, but got false.", True),
        ("could not create a primitive", True),
        ("could not create a primitive descriptor for the matmul primitive", False),
        ("CUDA error: invalid argument", False),
        ("CUDA out of memory.", False),
    ],
)
def test_a_kernels_refusal_is_told_from_other_errors(text: str, refused: bool) -> None:
    """Where it is raised from another one too."""
    assert is_refused_by_a_kernel(RuntimeError(text)) == refused
    assert is_refused_by_a_kernel(raised(ValueError("outer"), RuntimeError(text), how="from")) == refused
    assert not is_refused_by_a_kernel(ValueError(text))


def raised(outer: BaseException, inner: BaseException, *, how: str) -> BaseException:
    try:
        try:
            raise inner
        except BaseException as caught:
            if how == "from":
                raise outer from caught
            if how == "from none":
                raise outer from None
            raise outer  # noqa: B904 - the implicit context is what is tested
    except BaseException as error:
        return error


@pytest.mark.parametrize("how", ["from", "while handling"])
def test_one_wrapped_in_another_exception_is_found(how: str) -> None:
    error = raised(ValueError("block 3 failed"), torch.OutOfMemoryError(), how=how)
    assert is_out_of_memory(raised(KeyError("outer"), error, how=how))


def test_a_context_that_its_author_suppressed_does_not_count() -> None:
    assert not is_out_of_memory(raised(ValueError("bad value"), torch.OutOfMemoryError(), how="from none"))


def test_an_interrupt_while_handling_one_stays_an_interrupt() -> None:
    assert not is_out_of_memory(raised(KeyboardInterrupt(), torch.OutOfMemoryError(), how="while handling"))


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


def failing_step(born: list[weakref.ref[torch.Tensor]]) -> None:
    activations = torch.ones(1000)
    born.append(weakref.ref(activations))
    raise torch.OutOfMemoryError("full")


def test_release_frees_the_tensors_of_the_frames_the_error_passed() -> None:
    """A caught exception keeps every local of the failed step alive, the next trial's memory with it."""
    born: list[weakref.ref[torch.Tensor]] = []
    kept = None
    try:
        failing_step(born)
    except torch.OutOfMemoryError as error:
        kept = RuntimeError("wrapper")
        kept.__cause__ = error
    gc.collect()
    assert born[0]() is not None
    release(kept)
    assert born[0]() is None
