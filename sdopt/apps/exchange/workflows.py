"""Turns a workflow of ComfyUI, as its editor saves it, into a graph as it is queued, which `graphs` reads.

Some nodes that save images leave the workflow alone. It lists the values of a node by position, keeps nodes that are
muted or bypassed, and puts groups of nodes into subgraphs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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

_REROUTE, _PRIMITIVE = "Reroute", "PrimitiveNode"

_SET, _GET = "SetNode", "GetNode"
"""Nodes that name a link, and those that go on from it elsewhere; the editor resolves both, as it does the others here."""

_HANDING_ON = (_REROUTE, _SET)

_NOT_QUEUED = (*_HANDING_ON, _GET, _PRIMITIVE)

Parts = Mapping[str, Any]
"""What an editor saves of a workflow, a node or an input, by name."""


def graph_of_workflow(workflow: Parts) -> dict[str, Any]:
    """Returns the nodes of a workflow that ran, as they are queued; {} for anything else."""
    if not isinstance(workflow.get("nodes"), list):
        return {}
    definitions = workflow.get("definitions")
    subgraphs: dict[str, Parts] = {}
    if isinstance(definitions, dict):
        for subgraph in _parts_in(definitions, "subgraphs"):
            subgraphs[str(subgraph.get("id"))] = subgraph
    return dict(_Scope(workflow, subgraphs).queued())


def without_reroutes(nodes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the nodes of a queue without those that hand on what they are given, which some editors queue as well."""
    handed_on = {}
    for name, node in nodes.items():
        if isinstance(node, dict) and node.get("class_type") in _HANDING_ON:
            handed_on[str(name)] = _only_link(node.get("inputs"))
    if not handed_on:
        return dict(nodes)
    left: dict[str, Any] = {}
    for name, node in nodes.items():
        if str(name) not in handed_on:
            left[name] = _rewired(node, handed_on)
    return left


def _rewired(node: Any, handed_on: Mapping[str, Any]) -> Any:
    """Returns a node whose links begin at those that make something."""
    if not isinstance(node, dict) or not isinstance(node.get("inputs"), dict):
        return node
    inputs = {}
    for key, value in node["inputs"].items():
        inputs[key] = _past(handed_on, value)
    return {**node, "inputs": inputs}


def _only_link(inputs: Any) -> Any:
    """Returns the link into a node that has one; None of any other."""
    values = [*inputs.values()] if isinstance(inputs, dict) else []
    links = [value for value in values if isinstance(value, list) and value]
    return links[0] if len(links) == 1 else None


def _past(handed_on: Mapping[str, Any], value: Any) -> Any:
    """Returns a link as it is past nodes that hand it on; any other value as it is."""
    for _ in range(len(handed_on)):
        if not isinstance(value, list) or not value or str(value[0]) not in handed_on:
            break
        value = handed_on[str(value[0])]
    return value


def _parts_in(parts: Parts, name: str) -> list[Parts]:
    """Returns the objects of a list; [] of anything else."""
    listed = parts.get(name)
    if not isinstance(listed, list):
        return []
    return [part for part in listed if isinstance(part, dict)]


@dataclass(frozen=True)
class _Slot:
    """An input or an output of a node; the name of its widget is "" without one."""

    name: str
    kind: Any
    link: str | None
    widget: str


def _slots(node: Parts, name: str) -> list[_Slot]:
    slots = []
    for slot in _parts_in(node, name):
        link, widget = slot.get("link"), slot.get("widget")
        slots.append(
            _Slot(
                name=str(slot.get("name")),
                kind=slot.get("type"),
                link=None if link is None else str(link),
                widget=str(widget.get("name")) if isinstance(widget, dict) else "",
            )
        )
    return slots


@dataclass(frozen=True)
class _Node:
    number: str
    kind: str
    mode: Any
    inputs: Sequence[_Slot]
    outputs: Sequence[_Slot]
    values: Any

    @property
    def runs(self) -> bool:
        return self.mode not in (_MUTED, _BYPASSED)

    @property
    def first_value(self) -> Any:
        """Its first value; None if it has none."""
        if isinstance(self.values, list) and self.values:
            return self.values[0]
        return None

    def link_of(self, number: Any) -> str | None:
        """Returns the link into one of its inputs; None if nothing is there."""
        slot = _at(self.inputs, number)
        return slot.link if slot else None

    def promoted(self, number: Any) -> Any:
        """Returns the value that stands at a subgraph in place of a link into it; None if nothing does."""
        slot = _at(self.inputs, number)
        shown = [own for own in self.inputs if own.widget]
        values = self.own_values()
        if slot is None or not slot.widget or len(shown) != len(values):
            return None
        return values[shown.index(slot)]

    def handed_on(self, number: Any) -> str | None:
        """Returns the link of the input that it hands on as an output where it is bypassed: the first of its type."""
        output = _at(self.outputs, number)
        for slot in self.inputs:
            if output and slot.kind == output.kind and slot.link:
                return slot.link
        return None

    def named_values(self) -> tuple[dict[str, Any], bool]:
        """Returns its values, and whether their names are known; else they are numbered."""
        if isinstance(self.values, dict):
            return dict(self.values), True
        values = self.own_values()
        names = [slot.widget for slot in self.inputs if slot.widget]
        if len(names) != len(values):
            names = _WIDGETS.get(self.kind, "").split()
        named = len(names) == len(values)
        if not named:
            names = [f"value {number}" for number in range(1, len(values) + 1)]
        return dict(zip(names, values, strict=True)), named

    def own_values(self) -> list[Any]:
        """Returns its values without what is to become of a seed."""
        values: list[Any] = []
        for value in self.values if isinstance(self.values, list) else ():
            after_seed = values and isinstance(values[-1], int)
            if not (after_seed and value in _CONTROLS):
                values.append(value)
        return values


def _node(node: Parts) -> _Node:
    return _Node(
        number=str(node.get("id")),
        kind=str(node.get("type")),
        mode=node.get("mode"),
        inputs=_slots(node, "inputs"),
        outputs=_slots(node, "outputs"),
        values=node.get("widgets_values"),
    )


_NO_NODE = _node({})


def _at(slots: Sequence[_Slot], number: Any) -> _Slot | None:
    if isinstance(number, int) and 0 <= number < len(slots):
        return slots[number]
    return None


@dataclass(frozen=True)
class _Link:
    """Which output of which node is which input of another one."""

    origin: str
    slot: Any
    target: str
    target_slot: Any


_LINK = ("id", "origin_id", "origin_slot", "target_id", "target_slot")
"""What a link holds, in order; within subgraphs by name."""


def _links(content: Parts) -> dict[str, _Link]:
    links: dict[str, _Link] = {}
    listed = content.get("links")
    for link in listed if isinstance(listed, list) else ():
        ends = link
        if isinstance(link, dict):
            ends = [link.get(name) for name in _LINK]
        if not isinstance(ends, list) or len(ends) < len(_LINK):
            continue
        number, origin, slot, target, target_slot = ends[: len(_LINK)]
        links[str(number)] = _Link(str(origin), slot, str(target), target_slot)
    return links


_FURTHEST = 200
"""Links that are followed one after another."""


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

    content: Parts
    subgraphs: Mapping[str, Parts]
    prefix: str = ""
    outer: "tuple[_Scope, _Node] | None" = None
    kinds: tuple[str, ...] = ()
    nodes: dict[str, _Node] = field(init=False)
    links: dict[str, _Link] = field(init=False)

    def __post_init__(self) -> None:
        nodes = [_node(parts) for parts in _parts_in(self.content, "nodes")]
        self.nodes = {node.number: node for node in nodes}
        self.links = _links(self.content)

    def queued(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the nodes that ran, by number."""
        for number, node in self.nodes.items():
            if not node.runs or node.kind in _NOTES:
                continue
            inner = self.within(node)
            if inner is not None:
                yield from inner.queued()
            elif node.kind not in _NOT_QUEUED:
                yield self.prefix + number, self.node_queued(node)

    def within(self, node: _Node) -> "_Scope | None":
        """Returns the subgraph that a node stands for; None for other nodes."""
        if node.kind not in self.subgraphs or node.kind in self.kinds:
            return None
        return _Scope(
            self.subgraphs[node.kind],
            self.subgraphs,
            f"{self.prefix}{node.number}:",
            (self, node),
            (*self.kinds, node.kind),
        )

    def node_queued(self, node: _Node) -> dict[str, Any]:
        """Returns a node with its values, and with links in place of those that come from others."""
        inputs, named = node.named_values()
        for slot in node.inputs:
            if slot.link is None:
                continue
            source = self.source(slot.link)
            if source is not None:
                inputs[slot.name] = source
            elif not slot.widget:
                inputs.pop(slot.name, None)
        kind = node.kind if named else f"{node.kind} of the workflow"
        return {"class_type": kind, "inputs": inputs}

    def source(self, number: str | None, seen: int = 0) -> Any:
        """Returns where a link comes from, as a queue writes it, or a plain value; None if it leads nowhere."""
        link = self.links.get(str(number))
        if link is None or seen > _FURTHEST:
            return None
        onward = self.onward(link)
        if onward is not None:
            scope, further = onward
            if further is None and link.origin == _OUTER_INPUTS and self.outer:
                return self.outer[1].promoted(link.slot)
            return scope.source(further, seen + 1)
        node = self.nodes.get(link.origin, _NO_NODE)
        if node.mode == _MUTED:
            return None
        if node.kind == _PRIMITIVE:
            return node.first_value
        return [self.prefix + link.origin, link.slot]

    def onward(self, link: _Link) -> "tuple[_Scope, str | None] | None":
        """Returns the link that one goes on as, and where that is; None if it begins at a node that makes something."""
        if link.origin == _OUTER_INPUTS and self.outer is not None:
            scope, stands = self.outer
            return scope, stands.link_of(link.slot)
        node = self.nodes.get(link.origin, _NO_NODE)
        if node.mode == _MUTED:
            return None
        inner = self.within(node)
        if node.mode == _BYPASSED:
            further = self, node.handed_on(link.slot)
        elif inner is not None:
            further = inner, inner.link_out(link.slot)
        elif node.kind in _HANDING_ON:
            further = self, node.link_of(0)
        else:
            return self.named(node.first_value) if node.kind == _GET else None
        return further

    def named(self, name: Any) -> "tuple[_Scope, str | None] | None":
        """Returns the link that a name stands for, here or around, and where that is; None if nothing has the name."""
        for node in self.nodes.values():
            if node.kind == _SET and node.runs and node.first_value == name:
                return self, node.link_of(0)
        return self.outer[0].named(name) if self.outer is not None else None

    def link_out(self, slot: Any) -> str | None:
        """Returns the link that ends in an output of a subgraph; None if none does."""
        for number, link in self.links.items():
            if link.target == _OUTER_OUTPUTS and link.target_slot == slot:
                return number
        return None
