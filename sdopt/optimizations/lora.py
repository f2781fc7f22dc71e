"""lora: low-rank updates of the denoiser's weights: as separate layers, fused into the weights, or hot-swapped."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from typing_extensions import override

from sdopt.contract import Contract
from sdopt.errors import UsageError
from sdopt.measure.compilation import compiled_so_far
from sdopt.measure.trace import Trace
from sdopt.optimizations.base import Context, Finding, Optimization, Proof, Stage
from sdopt.pipelines.loading import part_config
from sdopt.pipelines.loras import is_on_hub, lora_file, misfits, rank_of, trains_text_encoder
from sdopt.pipelines.parts import denoiser_of, hook_of, unwrapped
from sdopt.reference import MODEL
from sdopt.schema import Model, bounded

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_NAME = "sdopt"
"""The adapter name in diffusers."""


@dataclass(frozen=True)
class NoLora(Optimization):
    """Uses the model's own weights, without a LoRA."""

    stage: ClassVar[Stage] = Stage.WEIGHTS

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        def proof(trace: Trace) -> Finding:
            layers = len(lora_layers(denoiser_of(pipe)))
            return Finding(not layers, f"{layers} layers with a LoRA" if layers else "no layer has a LoRA")

        return proof


@dataclass(frozen=True)
class Lora(Optimization):
    """The base class of options that load a LoRA, from safetensors files only."""

    stage: ClassVar[Stage] = Stage.WEIGHTS
    contract: ClassVar[Contract] = Contract.LOSSY
    beside_the_weights: ClassVar[bool] = True
    """Whether the LoRA stays in separate layers, which options that join or replace weights would ignore."""

    path: str | None = None
    """A .safetensors file, a folder, or a Hugging Face Hub repository (`owner/name`); null is the folder of the two
    packaged style LoRAs."""
    weight_name: str | None = None
    """The file in a folder or repository; null is `fxemoji.safetensors` for the packaged LoRAs."""

    @property
    def names(self) -> tuple[str | None, ...]:
        """The names of all LoRA files that the option reads."""
        return (self._named(self.weight_name, "fxemoji.safetensors"),)

    def _named(self, name: str | None, packaged: str) -> str | None:
        return packaged if self.path is None and name is None else name

    @override
    def lacking(self, ctx: Context) -> list[str]:
        packaged = ctx.model.weights == "packaged" and ctx.model.name == MODEL.name
        if self.path is None and not packaged:
            return [f"the LoRAs that come with sdopt are for model={MODEL.name}: set lora.path"]
        return []

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        if self.lacking(ctx) or (is_on_hub(self.path) and not self._cached):
            return []  # conflicts are checked before anything is fetched
        found = []
        for name in self.names:
            try:
                found += misfits(lora_file(self.path, name), part_config(ctx.model, "unet"))
            except UsageError as error:
                found += error.problems
        return list(dict.fromkeys(found))

    @property
    def _cached(self) -> bool:
        """Whether the files of a repository are in the local cache of the hub."""
        try:
            return all(lora_file(self.path, name).is_file() for name in self.names)
        except UsageError:
            return False

    @override
    def files(self, model: Model, fetch: bool) -> list[Path]:
        return [lora_file(self.path, name, fetch) for name in self.names]

    def _lines(self, *then: str) -> tuple[str, ...]:
        """Returns diffusers code that loads the LoRA, and then the lines `then`; () for packaged LoRAs."""
        if self.path is None:
            return ()
        file = f", weight_name={self.weight_name!r}" if self.weight_name else ""
        return f"pipe.load_lora_weights({self.path!r}{file}, adapter_name={_NAME!r})", *then

    def _load(self, pipe: "DiffusionPipeline", name: str | None, **how: Any) -> None:
        file = lora_file(self.path, name)
        pipe.load_lora_weights(
            str(file.parent), weight_name=file.name, adapter_name=_NAME, local_files_only=True, **how
        )


@dataclass(frozen=True)
class Loaded(Lora):
    """Loads a LoRA as separate layers, which can be unloaded and cost two extra products per layer."""

    scale: float = bounded(1.0, ge=-100, le=100)
    """Scale of the update."""

    @property
    @override
    def diffusers_lines(self) -> tuple[str, ...]:
        return self._lines(f"pipe.set_adapters({_NAME!r}, adapter_weights={self.scale})")

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        self._load(pipe, self.names[0])
        pipe.set_adapters(_NAME, adapter_weights=self.scale)
        return lambda trace: _adapter_finding(pipe, trace)


@dataclass(frozen=True)
class Fused(Lora):
    """Adds a LoRA to the weights once, so that calls cost the same as without a LoRA."""

    beside_the_weights: ClassVar[bool] = False

    scale: float = bounded(1.0, ge=-100, le=100)
    """Scale of the update."""

    @property
    @override
    def diffusers_lines(self) -> tuple[str, ...]:
        return self._lines(f"pipe.fuse_lora(lora_scale={self.scale})", "pipe.unload_lora_weights()")

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        denoiser = denoiser_of(pipe)
        before = _sums(denoiser)
        self._load(pipe, self.names[0])
        parts = [name for name in pipe._lora_loadable_modules if getattr(pipe, name, None) is not None]
        pipe.fuse_lora(components=parts, lora_scale=self.scale)
        pipe.unload_lora_weights()
        fused = {name for name, total in _sums(denoiser).items() if _differ(total, before.get(name))}

        def proof(trace: Trace) -> Finding:
            now = _sums(denoiser)
            changed = sum(_differ(now[name], before[name]) for name in fused & now.keys())
            left = len(lora_layers(denoiser))
            summary = f"{changed} weights include the LoRA; {left} separate LoRA layers"
            return Finding(0 < changed == len(fused & now.keys()) and not left, summary, {"weights": changed})

        return proof


@dataclass(frozen=True)
class Hotswap(Lora):
    """Loads a LoRA that another LoRA can replace at run time without recompilation.

    The layers get the highest rank of all LoRAs and are padded with zeros, so that a swap changes values but no shapes.
    `pipe.load_lora_weights(folder, weight_name="other.safetensors", adapter_name="sdopt", hotswap=True)` swaps.
    diffusers cannot hot-swap the LoRA of a text encoder.
    """

    other: str | None = None
    """A file in the same folder or repository, swapped in to verify hot-swapping; null is the other packaged style."""
    target_rank: int | None = bounded(None, ge=1, le=100_000)
    """The highest rank of all LoRAs to be swapped in; null is the highest rank of the two files."""

    @property
    @override
    def names(self) -> tuple[str | None, ...]:
        return *super().names, self._named(self.other, "high_contrast.safetensors")

    @override
    def lacking(self, ctx: Context) -> list[str]:
        if self.path is not None and (self.other is None or self.weight_name is None):
            needs = "needs two LoRAs: set lora.path to their folder or repository"
            return [f"{needs}, and lora.weight_name and lora.other to the two files"]
        return super().lacking(ctx)

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        found = super().conflicts(ctx)
        if found or self.lacking(ctx) or (is_on_hub(self.path) and not self._cached):
            return found
        files = [lora_file(self.path, name) for name in self.names]
        found += [
            f"{file.name} updates the text encoder too, which cannot be hot-swapped"
            for file in files
            if trains_text_encoder(file)
        ]
        rank = max(map(rank_of, files))
        if self.target_rank is not None and self.target_rank < rank:
            found.append(f"lora.target_rank={self.target_rank}: the files have ranks up to {rank}")
        return found

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        rank = self.target_rank or max(rank_of(lora_file(self.path, name)) for name in self.names)
        denoiser_of(pipe).enable_lora_hotswap(target_rank=rank)
        self._load(pipe, self.names[0])

        def proof(trace: Trace) -> Finding:
            found = _adapter_finding(pipe, trace)
            graphs, own = compiled_so_far()[1], trace.images()
            start = time.perf_counter()
            self._load(pipe, self.names[1], hotswap=True)
            swap_s, others = time.perf_counter() - start, trace.images()
            self._load(pipe, self.names[0], hotswap=True)
            back, compiled = trace.images(), compiled_so_far()[1] - graphs
            changed = not np.array_equal(own, others)
            facts = {**found.facts, "recompiles": compiled, "other_images": changed, "swap_s": round(swap_s, 4)}
            engaged = found.engaged and changed and np.array_equal(own, back) and not compiled
            summary = f"{found.summary}; swapped for another LoRA in {swap_s:.2f} s with {compiled} recompilations"
            return Finding(engaged, summary, facts)

        return proof


def _adapter_finding(pipe: "DiffusionPipeline", trace: Trace) -> Finding:
    """Checks whether LoRA layers exist, are active, and ran."""
    layers = lora_layers(denoiser_of(pipe))
    active = sum(_NAME in layer.active_adapters and not layer.disable_adapters for layer in layers)
    ran = {name for name in trace.denoiser.ran if ".lora_A." in name}
    # Hooks see no layers inside compiled code.
    engaged = bool(layers) and active == len(layers) and (not trace.denoiser.ran or bool(ran))
    facts = {"layers": len(layers), "active": active, "ran": len(ran)}
    return Finding(engaged, f"{active} of {len(layers)} LoRA layers are active, {len(ran)} were seen to run", facts)


def lora_layers(denoiser: Any) -> list[Any]:
    """Returns the layers of a denoiser that have a LoRA beside their weights."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [layer for layer in unwrapped(denoiser).modules() if isinstance(layer, BaseTunerLayer)]


def _sums(denoiser: Any) -> dict[str, float]:
    """Returns the sum of each weight by name, to detect changes; leaves out weights on the meta device."""
    with _from_disk(unwrapped(denoiser)) as network:
        weights = {name: weight.detach() for name, weight in network.named_parameters() if weight.device.type != "meta"}
        return {name: float(_plain(weight).double().sum()) for name, weight in weights.items()}


def _plain(weight: torch.Tensor) -> torch.Tensor:
    """Returns a weight as a plain tensor, since TorchAO's tensors do not support `sum`."""
    return weight if type(weight) is torch.Tensor else weight.dequantize()


@contextmanager
def _from_disk(network: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Loads weights that `memory=group_offload` keeps on disk, for the duration of the context."""
    hooks = [hook_of(layer, "group_offloading") for layer in network.modules()]
    groups = {id(hook.group): hook.group for hook in hooks if hook is not None and hook.group.offload_to_disk_path}
    for group in groups.values():
        group.onload_()
    try:
        yield network
    finally:
        for group in groups.values():
            group.offload_()


def _differ(one: float, other: float | None) -> bool:
    """Returns whether two sums differ by more than the error from the order of summation."""
    return other is None or abs(one - other) > 1e-9 * max(abs(one), abs(other), 1.0)
