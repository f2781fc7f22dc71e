"""Counts what a pass of a network costs, from its configuration alone: on the meta device, operator by operator."""

import math
import weakref
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from sdopt.apps.foresight.latency import Costs
from sdopt.apps.foresight.software import FUSED
from sdopt.pipelines.random_weights import empty_part

_VIEWS = (
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "split", "split_with_sizes",
    "chunk", "unsqueeze", "squeeze", "detach", "alias", "as_strided", "unbind", "empty", "empty_like", "new_empty",
)  # fmt: skip
"""Operators that start no kernel."""


def trace(function: Any, *inputs: Any, kept: Any = (), **more: Any) -> Costs:
    """Runs a function once on the meta device; returns what it costs.

    Tensors that are `kept` are alive meanwhile, and count towards the peak.
    """
    owner = getattr(function, "__self__", function)
    observer = _Observer(owner if isinstance(owner, torch.nn.Module) else None)
    for tensor in kept:
        observer.allocate(tensor)
    with torch.no_grad(), _FusedAttention(observer), observer:
        function(*inputs, **more)
    return observer.costs


class _Observer(TorchDispatchMode):
    """Counts each operator, and the bytes of what operators have made until it is freed."""

    def __init__(self, network: torch.nn.Module | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.costs = Costs()
        self._alive = 0
        # Views of parameters must not count as new storages.
        weights = [] if network is None else [*network.parameters(), *network.buffers()]
        self._seen = {weight.untyped_storage()._cdata for weight in weights}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        outcome = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        outputs = [
            tensor
            for tensor in tree_leaves(outcome)
            if isinstance(tensor, torch.Tensor)
        ]
        for tensor in outputs:
            self.allocate(tensor)
        if name not in _VIEWS:
            self._count(func, name, args, kwargs or {}, outcome, outputs)
        return outcome

    def _count(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        outcome: Any,
        outputs: list[torch.Tensor],
    ) -> None:
        inputs = [
            tensor
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, torch.Tensor)
        ]
        moved = float(sum(math.prod(tensor.shape) for tensor in (*inputs, *outputs)))
        self.costs.moved += moved
        self.costs.kernels += 1
        counter = flop_registry.get(func.overloadpacket)
        if counter is None:
            self.costs.between += moved
        elif "convolution" in name:
            self.costs.convolutions += counter(*args, **kwargs, out_val=outcome)
        else:
            self.costs.products += counter(*args, **kwargs, out_val=outcome)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Counts one call of fused attention; returns its output."""
        result = torch.empty(
            *query.shape[:-1], value.shape[-1], dtype=query.dtype, device=query.device
        )
        rows = math.prod(query.shape[:-1])
        widths = query.shape[-1], value.shape[-1]
        scores = 2.0 * rows * key.shape[-2]
        self.costs.attention += scores * sum(widths)
        self.costs.filling += scores * sum(filled(width) - width for width in widths)
        self.costs.moved += sum(
            math.prod(tensor.shape) for tensor in (query, key, value, result)
        )
        self.costs.kernels += 1
        return result

    def allocate(self, tensor: torch.Tensor) -> None:
        """Counts the storage of a tensor from now until it is freed, once."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(key)
        self._alive += size
        self.costs.peak = max(self.costs.peak, self._alive)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._alive -= size


def filled(width: int) -> int:
    """Returns the width of a head that a fused kernel takes the time of: it is compiled for few, and has a softmax."""
    return next((length for length in _HEADS if length >= width), width) + _SOFTMAX


_HEADS = (32, 64, 96, 128, 192, 256)
"""Widths of heads that kernels of fused attention are compiled for; narrower heads are filled with zeros."""

_SOFTMAX = 24
"""Numbers of a head whose products take as long as the softmax: heads of 64 reach six sevenths of what 128 do."""


class _FusedAttention(TorchFunctionMode):
    """Replaces PyTorch's fused attention, which the meta device would compute with all scores, by its output alone."""

    def __init__(self, observer: _Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            named = {
                name: value
                for name, value in (kwargs or {}).items()
                if name in ("query", "key", "value")
            }
            return self._observer.attend(*args[:3], **named)
        return func(*args, **(kwargs or {}))


def on_meta(module: torch.nn.Module, dtype: torch.dtype) -> Any:
    """Moves a network to the meta device in one type; diffusers' own `to` warns of parts that it keeps in float32."""
    return torch.nn.Module.to(module, "meta", dtype)


def denoiser_inputs(
    unet: Any, samples: int, width: int, height: int, dtype: torch.dtype
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the inputs of a denoiser for some samples of a size in pixels."""
    config = unet.config
    with torch.device("meta"):
        sample = torch.empty(
            samples, config.in_channels, height // 8, width // 8, dtype=dtype
        )
        states = torch.empty(samples, 77, config.cross_attention_dim, dtype=dtype)
        more: dict[str, Any] = {}
        if config.get("addition_embed_type") == "text_time":
            wide = (
                config["projection_class_embeddings_input_dim"]
                - 6 * config["addition_time_embed_dim"]
            )
            added = {
                "text_embeds": torch.empty(samples, wide, dtype=dtype),
                "time_ids": torch.empty(samples, 6),
            }
            more = {"added_cond_kwargs": added}
    return [sample, torch.tensor(1.0, device="meta"), states], more


@lru_cache(maxsize=64)
def network(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Builds a network of a pipeline's folder on the meta device, in one type."""
    return on_meta(empty_part(folder, name), dtype)


@lru_cache(maxsize=256)
def traced(
    folder: Path, name: str, width: int, height: int, attention: str
) -> tuple[Costs, int]:
    """Traces two samples of the denoiser (`unet`) or the decoder (`vae`) in float16.

    Returns:
        The costs, and the number of parameters, which are read once however many samples there are.
    """
    from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

    part = network(folder, name, torch.float16)
    # Attention that keeps its scores in the kernel, or that writes them to memory.
    part.set_attn_processor(
        AttnProcessor2_0() if attention == FUSED else AttnProcessor()
    )
    if name == "vae":
        shape = 2, part.config.latent_channels, height // 8, width // 8
        latents = torch.empty(shape, dtype=torch.float16, device="meta")
        return trace(part.decode, latents), sum(
            p.numel() for p in part.decoder.parameters()
        )
    inputs, more = denoiser_inputs(part, 2, width, height, torch.float16)
    return trace(part, *inputs, **more), sum(p.numel() for p in part.parameters())


def pass_costs(
    folder: Path,
    name: str,
    samples: int,
    width: int,
    height: int,
    attention: str = FUSED,
) -> Costs:
    """Returns the costs of a pass; all grow with the samples, except for launches and reading the weights."""
    two, weights = traced(folder, name, width, height, attention)
    share = samples / 2
    moved, peak = (two.moved - weights) * share + weights, two.peak * share
    return replace(two.times(share), moved=moved, kernels=two.kernels, peak=peak)
