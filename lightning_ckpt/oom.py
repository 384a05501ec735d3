"""Telling an out-of-memory error from any other, and letting go of what a caught one holds."""

import errno
import re
import traceback
from collections.abc import Iterator

import torch

# How the parts of PyTorch and its libraries say it in the text of a plain RuntimeError. A bare "out of memory" is not
# enough: it also stands in messages about disks and address books. cuDNN's NOT_SUPPORTED is not in the list: it names
# wrong shapes and dtypes more often than memory.
_TEXTS = re.compile(
    r"\b(CUDA|HIP|ROCM|XPU|SYCL|MPS|NPU|HPU|MUSA|accelerator)\b.*\bout of memory"
    r"|\b[A-Z]+_STATUS_ALLOC_FAILED\b"  # cuDNN, cuBLAS, cuSPARSE, cuSOLVER, hipBLAS, rocBLAS
    r"|\bCUDA_ERROR_OUT_OF_MEMORY\b|\bUR_RESULT_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY\b"
    r"|\bDefaultCPUAllocator\b.*\b(can't allocate|not enough) memory"
    r"|\bcan(no|')t allocate memory",  # the C library's words for ENOMEM, as in "unable to mmap ...: Cannot allocate"
    re.IGNORECASE | re.DOTALL,
)

# What kernels say to more work than they can be launched for or index; and oneDNN's, where it gets no memory.
_REFUSALS = re.compile(
    r"\binvalid configuration argument\b|\bcanUse32BitIndexMath\b|\bcould not create a primitive\b(?! descriptor)",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether `error` means that memory ran out, on an accelerator or on the host.

    True for `torch.OutOfMemoryError` whatever its text, for `MemoryError`, for the operating system's ENOMEM, for a
    `RuntimeError` in the words of CUDA, HIP, XPU, MPS, cuDNN, cuBLAS or PyTorch's CPU allocator, and for an exception
    that was raised from, or while handling, one of these. `KeyboardInterrupt` and its like never are.
    """
    return isinstance(error, Exception) and any(map(_says_so, _chain(error)))


def is_refused_by_a_kernel(error: BaseException) -> bool:
    """Tell whether a kernel did not take the work it was given.

    Where it has taken less of the same, it was too much; or else the work may be wrong whatever its amount.
    """
    return any(isinstance(link, RuntimeError) and _REFUSALS.search(str(link)) for link in _chain(error))


def release(error: BaseException) -> None:
    """Free the tensors that `error` keeps alive through the local variables of the frames it passed.

    Frames that still run are left alone. Call it outside the `except` block, or drop the exception right after: while
    it is being handled the interpreter holds it.
    """
    for link in _chain(error):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None


def _says_so(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _TEXTS.search(str(error)) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception, what it was raised from, and what was being handled when it was raised."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
