"""Reads what a graph of ComfyUI says of an image: the nodes as they were queued, of which links name one another."""

import re
from collections import defaultdict
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

_EMPTIED = "ConditioningZeroOut"
"""What takes everything out of a prompt, which then says as much as an empty one."""

_LATENTS = ("samples", "latent_image", "latent", "pixels", "image")

_MODELS = ("ckpt_name", "unet_name", "model_name", "base_ckpt_name", "model_path")

_FASTER = re.compile(
    r"compile|cache|sageattn|sageattention|flashatt|xformers|sdpa|attentionbackend|tomepatch|todopatch|tokenmerging|"
    r"hypertile|cublas|tensorrt|stablefast|onediff|nunchaku|svdq|(?<!image)quanti|gguf|fp8|fp16|bf16|dtype|precision|offload|blockswap|"
    r"multigpu|distorch|device|vram|^tiled$|tiledvae|tiled(?:en|de)code|(?:en|de)codetiled|preview|batchsize"
)
"""Nodes and inputs that make calls faster or smaller, or show what happens: the option that is judged."""

_OF_FILES = re.compile(r"file_?name|prefix|path|folder|caption", re.IGNORECASE)
"""Inputs of nodes that save images which name their files."""

_PASSING = ("reroute", "vaedecode", "getnode", "setnode", "")
"""Nodes without values that change nothing where they stand."""

_SETTINGS = {
    "prompt": (("positive", "conditioning"), (*_TEXTS, "positive")),
    "negative": (("negative",), (*_TEXTS, "negative")),
    "seed": (("noise_seed", "seed"), _SEEDS),
    "steps": (("steps",), ("steps", "value")),
    "sampler": (("sampler_name",), ("sampler_name", "value")),
    "scheduler": (("scheduler",), ("scheduler", "value")),
    "cfg": (("cfg",), ("cfg", "value")),
    "denoise": (("denoise",), ("denoise", "value")),
    "start_at_step": (("start_at_step",), ("start_at_step", "value")),
    "end_at_step": (("end_at_step",), ("end_at_step", "value")),
}
"""Settings that stand at a sampler or at one of its parts: the names of the inputs, and what links lead through."""


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
    said = [graph.facts(sampler) for sampler in graph.first_samplers()]
    if not said:
        return {}
    common = {}
    for name, value in said[0].items():
        if all(facts.get(name) == value for facts in said):
            common[name] = value
    return common


def others_of_graph(nodes: Mapping[str, Any]) -> dict[str, str]:
    """Returns by class what a graph's nodes say beyond `facts_of_graph`: second passes, patches of models, scaling.

    Where several samplers begin, that is all: what they do not say alike is no fact.
    """
    graph = _Graph(nodes)
    samplers = list(graph.first_samplers())
    if len(samplers) == 1:
        graph.facts(samplers[0])
    return graph.unread()


class Nodes:
    """The nodes of a graph.

    Attributes:
        inputs: of each node, by its name.
        kinds: the class of each node, by its name.
    """

    def __init__(self, nodes: Mapping[str, Any]) -> None:
        self.inputs: dict[str, Inputs] = {}
        self.kinds: dict[str, str] = {}
        for name, node in nodes.items():
            inputs = node.get("inputs") if isinstance(node, dict) else None
            if isinstance(inputs, dict):
                self.inputs[str(name)] = inputs
                self.kinds[str(name)] = str(node.get("class_type", ""))

    def source(self, value: Any) -> str | None:
        """Returns the node that a link comes from; None if the value is no link."""
        if not isinstance(value, list) or not value:
            return None
        name = str(value[0])
        return name if name in self.inputs else None


class _Graph(Nodes):
    def __init__(self, nodes: Mapping[str, Any]) -> None:
        super().__init__(nodes)
        self.read: defaultdict[int, set[str]] = defaultdict(set)
        """The names of the inputs that were read as settings, by the identity of a node's inputs."""
        self.is_sampler = _is_sampler
        if not any(map(_is_sampler, self.inputs.values())):
            self.is_sampler = _is_other_sampler

    def kind_of(self, node: Inputs) -> str:
        """Returns the class of a node of these inputs; "" if there is none."""
        for name, inputs in self.inputs.items():
            if inputs is node:
                return self.kinds[name]
        return ""

    def follow(self, value: Any, names: Sequence[str]) -> Any:
        """Follows links until a plain value stands under one of the names; None where they lead nowhere."""
        for _ in range(len(self.inputs) + 1):
            node = self.source(value)
            if node is None:
                return value
            if self.kinds[node] == _EMPTIED:
                return ""
            value = self._taken(self.inputs[node], names)
        return None

    def _taken(self, inputs: Inputs, names: Sequence[str]) -> Any:
        """Returns the first of the inputs that a node has, which counts as read; None if it has none."""
        for name in names:
            if name in inputs:
                value = inputs[name]
                # A file, at which the way to the size of the latents ends, is no size.
                if name not in _LATENTS or self.source(value) is not None:
                    self.read[id(inputs)].add(name)
                return value
        return None

    def upstream(
        self,
        inputs: Inputs,
        through: Sequence[str] = (),
    ) -> Iterator[Inputs]:
        """Yields a node's inputs, and those of all nodes before it, the nearest first; `through` limits the links."""
        waiting = [inputs]
        seen: set[str] = set()
        while waiting:
            inputs = waiting.pop(0)
            yield inputs
            for name, value in inputs.items():
                node = self.source(value)
                if node is None or node in seen:
                    continue
                if not through or name in through:
                    seen.add(node)
                    waiting.append(self.inputs[node])

    def first_samplers(self) -> Iterator[Inputs]:
        """Yields the samplers before which there is no other one."""
        for inputs in self.inputs.values():
            if not self.is_sampler(inputs):
                continue
            before = [node for node in self.upstream(inputs) if node is not inputs]
            if not any(map(self.is_sampler, before)):
                yield inputs

    def facts(self, sampler: Inputs) -> dict[str, Any]:
        """Returns what a sampler and the nodes before it say."""
        parts = list(self.upstream(sampler, _PARTS))
        facts: dict[str, Any] = {}
        for setting, (names, through) in _SETTINGS.items():
            facts[setting] = self.first_value(parts, names, through)
        if _UNGUIDED in map(self.kind_of, parts):
            facts["cfg"] = 1
        latents = self.first_value(parts, ("latent_image", "latent"), ())
        for side in ("width", "height"):
            names = (side, f"empty_latent_{side}", "value", *_LATENTS)
            facts[side] = self.follow(latents, names)
        names = ("batch_size", "value", *_LATENTS)
        facts["batch_size"] = self.follow(latents, names)
        facts |= self.model(parts)
        for inputs in self.upstream(sampler):
            # Some nodes load and encode in one.
            skip = self._taken(inputs, ("stop_at_clip_layer", "clip_skip"))
            if skip is not None:
                facts.setdefault("clip_skip", self.follow(skip, ("value",)))
        facts |= self.conditions(sampler)
        facts["vae"] = self._decoder()
        known = {}
        for name, value in facts.items():
            if isinstance(value, str | int | float):
                known[name] = value
        return known

    def _decoder(self) -> str | None:
        """Returns the name of the VAE that a graph loads by itself; None if it loads none, or several."""
        loading = []
        for inputs in self._making():
            if isinstance(inputs.get("vae_name"), str):
                loading.append(inputs)
        names = {inputs["vae_name"] for inputs in loading}
        if len(names) != 1:
            return None
        for inputs in loading:
            self._taken(inputs, ("vae_name",))
        return str(names.pop())

    def conditions(self, sampler: Inputs) -> dict[str, Any]:
        """Returns what acts on a sampler beside its prompts: guidance as an input, shifted noise, ControlNets."""
        facts: dict[str, Any] = {}
        nets = []
        for inputs in self.upstream(sampler):
            if "guidance" in inputs and not self.is_sampler(inputs):
                guidance = self._taken(inputs, ("guidance",))
                scale = self.follow(guidance, ("value",))
                facts.setdefault("distilled_guidance", scale)
            if "model" in inputs:
                shift = self._taken(inputs, ("shift", "max_shift"))
                if shift is not None:
                    facts.setdefault("shift", self.follow(shift, ("value",)))
            if "control_net" in inputs:
                names = ("control_net_name", "control_net")
                name = self.follow(inputs["control_net"], names)
                strength = self._taken(inputs, ("strength",))
                if strength is None:
                    strength = 1
                nets.append(f"{name}:{strength}")
        if nets:
            facts["controlnet"] = ", ".join(sorted(nets))
        return facts

    def unread(self) -> dict[str, str]:
        """Returns by class the values of nodes that make the image, of those that were not read as settings.

        Nodes after which nothing comes save or show it.
        """
        by_class: dict[str, list[str]] = {}
        for inputs in self._making():
            kind = self.kind_of(inputs)
            values = self._unread_of(inputs)
            if values and not is_faster(kind):
                by_class.setdefault(kind, []).append(values)
        unread = {}
        for kind, of_nodes in by_class.items():
            unread[kind] = "; ".join(sorted(of_nodes)).lower()
        return unread

    def _unread_of(self, inputs: Inputs) -> str:
        """Returns the values of a node that were not read; "" if they all were, or it changes no image."""
        read = self.read[id(inputs)]
        values = []
        is_option = False
        for name, value in sorted(inputs.items()):
            if name in read or _is_lora_row(value):
                continue
            if value in ("", None) or self.source(value) is not None:
                continue
            if _FASTER.search(plain_key(name)):
                is_option = True
                continue
            text = f"{value:g}" if isinstance(value, float) else str(_set(value))
            values.append(f"{name}={shortened(text)}")
        if values:
            return ", ".join(values)
        if read or is_option:
            return ""
        passes = plain_key(self.kind_of(inputs)) in _PASSING
        return "" if passes or self.is_sampler(inputs) else "in use"

    def _making(self) -> list[Inputs]:
        """Returns the nodes before those that end the graph, where a sampler is among them.

        Of a graph whose samplers nobody knows, all are.
        """
        nodes = self.inputs.values()
        unknown = not any(map(self.is_sampler, nodes))
        linked: set[str | None] = set()
        for inputs in nodes:
            linked.update(map(self.source, inputs.values()))
        making: dict[int, Inputs] = {}
        for name, end in self.inputs.items():
            if name in linked:
                continue
            names = [key for key in end if not _OF_FILES.search(key)]
            shown = {key: end[key] for key in names}
            _, *before = self.upstream(shown)
            if self.is_sampler(end):
                before.insert(0, end)
                self.read[id(end)] |= end.keys() - shown.keys()
            if unknown or any(map(self.is_sampler, before)):
                making |= {id(inputs): inputs for inputs in before}
        return list(making.values())

    def first_value(
        self,
        parts: Sequence[Inputs],
        names: Sequence[str],
        through: Sequence[str],
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
            model = {"model": start.get("model")}
            for inputs in self.upstream(model, ("model",)):
                loras += _loras(inputs)
                self.read[id(inputs)] |= inputs.keys() & _OF_LORAS
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
    """Returns whether a node draws noise; one that saves images may be told their seed."""
    return "images" not in inputs and ("seed" in inputs or "noise_seed" in inputs)


_STRENGTHS = ("strength_model", "lora_model_strength", "lora_strength")

_OF_LORAS = {"lora_name", *_STRENGTHS}


def _loras(inputs: Inputs) -> list[str]:
    """Returns the LoRAs that a node loads, with their weights; one that is switched off loads none."""
    loras = []
    name = inputs.get("lora_name")
    if isinstance(name, str) and name != "None":
        weights = [inputs[key] for key in _STRENGTHS if key in inputs]
        weight = weights[0] if weights else 1
        loras.append(f"{name}:{weight}")
    for row in inputs.values():
        if _is_lora_row(row) and row["on"]:
            weight = row.get("strength", 1)
            of_clip = row.get("strengthTwo")
            if of_clip is not None and of_clip != weight:
                weight = f"te {of_clip} unet {weight}"
            loras.append(f"{row['lora']}:{weight}")
    return loras


_OF_EDITOR = ("expanded", "selected", "locked")
"""How an editor shows the rows of a list."""


def _set(value: Any) -> Any:
    """Returns a value without how an editor shows it."""
    if isinstance(value, list):
        return [_set(item) for item in value]
    if isinstance(value, dict):
        return {key: _set(item) for key, item in value.items() if key not in _OF_EDITOR}
    return value


def _is_lora_row(value: Any) -> bool:
    """Returns whether a value is a LoRA of rgthree's loader, which may be switched off."""
    return isinstance(value, dict) and {"lora", "on"} <= value.keys()
