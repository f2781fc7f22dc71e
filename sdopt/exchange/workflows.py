"""Turns a workflow of ComfyUI, as its editor saves it, into a graph as it is queued, which `graphs` reads.

Some nodes that save images leave the workflow alone. It lists the values of a node by position, keeps nodes that are
muted or bypassed, and puts groups of nodes into subgraphs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_MUTED, _BYPASSED = 2, 4
"""Modes of nodes that do not run, and of those that hand on what they are given."""

_OUTER_INPUTS, _OUTER_OUTPUTS = "-10", "-20"
"""Numbers of the nodes by which a subgraph is joined to what is around it."""

_CONTROLS = ("fixed", "increment", "decrement", "randomize")
"""What an editor lists after a seed: what becomes of it for the next image."""

_WIDGETS = {
    "KSampler": "seed steps cfg sampler_name scheduler denoise",
    "KSamplerAdvanced": "add_noise noise_seed steps cfg sampler_name scheduler start_at_step end_at_step "
    "return_with_leftover_noise",
    "CheckpointLoaderSimple": "ckpt_name",
    "UNETLoader": "unet_name weight_dtype",
    "VAELoader": "vae_name",
    "CLIPTextEncode": "text",
    "CLIPSetLastLayer": "stop_at_clip_layer",
    "EmptyLatentImage": "width height batch_size",
    "EmptySD3LatentImage": "width height batch_size",
    "LoraLoader": "lora_name strength_model strength_clip",
    "LoraLoaderModelOnly": "lora_name strength_model",
    "ControlNetLoader": "control_net_name",
    "ControlNetApply": "strength",
    "ControlNetApplyAdvanced": "strength start_percent end_percent",
    "FluxGuidance": "guidance",
    "ModelSamplingSD3": "shift",
    "ModelSamplingFlux": "max_shift base_shift width height",
    "RandomNoise": "noise_seed",
    "KSamplerSelect": "sampler_name",
    "BasicScheduler": "scheduler steps denoise",
}
"""Names of the values of usual nodes, in order; later editors write names beside them."""

_NOTES = ("Note", "MarkdownNote")

_Node = Mapping[str, Any]


def graph_of_workflow(workflow: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the nodes of a workflow that ran, as they are queued; {} for anything else."""
    if not isinstance(workflow.get("nodes"), list):
        return {}
    definitions = workflow.get("definitions")
    listed = definitions.get("subgraphs") if isinstance(definitions, dict) else None
    subgraphs = {str(one.get("id")): one for one in _dicts(listed)}
    return dict(_Scope(workflow, subgraphs).queued())


def _dicts(value: Any) -> list[dict[str, Any]]:
    listed = value if isinstance(value, list) else []
    return [item for item in listed if isinstance(item, dict)]


_ENDS = ("origin_id", "origin_slot", "target_id", "target_slot")


class _Link(NamedTuple):
    """Which output of which node is which input of another one."""

    origin: str
    slot: Any
    target: str
    target_slot: Any


@dataclass
class _Scope:
    """A workflow, or a subgraph where it stands.

    Attributes:
        content: its nodes and links.
        subgraphs: the definitions by number.
        prefix: of its nodes' numbers.
        outer: what is around it, and the node that stands for it there.
        kinds: the subgraphs that it is within, which must not hold themselves.
    """

    content: Mapping[str, Any]
    subgraphs: Mapping[str, Mapping[str, Any]]
    prefix: str = ""
    outer: "tuple[_Scope, _Node] | None" = None
    kinds: tuple[str, ...] = ()
    nodes: dict[str, _Node] = field(init=False)
    links: dict[str, "_Link"] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = {}
        for node in _dicts(self.content.get("nodes")):
            self.nodes[str(node.get("id"))] = node
        self.links = {}
        listed = self.content.get("links")
        for link in listed if isinstance(listed, list) else ():
            ends = link
            if isinstance(link, dict):
                ends = [link.get(name) for name in ("id", *_ENDS)]
            if isinstance(ends, list) and len(ends) > len(_ENDS):
                number, origin, slot, target, target_slot = ends[:5]
                self.links[str(number)] = _Link(
                    str(origin), slot, str(target), target_slot
                )

    def queued(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the nodes that ran, by number."""
        for number, node in self.nodes.items():
            if node.get("mode") in (_MUTED, _BYPASSED) or node.get("type") in _NOTES:
                continue
            inner = self.within(node)
            if inner is not None:
                yield from inner.queued()
            elif node.get("type") not in ("Reroute", "PrimitiveNode"):
                yield f"{self.prefix}{number}", self.node_queued(node)

    def within(self, node: _Node) -> "_Scope | None":
        """Returns the subgraph that a node stands for; None for other nodes."""
        kind = str(node.get("type"))
        if kind not in self.subgraphs or kind in self.kinds:
            return None
        prefix = f"{self.prefix}{node.get('id')}:"
        return _Scope(
            self.subgraphs[kind],
            self.subgraphs,
            prefix,
            (self, node),
            (*self.kinds, kind),
        )

    def node_queued(self, node: _Node) -> dict[str, Any]:
        kind = str(node.get("type"))
        inputs, named = _values(node)
        for slot in _dicts(node.get("inputs")):
            if slot.get("link") is not None:
                source = self.source(slot["link"])
                inputs.pop(str(slot.get("name")), None)
                if source is not None:
                    inputs[str(slot.get("name"))] = source
        return {
            "class_type": kind if named else f"{kind} of the workflow",
            "inputs": inputs,
        }

    def source(self, link: Any, seen: int = 0) -> Any:
        """Returns where a link comes from, as a queue writes it, or a plain value; None if it leads nowhere."""
        begin = self.links.get(str(link))
        if begin is None or seen > _FURTHEST:
            return None
        onward = self.onward(begin)
        if onward is not None:
            scope, further = onward
            return scope.source(further, seen + 1)
        node = self.nodes.get(begin.origin, {})
        values = node.get("widgets_values")
        if node.get("mode") == _MUTED:
            return None
        if node.get("type") == "PrimitiveNode":
            return values[0] if isinstance(values, list) and values else None
        return [f"{self.prefix}{begin.origin}", begin.slot]

    def onward(self, link: _Link) -> "tuple[_Scope, Any] | None":
        """Returns the link that one goes on as, and where that is; None if it begins at a node that makes something."""
        if link.origin == _OUTER_INPUTS and self.outer is not None:
            scope, stands = self.outer
            slots = _dicts(stands.get("inputs"))
            return scope, _at(slots, link.slot).get("link")
        node = self.nodes.get(link.origin, {})
        inner = self.within(node)
        if node.get("mode") == _BYPASSED:
            return self, _handed_on(node, link.slot)
        if inner is not None and node.get("mode") != _MUTED:
            return inner, inner.link_out(link.slot)
        if node.get("type") == "Reroute":
            return self, _at(_dicts(node.get("inputs")), 0).get("link")
        return None

    def link_out(self, slot: Any) -> str | None:
        """Returns the link that ends in an output of a subgraph; None if none does."""
        for number, link in self.links.items():
            if (link.target, link.target_slot) == (_OUTER_OUTPUTS, slot):
                return number
        return None


_FURTHEST = 200
"""Links that are followed one after another."""


def _at(slots: Sequence[_Node], number: Any) -> _Node:
    known = isinstance(number, int) and 0 <= number < len(slots)
    return slots[number] if known else {}


def _handed_on(node: _Node, slot: Any) -> Any:
    """Returns the link of the input that a bypassed node hands on as an output: the first of its type."""
    wanted = _at(_dicts(node.get("outputs")), slot).get("type")
    for given in _dicts(node.get("inputs")):
        if given.get("type") == wanted and given.get("link") is not None:
            return given["link"]
    return None


def _values(node: _Node) -> tuple[dict[str, Any], bool]:
    """Returns the values of a node, and whether their names are known; else they are numbered."""
    values = node.get("widgets_values")
    if isinstance(values, dict):
        return dict(values), True
    listed = values if isinstance(values, list) else []
    kept: list[Any] = []
    for value in listed:
        after_seed = kept and isinstance(kept[-1], int) and value in _CONTROLS
        if not after_seed:
            kept.append(value)
    slots = [slot["widget"] for slot in _dicts(node.get("inputs")) if "widget" in slot]
    names = [str(widget.get("name")) for widget in _dicts(slots)]
    if len(names) != len(kept):
        names = _WIDGETS.get(str(node.get("type")), "").split()
    if len(names) != len(kept):
        return {f"value {n}": value for n, value in enumerate(kept, 1)}, False
    return dict(zip(names, kept, strict=True)), True
