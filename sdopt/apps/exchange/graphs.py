"""Reads what a graph of ComfyUI says of an image: the nodes as they were queued, of which links name one another."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sdopt.apps.exchange.settings import plain_key, shortened

Inputs = Mapping[str, Any]
"""The inputs of a node by name: plain values, or links `[id of a node, number of its output]`."""

_TEXTS = (
    "text",
    "text_g",
    "t5xxl",
    "clip_l",
    "prompt",
    "conditioning",
    "string",
    "value",
)

_SEEDS = ("noise_seed", "seed", "value")

_PARTS = ("sigmas", "guider", "noise", "sampler")
"""Inputs of `SamplerCustomAdvanced` and its like, whose nodes hold what `KSampler` holds itself."""

_UNGUIDED = "BasicGuider"
"""A part that calls the model once a step, and so has no scale."""

_LATENTS = ("samples", "latent_image", "latent", "pixels", "image")

_MODELS = ("ckpt_name", "unet_name", "model_name", "base_ckpt_name")

_FASTER = re.compile(
    r"compile|cache|sageattn|sageattention|flashatt|xformers|sdpa|attentionbackend|tomepatch|todopatch|tokenmerging|"
    r"hypertile|tensorrt|stablefast|onediff|nunchaku|svdq|(?<!image)quanti|gguf|fp8|fp16|bf16|dtype|precision|offload|blockswap|"
    r"multigpu|distorch|device|vram|tiled(?!diffusion)|preview|batchsize"
)
"""Nodes and inputs that make calls faster or smaller, or show what happens: the option that is judged."""

_OF_FILES = re.compile(r"file_?name|prefix|path|folder|caption", re.IGNORECASE)
"""Inputs of nodes that save images which name their files."""

_PASSING = ("reroute", "vaedecode", "getnode", "setnode", "")
"""Nodes without values that change nothing where they stand."""

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


def is_faster(kind: str) -> bool:
    """Returns whether a node of a class makes calls faster or smaller, or shows what happens; one of LoRAs does more."""
    plain = plain_key(kind)
    return "lora" not in plain and _FASTER.search(plain) is not None


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


def others_of_graph(nodes: Mapping[str, Any]) -> dict[str, str]:
    """Returns by class what a graph's nodes say beyond `facts_of_graph`: second passes, patches of models, scaling.

    Where several samplers begin, that is all: what they do not say alike is no fact.
    """
    graph = _Graph(nodes)
    samplers = list(graph.first_samplers())
    if len(samplers) == 1:
        graph.facts(samplers[0])
    return graph.unread()


class _Graph:
    def __init__(self, nodes: Mapping[str, Any]) -> None:
        self.read: set[tuple[int, str]] = set()
        """What was read as a setting: the identity of a node's inputs, and the name of one."""
        self.inputs: dict[str, Inputs] = {}
        self.kinds: dict[int, str] = {}
        """The class of each node, by the identity of its inputs."""
        for name, node in nodes.items():
            if isinstance(node, dict) and isinstance(node.get("inputs"), dict):
                self.inputs[str(name)] = node["inputs"]
                self.kinds[id(node["inputs"])] = str(node.get("class_type", ""))
        self.is_sampler = _is_sampler
        if not any(map(_is_sampler, self.inputs.values())):
            self.is_sampler = _is_other_sampler

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
            value = self._taken(self.inputs[node], names)
        return None

    def _taken(self, inputs: Inputs, names: Sequence[str]) -> Any:
        """Returns the first of the inputs that a node has, which counts as read; None if it has none."""
        for name in names:
            if name in inputs:
                value = inputs[name]
                # A file, at which the way to the size of the latents ends, is no size.
                if name not in _LATENTS or self.source(value) is not None:
                    self.read.add((id(inputs), name))
                return value
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
            if not self.is_sampler(inputs):
                continue
            before = list(self.upstream(inputs))[1:]
            if not any(
                self.is_sampler(other) for other in before if other is not inputs
            ):
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
        if any(self.kinds.get(id(inputs)) == _UNGUIDED for inputs in parts):
            facts["cfg"] = 1
        latents = self.first_value(parts, ("latent_image", "latent"), ())
        for side in ("width", "height"):
            facts[side] = self.follow(
                latents, (side, f"empty_latent_{side}", "value", *_LATENTS)
            )
        facts["batch_size"] = self.follow(latents, ("batch_size", "value", *_LATENTS))
        facts |= self.model(parts)
        for inputs in self.upstream(sampler):
            # Some nodes load and encode in one.
            skip = self._taken(inputs, ("stop_at_clip_layer", "clip_skip"))
            if skip is not None:
                facts.setdefault("clip_skip", self.follow(skip, ("value",)))
        facts |= self.conditions(sampler)
        decoders = [
            inputs
            for inputs in self._making()
            if isinstance(inputs.get("vae_name"), str)
        ]
        if len({inputs["vae_name"] for inputs in decoders}) == 1:
            for inputs in decoders:
                facts["vae"] = self._taken(inputs, ("vae_name",))
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
            if "guidance" in inputs and not self.is_sampler(inputs):
                guidance = self._taken(inputs, ("guidance",))
                facts.setdefault(
                    "distilled_guidance", self.follow(guidance, ("value",))
                )
            if "model" in inputs:
                shift = self._taken(inputs, ("shift", "max_shift"))
                if shift is not None:
                    facts.setdefault("shift", self.follow(shift, ("value",)))
            if "control_net" in inputs:
                name = self.follow(
                    inputs["control_net"], ("control_net_name", "control_net")
                )
                strength = self._taken(inputs, ("strength",))
                nets.append(f"{name}:{1 if strength is None else strength}")
        if nets:
            facts["controlnet"] = ", ".join(sorted(nets))
        return facts

    def unread(self) -> dict[str, str]:
        """Returns by class the values of nodes that make the image, of those that were not read as settings.

        Nodes after which nothing comes save or show it.
        """
        by_class: dict[str, list[str]] = {}
        for inputs in self._making():
            kind = self.kinds[id(inputs)]
            if not is_faster(kind):
                by_class.setdefault(kind, []).append(self._unread_of(inputs))
        unread = {}
        for kind, values in by_class.items():
            if any(values):
                unread[kind] = "; ".join(sorted(filter(None, values))).lower()
        return unread

    def _unread_of(self, inputs: Inputs) -> str:
        """Returns the values of a node that were not read; "" if they all were, or it changes no image."""
        values = []
        for name, value in sorted(inputs.items()):
            known = (id(inputs), name) in self.read or _is_lora_row(value)
            empty = value in ("", None) or self.source(value) is not None
            if not empty and not known and not _FASTER.search(plain_key(name)):
                text = f"{value:g}" if isinstance(value, float) else str(value)
                values.append(f"{name}={shortened(text)}")
        if values:
            return ", ".join(values)
        read = any(node == id(inputs) for node, _ in self.read)
        passes = plain_key(self.kinds[id(inputs)]) in _PASSING or self.is_sampler(
            inputs
        )
        return "" if read or passes else "in use"

    def _making(self) -> list[Inputs]:
        """Returns the nodes before those that end the graph, where a sampler is among them.

        Of a graph whose samplers nobody knows, all are.
        """
        unknown = not any(map(self.is_sampler, self.inputs.values()))
        linked: set[str | None] = set()
        for inputs in self.inputs.values():
            linked.update(map(self.source, inputs.values()))
        making: dict[int, Inputs] = {}
        for name, end in self.inputs.items():
            if name in linked:
                continue
            shown = {key: end[key] for key in end if not _OF_FILES.search(key)}
            before = [end, *list(self.upstream(shown))[1:]]
            if not (unknown or any(map(self.is_sampler, before))):
                continue
            making |= {id(inputs): inputs for inputs in before}
            if not self.is_sampler(end):
                del making[id(end)]
        return list(making.values())

    def first_value(
        self, parts: Sequence[Inputs], names: Sequence[str], through: Sequence[str]
    ) -> Any:
        """Returns what the first part that has one of the names says; the link itself if it is not to be followed."""
        for inputs in parts:
            if any(name in inputs for name in names):
                value = self._taken(inputs, names)
                return self.follow(value, through) if through else value
        return None

    def model(self, parts: Sequence[Inputs]) -> dict[str, Any]:
        """Returns the checkpoint's name and the LoRAs between it and the sampler."""
        facts: dict[str, Any] = {}
        loras: list[str] = []
        for start in parts:
            for inputs in self.upstream({"model": start.get("model")}, ("model",)):
                loras += _loras(inputs)
                self.read |= {(id(inputs), name) for name in inputs.keys() & _OF_LORAS}
                name = self._taken(inputs, _MODELS)
                if isinstance(name, str):
                    facts.setdefault("model", name)
        if loras:
            facts["loras"] = ", ".join(sorted(set(loras)))
        return facts


def _is_sampler(inputs: Inputs) -> bool:
    """Returns whether a node samples: it has prompts and a seed, or parts that have them."""
    if "guider" in inputs:
        return "noise" in inputs
    return "positive" in inputs and _is_seeded(inputs)


def _is_other_sampler(inputs: Inputs) -> bool:
    """Returns whether a node may sample, or configure what does, in a graph without a usual sampler."""
    return "steps" in inputs and _is_seeded(inputs)


def _is_seeded(inputs: Inputs) -> bool:
    return "seed" in inputs or "noise_seed" in inputs


_STRENGTHS = ("strength_model", "lora_model_strength", "lora_strength")

_OF_LORAS = {"lora_name", *_STRENGTHS}


def _loras(inputs: Inputs) -> list[str]:
    """Returns the LoRAs that a node loads, with their weights; one that is switched off loads none."""
    loras = []
    if isinstance(inputs.get("lora_name"), str) and inputs["lora_name"] != "None":
        weight = next((inputs[name] for name in _STRENGTHS if name in inputs), 1)
        loras.append(f"{inputs['lora_name']}:{weight}")
    for row in inputs.values():
        if _is_lora_row(row) and row["on"]:
            weight, of_clip = row.get("strength", 1), row.get("strengthTwo")
            of_clip = weight if of_clip is None else of_clip
            if of_clip != weight:
                weight = f"te {of_clip} unet {weight}"
            loras.append(f"{row['lora']}:{weight}")
    return loras


def _is_lora_row(value: Any) -> bool:
    """Returns whether a value is a LoRA of rgthree's loader, which may be switched off."""
    return isinstance(value, dict) and {"lora", "on"} <= value.keys()
