"""Backends of diffusers' attention dispatcher, for transformers: axis attention."""

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Annotated, Any

from typing_extensions import override

from sdopt.contract import LATENCY, MEMORY, NOTHING
from sdopt.hardware.cards import FLASH_ATTENTION
from sdopt.options import Context, Contract, Finding, Optimization, Proof, Stage, Trace
from sdopt.options.attention import backend_of
from sdopt.options.declarations import Extra
from sdopt.pipelines.loading import (
    LoadedModel,
    family_of,
    guidance_of,
    published_denoiser,
)
from sdopt.pipelines.parts import Pipeline, denoiser_of, unwrapped
from sdopt.schema import Model, OneOf

_OF_PYTORCH = {
    "native": None,
    "_native_math": "math",
    "_native_flash": "flash",
    "_native_efficient": "mem_efficient",
    "_native_cudnn": "cudnn",
}
"""Backends that call PyTorch's scaled dot-product attention, and the only back end that they allow, if any."""

_OF_PACKAGES = (
    *("flash", "flash_varlen", "_flash_3", "_flash_varlen_3", "xformers"),
    *(
        "sage",
        "sage_varlen",
        "_sage_qk_int8_pv_fp8_cuda",
        "_sage_qk_int8_pv_fp8_cuda_sm90",
    ),
    *("_sage_qk_int8_pv_fp16_cuda", "_sage_qk_int8_pv_fp16_triton"),
)
"""Backends of installed packages."""

_OF_THE_HUB = (
    *("flash_hub", "flash_varlen_hub", "_flash_3_hub", "_flash_3_varlen_hub"),
    *("flash_4_hub", "sage_hub", "sage_blackwell_hub"),
)
"""Backends whose compiled kernel diffusers fetches from a repository of the hub."""

_FLEX = "flex"
"""PyTorch's flex_attention, which a compiler turns into one kernel; without one it writes all scores to memory."""

_KERNELS = {
    # CuTe names a kernel by module and class, and SageAttention 3 begins as FlashAttention 3 did.
    "flash_4": ("FlashAttentionForward",),
    "flash_3": ("FlashAttnFwd",),
    "flash": ("flash_fwd",),
    "sage_blackwell": ("compute_attn_ws",),
    # On cards of capability 8.6 it runs its Triton kernels.
    "sage": ("qk_int_sv", "qk_int8_sv", "_attn_fwd"),
    "xformers": ("fmha_cutlass", "flash_fwd", "FlashAttnFwd"),
    _FLEX: ("flex_attention",),
}
"""Parts of the names of kernels, by how a backend's name begins; the first that fits counts."""

_COPY_OF_PYTORCH = "pytorch_"
"""The name space that PyTorch gives its copies of these kernels."""

_NO_MASK = "`attn_mask` is not supported"
"""How the error of a backend begins that takes no mask."""


@dataclass(frozen=True)
class Dispatched(Optimization):
    """A backend of diffusers' attention dispatcher, for each layer of a transformer (`set_attention_backend`).

    diffusers would make it the default of the whole process too, also for a baseline that is loaded later: sdopt puts
    that back.
    """

    stage = Stage.ATTENTION

    backend: Annotated[str, OneOf((*_OF_PYTORCH, *_OF_PACKAGES, _FLEX))] = "native"
    """The name that diffusers gives it; those of other packages need these."""

    @property
    @override
    def contract(self) -> Contract:
        return Contract.LOSSY if "sage" in self.backend else Contract.EQUIVALENT

    @property
    @override
    def claims(self) -> frozenset[str]:
        return (
            NOTHING if self.backend in ("native", "_native_math") else LATENCY | MEMORY
        )

    @property
    @override
    def sets_process(self) -> bool:
        return _OF_PYTORCH.get(self.backend) is not None

    @property
    @override
    def diffusers_lines(self) -> tuple[str, ...]:
        setting = f'pipe.unet.set_attention_backend("{self.backend}")'
        return (
            "from diffusers import attention_backend",
            f'with attention_backend("native"): {setting}',
        )

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        family = family_of(ctx.model)
        if family.is_unet:
            return [
                "diffusers' dispatcher runs no attention of UNets: choose math, flash or mem_efficient"
            ]
        name = published_denoiser(ctx.model).get("_class_name", "")
        if name and not _is_dispatched(name):
            return [
                f"the layers of a {name} do not ask diffusers' dispatcher: choose math, flash or mem_efficient"
            ]
        problems = _lacking(self.backend) if ctx.device.is_here else []
        return problems + self._masked(ctx, name)

    def _masked(self, ctx: Context, name: str) -> list[str]:
        """Returns the conflict, if any, of a backend that does not mask what the transformer of this name says."""
        family = family_of(ctx.model)
        masks = family.encoding.masks
        if masks == "never" or _masks_as_told(self.backend, name):
            return []
        comes = masks == "always" or ctx.workload.batch_size > 1
        # One that raises an error may run where no mask comes; any other would draw other images.
        if not (comes or _raises_at_masks(self.backend)):
            guidance = guidance_of(ctx.model)
            both = guidance.samples_a_call(ctx.workload.guidance(ctx.model)) > 1
            comes = both or isinstance(ctx.model, LoadedModel)
        if not comes:
            return []
        return [
            f"{self.backend} takes no mask, which {family.title} needs here: choose attention.backend=_native_efficient"
        ]

    @override
    def fixed_for(self, model: Model) -> bool:
        """Returns whether prompts of different lengths must not be drawn in a batch, since masks come with them."""
        name = published_denoiser(model).get("_class_name", "")
        return family_of(model).encoding.masks == "batches" and not _masks_as_told(
            self.backend, name
        )

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        denoiser = denoiser_of(pipe)
        layers = [
            layer
            for layer in denoiser.modules()
            if hasattr(getattr(layer, "processor", None), _CHOSEN)
        ]
        for layer in layers:  # `undo` restores the layers' own ones
            layer.processor = copy(layer.processor)
        with _same_default():
            denoiser.set_attention_backend(self.backend)

        def proof(trace: Trace) -> Finding:
            chosen = chosen_backends(unwrapped(denoiser_of(pipe)))
            kernels = self._of_pytorch(trace)
            if self.backend in _OF_PYTORCH:
                ran = self._only_its_own(trace, kernels, pipe)
            else:
                others, kernels = kernels, _of_package(self.backend, trace)
                ran = bool(kernels) and not others
                if self.backend == _FLEX and not trace.kernels:  # of a CPU
                    unfused = trace.denoiser.operators["aten::logsumexp"]
                    ran = trace.denoiser.compiled_regions > 0 and not (
                        unfused or others
                    )
            counts = ", ".join(
                f"{name.strip('_')[:60]} ×{count}" for name, count in kernels.items()
            )
            summary = f"{len(layers)} layers with {', '.join(chosen) or 'no backend'}; {counts or 'no kernel of it'}"
            engaged = bool(layers) and chosen == [self.backend] and ran
            return Finding(engaged, summary, {"backends": chosen, "kernels": kernels})

        return proof

    def _of_pytorch(self, trace: Trace) -> dict[str, int]:
        """Returns the operators of PyTorch's attention; if a graph hides them, its kernels."""
        kernels = {}
        for name, count in trace.fused_attention.items():
            if backend_of(name) and not _is_of_package(self.backend, name):
                kernels[name] = count
        return kernels

    def _only_its_own(
        self, trace: Trace, kernels: Mapping[str, int], pipe: Pipeline
    ) -> bool:
        """Returns whether attention ran in the back end of PyTorch that the backend allows."""
        kernel = _OF_PYTORCH[self.backend]
        kinds = {backend_of(name) for name in kernels}
        if kinds:
            return kernel is None or kinds == {kernel}
        # A compiler decomposes the back end `math` into products.
        return kernel in (None, "math") and trace.is_compiled(denoiser_of(pipe))


def _of_package(backend: str, trace: Trace) -> dict[str, int]:
    """Returns how often each kernel of a package's backend ran in the denoiser."""
    ran = {}
    for name, count in trace.kernels.items():
        if _is_of_package(backend, name):
            ran[name] = count
    return ran


def _is_of_package(backend: str, name: str) -> bool:
    """Returns whether a name is of a kernel that a package's backend runs, and not of PyTorch's copy of it."""
    if backend in _OF_PYTORCH or _COPY_OF_PYTORCH in name or name.startswith(_OPERATOR):
        return False
    for begin, parts in _KERNELS.items():
        if backend.lstrip("_").startswith(begin):
            return any(part in name for part in parts)
    return False


_OPERATOR = "_scaled_dot_product"
"""How operators of PyTorch's attention begin, in `Trace.fused_attention`."""


@dataclass(frozen=True)
class HubKernel(Dispatched):
    """A backend whose compiled kernel is fetched from the hub (package kernels), and runs once its repository is named.

    diffusers says which repository; it refuses those of publishers that the hub does not trust.
    """

    needs = (
        FLASH_ATTENTION,
        Extra("kernels", ("kernels",)),
    )

    backend: Annotated[str, OneOf(_OF_THE_HUB)] = "_flash_3_hub"
    """The name that diffusers gives it."""
    kernel: str | None = None
    """The repository of the hub whose compiled code is to run, as owner/name."""

    @override
    def lacking(self, ctx: Context) -> list[str]:
        if family_of(ctx.model).is_unet:
            return []
        repository = _repository_of(self.backend)
        if self.kernel is None:
            return [
                f"compiled code of the hub would run: name it, attention.kernel={repository}"
            ]
        if self.kernel == repository:
            return []
        return [
            f"attention.kernel={self.kernel}: diffusers runs {repository} as {self.backend}"
        ]


def _repository_of(backend: str) -> str:
    """Returns the repository of the hub from which diffusers fetches the kernel of a backend."""
    from diffusers.models.attention_dispatch import (
        _HUB_KERNELS_REGISTRY,
        AttentionBackendName,
    )

    return str(_HUB_KERNELS_REGISTRY[AttentionBackendName(backend)].repo_id)


_CHOSEN = "_attention_backend"
"""The attribute of a processor that names the backend of its layer."""


def chosen_backends(denoiser: Any) -> list[str]:
    """Returns the backends that diffusers' dispatcher was told for the layers of a denoiser; "" for none."""
    processors = [
        layer.processor
        for layer in denoiser.modules()
        if hasattr(getattr(layer, "processor", None), _CHOSEN)
    ]
    kinds = {getattr(processor, _CHOSEN) for processor in processors}
    return sorted(str(getattr(kind, "value", kind or "")) for kind in kinds)


def default_backend() -> str:
    """Returns the backend of the whole process, which layers without one of their own use."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    return str(_AttentionBackendRegistry.get_active_backend()[0].value)


def set_default_backend(backend: str) -> None:
    """Sets the backend of the whole process."""
    from diffusers.models.attention_dispatch import (
        AttentionBackendName,
        _AttentionBackendRegistry,
    )

    _AttentionBackendRegistry.set_active_backend(AttentionBackendName(backend))


@contextmanager
def _same_default() -> Iterator[None]:
    """Puts the backend of the whole process back."""
    before = default_backend()
    try:
        yield
    finally:
        set_default_backend(before)


def _is_dispatched(name: str) -> bool:
    """Returns whether the attention of a transformer asks diffusers' dispatcher, from the classes that its module has.

    A processor that asks it has a backend; a layer names its processor's class.
    """
    import diffusers

    for value in vars(sys.modules[getattr(diffusers, name).__module__]).values():
        processor = getattr(value, "_default_processor_cls", value)
        if isinstance(processor, type) and hasattr(processor, _CHOSEN):
            return True
    return False


def _masks_as_told(backend: str, name: str) -> bool:
    """Returns whether a backend masks the keys that a transformer of this name says, from the code of both.

    The class must have been imported.
    """
    import diffusers

    if not name or _raises_at_masks(backend):
        return False
    module = sys.modules[getattr(diffusers, name).__module__]
    code = inspect.getsource(module)
    if backend == _FLEX:  # takes a mask of two dimensions for one of queries
        return _OF_KEYS in code
    if backend == "xformers":  # adds 1 for true, and nothing for false
        return _OF_KEYS not in code
    if "varlen" in backend and "nonzero" not in _function(backend).__code__.co_names:
        return _OF_THE_LAST in code  # leaves out as many of the last keys
    return True


_OF_KEYS = "attention_mask[:, None, None, :]"
"""How a mask of keys gets four dimensions."""

_OF_THE_LAST = "attn_mask[i, :seq_len] = 1"
"""How a mask is made in which all that is false comes last."""


def _raises_at_masks(backend: str) -> bool:
    """Returns whether a backend raises an error for a mask, from the texts in its code."""
    constants = _function(backend).__code__.co_consts
    texts = [text for text in constants if isinstance(text, str)]
    return any(text.startswith(_NO_MASK) for text in texts)


def _function(backend: str) -> Any:
    from diffusers.models.attention_dispatch import (
        AttentionBackendName,
        _AttentionBackendRegistry,
    )

    return inspect.unwrap(
        _AttentionBackendRegistry._backends[AttentionBackendName(backend)]
    )


def _lacking(backend: str) -> list[str]:
    """Returns what diffusers says that a backend needs and this machine lacks."""
    from diffusers.models.attention_dispatch import (
        AttentionBackendName,
        _check_attention_backend_requirements,
    )

    try:
        _check_attention_backend_requirements(AttentionBackendName(backend))
    except RuntimeError as error:
        return [str(error)]
    return []
