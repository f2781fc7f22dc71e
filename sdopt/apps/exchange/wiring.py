"""Tells how the nodes of a graph of ComfyUI are joined: two graphs may have the same nodes and make other images.

What makes calls faster is passed through, since it may be the option that is judged.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdopt.apps.exchange.settings import plain_key

LINKS = "links"
"""What is said of graphs that are joined otherwise."""

_REROUTES = ("reroute", "getnode", "setnode", "")

_LISTED = 2
"""Links that are named, of those in which two graphs differ."""


@dataclass(frozen=True)
class Wiring:
    """How the nodes of a graph are joined.

    Attributes:
        kinds: the classes of its nodes, sorted.
        links: of the nodes before those that save images, as in `VAEDecode.vae from VAELoader`, sorted.
        structure: a digest of all of them together, which tells apart nodes of one class by what is before them.
    """

    kinds: tuple[str, ...]
    links: tuple[str, ...]
    structure: str

    def beside(self, other: "Wiring") -> str:
        """Returns in which links it differs from another one of the same nodes; "" if in none, or nodes differ."""
        if self.kinds != other.kinds or self.structure == other.structure:
            return ""
        own = [*(Counter(self.links) - Counter(other.links)).elements()]
        if not own:
            return f"{self.structure} between nodes of one class"
        return ", ".join(own[:_LISTED])


def wiring_of(
    nodes: Mapping[str, Any], is_faster: Callable[[str], bool]
) -> Wiring | None:
    """Returns how the nodes of a graph are joined; None of what is no graph that saves an image.

    Args:
        nodes: as they are queued.
        is_faster: whether a node of a class makes calls faster or smaller.
    """
    graph = _Joined(nodes, is_faster)
    saved = [name for name in graph.kinds if "save" in plain_key(graph.kinds[name])]
    try:
        digests = sorted(graph.digest(name) for name in saved)
    except RecursionError:  # longer than any graph that a person makes
        return None
    if not digests:
        return None
    kinds = sorted(kind for kind in graph.kinds.values() if graph.counts(kind))
    return Wiring(tuple(kinds), tuple(sorted(graph.links)), _digest(digests))


class _Joined:
    """The nodes of a graph by number; `links` are those that were followed."""

    def __init__(
        self, nodes: Mapping[str, Any], is_faster: Callable[[str], bool]
    ) -> None:
        self.inputs: dict[str, Mapping[str, Any]] = {}
        self.kinds: dict[str, str] = {}
        for name, node in nodes.items():
            if isinstance(node, dict) and isinstance(node.get("inputs"), dict):
                self.inputs[str(name)] = node["inputs"]
                self.kinds[str(name)] = str(node.get("class_type", ""))
        self.links: list[str] = []
        self._is_faster = is_faster
        self._digests: dict[str, str] = {}

    def counts(self, kind: str) -> bool:
        """Returns whether a node of a class changes images."""
        return plain_key(kind) not in _REROUTES and not self._is_faster(kind)

    def digest(self, name: str) -> str:
        """Returns a digest of a node and of all before it."""
        if name in self._digests:
            return self._digests[name]
        self._digests[name] = ""  # of a graph in a circle
        kind = self.kinds[name]
        shown = kind if self.counts(kind) else ""
        parts = [shown]
        for key, source, slot in self._sources(name):
            before = self.kinds[source]
            # The slot of what loads several networks follows from the input.
            place = slot if self._has_links(source) else ""
            parts.append(f"{key} {place} {self.digest(source)}")
            if shown and self.counts(before):
                self.links.append(f"{kind}.{key} from {before}{_numbered(place)}")
        self._digests[name] = _digest(parts)
        return self._digests[name]

    def _sources(self, name: str) -> Iterator[tuple[str, str, str]]:
        """Yields the links into a node: the input, where it comes from, and the number of the output there."""
        for key, value in sorted(self.inputs[name].items()):
            followed = self._followed(key, value)
            if followed is not None:
                yield key, *followed

    def _followed(self, key: str, value: Any) -> tuple[str, str] | None:
        """Returns the node that a link comes from and the output there, past nodes that hand on what they are given."""
        for _ in range(len(self.inputs) + 1):
            source = self._source(value)
            if source is None:
                return None
            onward = self._handed_on(source, key)
            if onward is None:
                return source, str(value[1]) if len(value) > 1 else ""
            value = onward
        return None

    def _handed_on(self, name: str, key: str) -> Any:
        """Returns the link that a node hands on as an input of another one; None if it makes something of it."""
        if self.counts(self.kinds[name]):
            return None
        links = {
            own: value
            for own, value in self.inputs[name].items()
            if self._source(value) is not None
        }
        if key in links:
            return links[key]
        return next(iter(links.values())) if len(links) == 1 else None

    def _has_links(self, name: str) -> bool:
        return any(self._source(value) for value in self.inputs[name].values())

    def _source(self, value: Any) -> str | None:
        if isinstance(value, list) and value and str(value[0]) in self.inputs:
            return str(value[0])
        return None


def _numbered(slot: str) -> str:
    return f" (output {slot})" if slot not in ("", "0") else ""


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
