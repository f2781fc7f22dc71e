"""Reads what a graph of ComfyUI says of an image: the nodes as they were queued, of which links name one another."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Inputs = Mapping[str, Any]
"""The inputs of a node by name: plain values, or links `[id of a node, number of its output]`."""

_TEXTS = ("text", "text_g", "conditioning", "string", "value")

_SEEDS = ("noise_seed", "seed", "value")

_PARTS = ("sigmas", "guider", "noise", "sampler")
"""Inputs of `SamplerCustomAdvanced` and its like, whose nodes hold what `KSampler` holds itself."""

_LATENTS = ("samples", "latent_image", "latent", "pixels", "image")

_MODELS = ("ckpt_name", "unet_name", "model_name", "base_ckpt_name")

_GUIDES = re.compile(
    r"freeu|perturbed|selfattentionguidance|rescalecfg|skiplayer|ipadapter|downscale|dynamicthreshold|cfgzero|"
    r"hypernetwork|photomaker|instantid|pulid|differentialdiffusion|apply_?nag|stylemodel|unclipconditioning",
    re.IGNORECASE,
)
"""Nodes that change what a model draws, and not how fast it computes."""

_PLAIN = {
    "steps": ("steps",),
    "sampler": ("sampler_name",),
    "scheduler": ("scheduler",),
    "cfg": ("cfg",),
    "denoise": ("denoise",),
    "start_at_step": ("start_at_step",),
    "end_at_step": ("end_at_step",),
}
"""Settings that stand at a sampler or at one of its parts, with the names of the inputs."""


def facts_of_graph(nodes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a graph says of its image, as a sampler's inputs are called.

    Of several samplers in a row, the first one starts from the noise of the seed. Of several that begin, only what all
    of them say counts: nobody says which of them made the image.
    """
    graph = _Graph(nodes)
    common: dict[str, Any] | None = None
    for sampler in graph.first_samplers():
        facts = graph.facts(sampler)
        if common is None:
            common = facts
        else:
            common = {
                name: value
                for name, value in common.items()
                if facts.get(name) == value
            }
    return common or {}


class _Graph:
    def __init__(self, nodes: Mapping[str, Any]) -> None:
        self.inputs: dict[str, Inputs] = {}
        self.kinds: dict[int, str] = {}
        """The class of each node, by the identity of its inputs."""
        for name, node in nodes.items():
            if isinstance(node, dict) and isinstance(node.get("inputs"), dict):
                self.inputs[str(name)] = node["inputs"]
                self.kinds[id(node["inputs"])] = str(node.get("class_type", ""))

    def source(self, value: Any) -> str | None:
        """Returns the node that a link comes from; None if the value is no link."""
        if isinstance(value, list) and value and str(value[0]) in self.inputs:
            return str(value[0])
        return None

    def follow(self, value: Any, names: Sequence[str]) -> Any:
        """Follows links until a plain value stands under one of the names; None where they lead nowhere."""
        for _ in range(len(self.inputs) + 1):
            node = self.source(value)
            if node is None:
                return value
            inputs = self.inputs[node]
            value = next((inputs[name] for name in names if name in inputs), None)
        return None

    def upstream(self, inputs: Inputs, through: Sequence[str] = ()) -> Iterator[Inputs]:
        """Yields a node's inputs, and those of all nodes before it, the nearest first; `through` limits the links."""
        waiting, seen = [inputs], set[str]()
        while waiting:
            inputs = waiting.pop(0)
            yield inputs
            for name, value in inputs.items():
                node = self.source(value)
                if (
                    node is not None
                    and node not in seen
                    and (not through or name in through)
                ):
                    seen.add(node)
                    waiting.append(self.inputs[node])

    def first_samplers(self) -> Iterator[Inputs]:
        """Yields the samplers before which there is no other one."""
        for inputs in self.inputs.values():
            if not _is_sampler(inputs):
                continue
            before = list(self.upstream(inputs))[1:]
            if not any(_is_sampler(other) for other in before if other is not inputs):
                yield inputs

    def facts(self, sampler: Inputs) -> dict[str, Any]:
        """Returns what a sampler and the nodes before it say."""
        parts = list(self.upstream(sampler, _PARTS))
        facts: dict[str, Any] = {
            "prompt": self.first_value(
                parts, ("positive", "conditioning"), (*_TEXTS, "positive")
            ),
            "negative": self.first_value(parts, ("negative",), (*_TEXTS, "negative")),
            "seed": self.first_value(parts, ("noise_seed", "seed"), _SEEDS),
        }
        for setting, names in _PLAIN.items():
            facts[setting] = self.first_value(parts, names, (*names, "value"))
        latents = self.first_value(parts, ("latent_image", "latent"), ())
        for side in ("width", "height"):
            facts[side] = self.follow(
                latents, (side, f"empty_latent_{side}", "value", *_LATENTS)
            )
        facts |= self.model(parts)
        for inputs in self.upstream(sampler):
            if "stop_at_clip_layer" in inputs:
                facts.setdefault(
                    "clip_skip", self.follow(inputs["stop_at_clip_layer"], ("value",))
                )
            elif "clip_skip" in inputs:  # nodes that load and encode in one
                facts.setdefault(
                    "clip_skip", self.follow(inputs["clip_skip"], ("value",))
                )
        facts |= self.conditions(sampler)
        if passes := self.later_passes(sampler):
            facts["later_passes"] = "; ".join(passes)
        decoders = {
            inputs["vae_name"]
            for inputs in self.inputs.values()
            if isinstance(inputs.get("vae_name"), str)
        }
        if len(decoders) == 1:
            facts["vae"] = decoders.pop()
        return {
            name: value
            for name, value in facts.items()
            if isinstance(value, str | int | float)
        }

    def conditions(self, sampler: Inputs) -> dict[str, Any]:
        """Returns what acts on a sampler beside its prompts: guidance as an input, shifted noise, ControlNets."""
        facts: dict[str, Any] = {}
        nets = []
        for inputs in self.upstream(sampler):
            if "guidance" in inputs and "conditioning" in inputs:
                facts.setdefault(
                    "distilled_guidance", self.follow(inputs["guidance"], ("value",))
                )
            shift = next(
                (inputs[key] for key in ("shift", "max_shift") if key in inputs), None
            )
            if shift is not None and "model" in inputs:
                facts.setdefault("shift", self.follow(shift, ("value",)))
            if "control_net" in inputs:
                name = self.follow(
                    inputs["control_net"], ("control_net_name", "control_net")
                )
                nets.append(f"{name}:{inputs.get('strength', 1)}")
        if nets:
            facts["controlnet"] = ", ".join(sorted(nets))
        guides = [
            self._named(inputs)
            for inputs in self.upstream(sampler)
            if _GUIDES.search(self.kinds[id(inputs)])
        ]
        if guides:
            facts["guides"] = ", ".join(sorted(guides))
        return facts

    def _named(self, inputs: Inputs) -> str:
        """Returns a node's class with the values that it has itself."""
        values = [
            f"{name}={value}"
            for name, value in sorted(inputs.items())
            if isinstance(value, str | int | float)
        ]
        return f"{self.kinds[id(inputs)]}({', '.join(values)})"

    def later_passes(self, sampler: Inputs) -> list[str]:
        """Returns the samplers that go on from another one, as a second pass in a larger size does, in words."""
        passes = []
        for inputs in self.inputs.values():
            if inputs is sampler or not _is_sampler(inputs):
                continue
            if any(before is sampler for before in self.upstream(inputs)):
                parts = list(self.upstream(inputs, _PARTS))
                steps = self.first_value(parts, ("steps",), ("steps", "value"))
                denoise = self.first_value(parts, ("denoise",), ("denoise", "value"))
                passes.append(
                    f"{steps} steps" + (f" at {denoise}" if denoise is not None else "")
                )
        return sorted(passes)

    def first_value(
        self, parts: Sequence[Inputs], names: Sequence[str], through: Sequence[str]
    ) -> Any:
        """Returns what the first part that has one of the names says; the link itself if it is not to be followed."""
        for inputs in parts:
            for name in names:
                if name in inputs:
                    return (
                        self.follow(inputs[name], through) if through else inputs[name]
                    )
        return None

    def model(self, parts: Sequence[Inputs]) -> dict[str, Any]:
        """Returns the checkpoint's name and the LoRAs between it and the sampler."""
        facts: dict[str, Any] = {}
        loras: list[str] = []
        for start in parts:
            for inputs in self.upstream({"model": start.get("model")}, ("model",)):
                loras += _loras(inputs)
                name = next(
                    (
                        inputs[key]
                        for key in _MODELS
                        if isinstance(inputs.get(key), str)
                    ),
                    None,
                )
                if name is not None:
                    facts.setdefault("model", name)
        if loras:
            facts["loras"] = ", ".join(sorted(set(loras)))
        return facts


def _is_sampler(inputs: Inputs) -> bool:
    """Returns whether a node samples: it has prompts and a seed, or parts that have them."""
    if "guider" in inputs:
        return "noise" in inputs
    return "positive" in inputs and ("seed" in inputs or "noise_seed" in inputs)


def _loras(inputs: Inputs) -> list[str]:
    """Returns the LoRAs that a node loads, with their weights; one that is switched off loads none."""
    loras = []
    if isinstance(inputs.get("lora_name"), str) and inputs["lora_name"] != "None":
        weight = inputs.get("strength_model", inputs.get("lora_model_strength", 1))
        loras.append(f"{inputs['lora_name']}:{weight}")
    switched_on = [
        value
        for value in inputs.values()
        if isinstance(value, dict) and value.get("on")
    ]
    loras += [
        f"{value['lora']}:{value.get('strength', 1)}"
        for value in switched_on
        if "lora" in value
    ]
    return loras
