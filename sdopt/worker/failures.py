"""Determines the status of a variant whose worker raised an error."""

import torch

from sdopt.record.records import Status
from sdopt.worker.protocol import WorkerError

_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "status_alloc_failed",  # of cuBLAS and of cuDNN
    "device_allocation_failed",  # CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    "workspace can't be allocated",  # of DeepSpeed
    "workspace is null",  # of DeepSpeed, too
)

_MAYBE_OUT_OF_MEMORY = (
    "cublas_status_not_initialized",
    "cudnn_status_not_initialized",
    "cudnn_status_internal_error",
    "unable to find an engine",
    "busy or unavailable",  # also raised in exclusive compute mode, for all processes but one
    "api call failed at",  # raised by AOTInductor's code, which only prints the cause
    "failed to map segment",  # raised on loading a library; also if its folder is mounted noexec
)
"""Messages of libraries that could not allocate a handle or a workspace; some have other causes, too."""


def describe_error(error: Exception) -> WorkerError:
    """Returns the WorkerError for an error; recognises running out of memory even if a compiler wrapped it."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = getattr(cause, "inner_exception", None) or cause.__cause__ or cause.__context__
    texts = [str(link).lower() for link in chain]
    out_of_memory = any(isinstance(link, torch.OutOfMemoryError | MemoryError) for link in chain) or any(
        words in text for words in _OUT_OF_MEMORY for text in texts
    )
    maybe = any(words in text for words in _MAYBE_OUT_OF_MEMORY for text in texts)
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return WorkerError(Status.OUT_OF_MEMORY if out_of_memory else Status.FAILED, reason, may_be_memory=maybe)
