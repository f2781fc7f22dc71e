"""lora: low-rank updates of the denoiser's weights: as separate layers, fused into the weights, or hot-swapped."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field
from typing_extensions import override

from sdopt.contract import LATENCY
from sdopt.errors import UsageError
from sdopt.measure.compilation import compiled_so_far, eagerly
from sdopt.options import (
    Context,
    Contract,
    Finding,
    Optimization,
    Proof,
    Stage,
    Trace,
)
from sdopt.options.assumptions import no_lora, plain_weights
from sdopt.options.base import Inputs
from sdopt.options.declarations import outdated
from sdopt.pipelines.family import family_named
from sdopt.pipelines.hub import commit_of
from sdopt.pipelines.loading import (
    LoadedModel,
    family_of,
    part_config,
    published_denoiser,
)
from sdopt.pipelines.lora_checks import misfits, misfits_in, unswappable
from sdopt.pipelines.lora_files import (
    has_biases,
    is_on_hub,
    lora_file,
    rank_of,
    trains_text_encoder,
)
from sdopt.pipelines.loras import (
    exchangeable,
    lora_layers,
    networks_of_a_lora,
    reads_itself,
    source_for,
)
from sdopt.pipelines.parts import (
    Pipeline,
    denoiser_of,
    hook_of,
    quiet,
    text_encoders_of,
    unwrapped,
)
from sdopt.pipelines.transformer_loras import settings_beside
from sdopt.reference import MODEL
from sdopt.schema import Factor, Model, UpToMillion

if TYPE_CHECKING:
    import torch

_NAME = "sdopt"
"""The adapter name in diffusers."""

CHANGE_A_LORA = (
    *("set_adapters", "enable_lora", "disable_lora", "delete_adapters"),
    *("unload_lora_weights", "fuse_lora", "unfuse_lora"),
)
"""diffusers' methods that change what a LoRA does in all networks of a pipeline."""


class NoLora(Optimization):
    """Uses the model's own weights, without a LoRA."""

    stage = Stage.WEIGHTS

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        def proof(trace: Trace) -> Finding:
            layers = len(lora_layers(*networks_of_a_lora(pipe)))
            return Finding(
                not layers,
                f"{layers} layers with a LoRA" if layers else "no layer has a LoRA",
            )

        return proof


@dataclass(frozen=True)
class Lora(Optimization):
    """The base class of options that load a LoRA, from safetensors files only."""

    stage = Stage.WEIGHTS
    contract = Contract.LOSSY
    assumes = (no_lora, plain_weights)
    beside_the_weights = True
    """Whether the LoRA stays in separate layers, which options that join or replace weights would ignore."""

    path: str | None = None
    """A .safetensors file, a folder, or a Hugging Face Hub repository (`owner/name`); null is the folder of the two
    packaged style LoRAs."""
    weight_name: str | None = None
    """The file in a folder or repository; null is `fxemoji.safetensors` for the packaged LoRAs, and for others
    diffusers' usual name, `pytorch_lora_weights.safetensors`."""

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
            return [
                f"the LoRAs that come with sdopt are for model={MODEL.name}: set lora.path"
            ]
        return []

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        if getattr(self, "scale", 1) == 0:
            return ["lora.scale=0 leaves the LoRA out: choose lora=none"]
        if self.lacking(ctx) or (is_on_hub(self.path) and not self._cached):
            return []  # conflicts are checked before anything is fetched
        found = []
        for name in self.names:
            try:
                file = lora_file(self.path, name)
                # The packaged LoRAs are for the packaged model.
                found += [] if self.path is None else misfits(file, ctx.model)
            except UsageError as error:
                found += error.problems
        found += _refused_by_peft() if ctx.device.is_here else []
        return list(dict.fromkeys(found)) or self._unfit(
            [lora_file(self.path, name) for name in self.names], ctx.model
        )

    @override
    def bypassed(self, pipe: Pipeline) -> list[str]:
        """Also says what of the files would not arrive: `conflicts` knows no layers of what a function builds."""
        reasons = super().bypassed(pipe)
        if reasons or not self._cached:
            return reasons
        for name in self.names:
            reasons += misfits_in(pipe, lora_file(self.path, name))
        return reasons

    @override
    def broken(self, pipe: Pipeline) -> list[str]:
        return super().bypassed(pipe)

    def _unfit(self, files: Sequence[Path], model: Model) -> list[str]:
        """Returns why LoRAs that fit the model cannot be used in this way; [] if they can."""
        return []

    @property
    def _cached(self) -> bool:
        """Whether the files of a repository are in the local cache of the hub."""
        try:
            return all(lora_file(self.path, name).is_file() for name in self.names)
        except UsageError:
            return False

    @override
    def files(self, model: Model, fetch: bool) -> list[Path]:
        files = [lora_file(self.path, name, fetch) for name in self.names]
        return files + [
            beside for file in files if (beside := settings_beside(file)) is not None
        ]

    def _lines(self, *then: str) -> tuple[str, ...]:
        """Returns diffusers code that loads the LoRA, and then the lines `then`; () if that would not do."""
        from safetensors import SafetensorError

        if self.path is None:
            return ()
        try:
            if self._cached and not all(
                reads_itself(lora_file(self.path, name)) for name in self.names
            ):
                return ()
        except (OSError, SafetensorError, UsageError):
            return ()  # `conflicts` says what is wrong with the file
        source = (
            self.path
            if is_on_hub(self.path)
            else str(Path(self.path).expanduser().absolute())
        )
        arguments = [repr(source)]
        if self.weight_name:
            arguments.append(f"weight_name={self.weight_name!r}")
        if is_on_hub(self.path) and self._cached:  # the repository may move
            commit = commit_of(lora_file(self.path, self.names[0]))
            arguments.append(f"revision={commit!r}")
        arguments.append(f"adapter_name={_NAME!r}")
        return (f"pipe.load_lora_weights({', '.join(arguments)})", *then)

    def _load(self, pipe: Pipeline, name: str | None, **how: Any) -> None:
        file = lora_file(self.path, name)
        # Without a network, diffusers finds a file in its folder by `weight_name` only.
        source = self._tensors(pipe, file) or str(file.parent)
        # peft warns of layers whose names end alike, and which the file does not update: `misfits` has looked.
        with quiet():
            pipe.load_lora_weights(
                source,
                weight_name=file.name,
                adapter_name=_NAME,
                local_files_only=True,
                **how,
            )

    def _tensors(self, pipe: Pipeline, file: Path) -> Any:
        """Returns the tensors of a LoRA as diffusers must get them, or None if it can read the file itself."""
        return source_for(pipe, file)


@dataclass(frozen=True)
class Loaded(Lora):
    """Loads a LoRA as separate layers, which can be unloaded and cost two extra products per layer.

    A file is refused by name unless all of it arrives in the model's networks: one for another model or with unknown
    layers, a DoRA, LoHa, LoKr, LoCon with a third matrix, (IA)³, OFT or full difference, weights that are not finite.
    """

    scale: Annotated[float, Field(ge=-100, le=100)] = 1.0
    """Scale of the update."""

    @property
    @override
    def diffusers_lines(self) -> tuple[str, ...]:
        return self._lines(
            f"pipe.set_adapters({_NAME!r}, adapter_weights={self.scale})"
        )

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        self._load(pipe, self.names[0])
        pipe.set_adapters(_NAME, adapter_weights=self.scale)
        return lambda trace: _adapter_finding(pipe, trace)


@dataclass(frozen=True)
class Fused(Lora):
    """Adds a LoRA to the weights once, so that calls cost the same as without a LoRA."""

    beside_the_weights = False

    scale: Annotated[float, Field(ge=-100, le=100)] = 1.0
    """Scale of the update."""

    @override
    def _unfit(self, files: Sequence[Path], model: Model) -> list[str]:
        return [
            f"{file.name} has biases, which peft cannot fuse: choose lora=loaded"
            for file in files
            if has_biases(file)
        ]

    @override
    def refusals(self, call: Inputs) -> list[str]:
        return [
            f"the LoRA is in the weights, and {name} cannot scale it: leave its scale out"
            for name in scaling_arguments(call)
        ]

    @property
    @override
    def diffusers_lines(self) -> tuple[str, ...]:
        return self._lines(
            f"pipe.fuse_lora(lora_scale={self.scale})", "pipe.unload_lora_weights()"
        )

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        # Keeps no text encoder alive that `memory=precomputed_embeddings` removes.
        networks = [weakref.ref(network) for network in networks_of_a_lora(pipe)]
        before = _all_sums(networks)
        weights = chain.from_iterable(
            network.parameters() for network in networks_of_a_lora(pipe)
        )
        trained = [weight for weight in weights if weight.requires_grad]
        self._load(pipe, self.names[0])
        parts = [
            name
            for name in pipe._lora_loadable_modules
            if getattr(pipe, name, None) is not None
        ]
        pipe.fuse_lora(components=parts, lora_scale=self.scale)
        pipe.unload_lora_weights()
        for (
            weight
        ) in trained:  # peft froze them, and grad_mode=enabled would record nothing
            weight.requires_grad_(True)
        fused = {
            name
            for name, total in _all_sums(networks).items()
            if _differ(total, before.get(name))
        }

        def proof(trace: Trace) -> Finding:
            now = _all_sums(networks)
            changed = sum(
                _differ(now[name], before[name]) for name in fused & now.keys()
            )
            # A text encoder is removed only after it has encoded all prompts, with the LoRA in its weights.
            removed = sum(networks[number]() is None for number, _ in fused)
            # A function of one's own may have loaded another LoRA since, beside the weights.
            layers = lora_layers(*networks_of_a_lora(pipe))
            left = sum(_NAME in getattr(layer, "lora_A", ()) for layer in layers)
            summary = f"{changed} weights include the LoRA; {left} separate LoRA layers"
            summary += (
                f"; {removed} weights of text encoders that were removed included it"
                if removed
                else ""
            )
            whole = changed == len(fused & now.keys()) and changed + removed > 0
            return Finding(whole and not left, summary, {"weights": changed})

        return proof


@dataclass(frozen=True)
class Distilled(Fused):
    """Fuses a LoRA with which a model draws in a few steps.

    Scheduler, steps and guidance scale go with it: they are part of the distillation.
    """

    claims = LATENCY

    pipeline: str | None = None
    """The class of pipelines of transformers that it is for; null is Stable Diffusion, by `text_width`."""
    text_width: UpToMillion = 768
    """Channels of the states of text that the LoRA's model reads: 768 in Stable Diffusion 1.x, 2048 in SDXL."""
    scheduler: str = "lcm"
    """The option of the group `scheduler` for which it was distilled."""
    sampler: dict[str, Any] = field(default_factory=dict)
    """What that option sets: the class, and keys of its configuration."""
    steps: Annotated[list[int], Field(min_length=2, max_length=2)] = field(
        default_factory=lambda: [2, 8]
    )
    """The fewest and the most steps."""
    guidance_scale: Factor = 1.0
    """The highest guidance scale: guidance is in the weights, and more of it overstates."""

    @override
    def lacking(self, ctx: Context) -> list[str]:
        if self._of_another_model(ctx):
            return []
        own = part_config(ctx.model, "scheduler") or {}
        given = {**own, **ctx.scheduler.options, "class_name": ctx.scheduler.class_name}
        found = []
        if any(given.get(key) != value for key, value in self.sampler.items()):
            found.append(
                f"it was distilled for another scheduler: choose scheduler={self.scheduler}"
            )
        if isinstance(ctx.model, LoadedModel):
            return found  # each call of a program says its own steps and guidance
        return found + self._problems(
            ctx.workload.steps,
            ctx.workload.guidance(ctx.model),
            "workload.steps",
            "workload.guidance_scale",
        )

    def _problems(
        self, steps: int, guidance: float, of_steps: str, of_guidance: str
    ) -> list[str]:
        fewest, most = self.steps
        found = []
        if not fewest <= steps <= most:
            span = f"{fewest} to {most} steps" if fewest < most else f"{most} steps"
            found.append(
                f"it was distilled to {span}: set {of_steps}={min(max(fewest, 4), most)}"
            )
        if guidance > self.guidance_scale:
            found.append(
                f"guidance is in its weights: set {of_guidance}={self.guidance_scale:g} or less"
            )
        return found

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        if found := self._of_another_model(ctx):
            return found
        if ctx.model.distilled:
            return [
                f"model={ctx.model.name} is distilled to a few steps itself: choose lora=none"
            ]
        return super().conflicts(ctx)

    def _of_another_model(self, ctx: Context) -> list[str]:
        family = family_of(ctx.model)
        if self.pipeline is not None or not family.is_unet:
            if family.pipeline == self.pipeline:
                return []
            own = (
                family_named(self.pipeline).title
                if self.pipeline
                else "Stable Diffusion"
            )
            return [f"it is for {own}, and this model is {family.title}"]
        has = published_denoiser(ctx.model).get("cross_attention_dim", self.text_width)
        if has == self.text_width:
            return []
        return [
            f"it is for models that read {self.text_width} channels of text, and this one reads {has}"
        ]

    @override
    def refusals(self, call: Inputs) -> list[str]:
        steps = call.get("num_inference_steps", 50)
        argument, scale = self._guidance_of(call)
        return [
            *super().refusals(call),
            *self._problems(steps, scale, "num_inference_steps", argument),
        ]

    def _guidance_of(self, call: Inputs) -> tuple[str, float]:
        """Returns the argument that guides a call, and its scale; 0 if none does."""
        if self.pipeline is None:
            return _SCALE, call.get(_SCALE, 7.5)
        guidance = family_named(self.pipeline).guidance
        scale = call.get(guidance.argument) or 0.0
        negatives = (
            call.get(name) for name in ("negative_prompt", "negative_prompt_embeds")
        )
        has_negative = any(negative is not None for negative in negatives)
        guided = guidance.guides(scale) and (
            has_negative or not guidance.needs_negative
        )
        if guided or guidance.argument == _SCALE:
            return guidance.argument, scale
        return _SCALE, call.get(_SCALE) or 0.0


_SCALE = "guidance_scale"
"""The argument of a call that guides it, or that a transformer embeds beside one that guides."""


@dataclass(frozen=True)
class Hotswap(Lora):
    """Loads a LoRA that another LoRA can replace at run time without recompilation.

    The layers get the highest rank of all LoRAs and are padded with zeros, so that a swap changes values but no shapes.
    `pipe.load_lora_weights(folder, weight_name="other.safetensors", adapter_name="sdopt", hotswap=True)` swaps for one
    of any trainer, of at most this rank and no further layers. diffusers cannot hot-swap the LoRA of a text encoder.
    """

    other: str | None = None
    """A file in the same folder or repository, swapped in to verify hot-swapping; null is the other packaged style."""
    target_rank: Annotated[int, Field(ge=1, le=100_000)] | None = None
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
    def _unfit(self, files: Sequence[Path], model: Model) -> list[str]:
        found = [
            f"{file.name} updates the text encoder too, which cannot be hot-swapped"
            for file in files
            if trains_text_encoder(file)
        ]
        rank = max(map(rank_of, files))
        if self.target_rank is not None and self.target_rank < rank:
            found.append(
                f"lora.target_rank={self.target_rank}: the files have ranks up to {rank}"
            )
        first, other = files
        return found or unswappable(first, other, model)

    @property
    def _rank(self) -> int:
        """The rank of all layers."""
        files = [lora_file(self.path, name) for name in self.names]
        return self.target_rank or max(map(rank_of, files))

    @override
    def _tensors(self, pipe: Pipeline, file: Path) -> Any:
        return exchangeable(pipe, file, self._rank)

    @override
    def wraps(self) -> Mapping[str, Callable[[Any], Any]]:
        return {"load_lora_weights": self._reading}

    def _reading(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a method that reads a LoRA to be swapped in as the first one was read.

        diffusers passes over names that it does not know, and would go on to draw with the LoRA from before.
        """

        @functools.wraps(method)
        def load_lora_weights(
            pipe: Pipeline, source: Any, *args: Any, **how: Any
        ) -> Any:
            if how.get("hotswap") and not isinstance(source, dict):
                file = lora_file(str(source), how.get("weight_name"), fetch=True)
                source = self._tensors(pipe, file)
            return method(pipe, source, *args, **how)

        return load_lora_weights

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        denoiser_of(pipe).enable_lora_hotswap(target_rank=self._rank)
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
            engaged = changed and np.array_equal(own, back) and not compiled
            summary = f"swapped for another LoRA in {swap_s:.2f} s with {compiled} recompilations"
            facts = {
                "recompiles": compiled,
                "other_images": changed,
                "swap_s": round(swap_s, 4),
            }
            return found.also(summary, engaged, **facts)

        return proof


def _adapter_finding(pipe: Pipeline, trace: Trace) -> Finding:
    """Checks whether LoRA layers exist, are active, and ran; in compiled code, whether they changed the images."""
    layers = lora_layers(*networks_of_a_lora(pipe))
    active = sum(
        _NAME in layer.active_adapters and not layer.disable_adapters
        for layer in layers
    )
    encoded, encoding = vars(pipe).get(_ENCODING, (0, 0))
    facts: dict[str, Any] = {
        "layers": len(layers) + encoded,
        "active": active + encoded,
    }
    summary = f"{facts['active']} of {facts['layers']} LoRA layers are active"
    if trace.is_compiled(denoiser_of(pipe)) or any(
        unwrapped(each) is not each for each in text_encoders_of(pipe)
    ):
        nearer = _draws_with(layers, trace)
        summary += f"; the images are {'those' if nearer else 'not those'} of uncompiled code with the LoRA"
        ran = facts["layers"] if nearer else 0
    else:
        with _running(layers) as seen:
            trace.call_again()
        ran = len(seen) + encoding
        facts["ran"] = ran
        summary += f", {ran} were seen to run"
    return Finding(0 < facts["layers"] == facts["active"] == ran, summary, facts)


def _draws_with(layers: Sequence[Any], trace: Trace) -> bool:
    """Returns whether images of compiled code are nearer to those of uncompiled code with the LoRA than without.

    Hooks see no layers inside compiled code, and a graph that was captured before the LoRA came runs without it.
    """
    own = trace.images().astype(np.float64)
    with eagerly():
        whole = trace.images()
        # `pipe.disable_lora` passes over networks that a compiler wrapped.
        for layer in layers:
            layer.enable_adapters(enabled=False)
        try:
            without = trace.images()
        finally:
            for layer in layers:
                layer.enable_adapters(enabled=True)
    return bool(np.abs(own - whole).sum() < np.abs(own - without).sum())


def scaling_arguments(call: Inputs) -> list[str]:
    """Returns the arguments of a call that scale a LoRA: pipelines of UNets and of transformers name them otherwise."""
    return [
        name
        for name, value in call.items()
        if name.endswith("attention_kwargs") and (value or {}).get("scale") is not None
    ]


def _refused_by_peft() -> list[str]:
    """Returns why peft would load no LoRA: it raises an error beside a TorchAO that is too old, used or not."""
    if not outdated("torchao"):
        return []
    from peft.import_utils import is_torchao_available

    try:
        is_torchao_available()
    except ImportError as error:
        return [
            f"peft loads no LoRA here ({error}): pip install 'sdopt[torchao]', or pip uninstall torchao"
        ]
    return []


_ENCODING = "_sdopt_lora_in_text_encoders"
"""Attribute of a pipeline whose text encoders are removed: the number of their LoRA layers, and of those that ran."""


@contextmanager
def encoding_noted(pipe: Pipeline) -> Iterator[None]:
    """Notes which LoRA layers of the text encoders run in the block, for text encoders that are removed after it."""
    networks = [
        each
        for each in text_encoders_of(pipe)
        if getattr(each, "_hf_peft_config_loaded", False)
    ]
    layers = lora_layers(*networks)
    with _running(layers) as ran:
        yield
    pipe.__dict__[_ENCODING] = len(layers), len(ran)


def lora_in_text_encoders(pipe: Pipeline) -> bool:
    """Returns whether text encoders that were removed had layers with a LoRA."""
    return bool(vars(pipe).get(_ENCODING, (0, 0))[0])


def _note(ran: set[int], number: int, *_: Any) -> None:
    ran.add(number)


@contextmanager
def _running(layers: Sequence[Any]) -> Iterator[set[int]]:
    """Collects, by their numbers, the LoRA layers that compute their update in the block."""
    ran: set[int] = set()
    handles = []
    for number, layer in enumerate(layers):
        for matrix in layer.lora_A.values():
            note = functools.partial(_note, ran, number)
            handles.append(matrix.register_forward_hook(note))
    try:
        yield ran
    finally:
        for handle in handles:
            handle.remove()


def _all_sums(
    networks: Sequence[weakref.ref[torch.nn.Module]],
) -> dict[tuple[int, str], float]:
    """Returns the sum of each weight of the networks that still exist, by the network's number and the name."""
    import torch

    found = {}
    for number, each in enumerate(networks):
        if (network := each()) is not None:
            with _from_disk(unwrapped(network)) as loaded:
                for name, weight in loaded.named_parameters():
                    if weight.device.type != "meta":
                        plain = weight.detach()
                        # TorchAO's tensors do not support `sum`.
                        plain = (
                            plain if type(plain) is torch.Tensor else plain.dequantize()
                        )
                        own_name = name.replace(".base_layer.", ".")
                        found[number, own_name] = float(plain.double().sum())
    return found


@contextmanager
def _from_disk(network: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Loads weights that `memory=group_offload` keeps on disk, for the duration of the context."""
    hooks = [hook_of(layer, "group_offloading") for layer in network.modules()]
    groups = {
        id(hook.group): hook.group
        for hook in hooks
        if hook is not None and hook.group.offload_to_disk_path
    }
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
