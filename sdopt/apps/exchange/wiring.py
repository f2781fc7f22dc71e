"""Tells how the nodes of a graph of ComfyUI are joined: two graphs may have the same nodes and make other images.

What makes calls faster is passed through, since it may be the option that is judged.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdopt.apps.exchange.graphs import Nodes, is_faster
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
        further = Counter(self.links) - Counter(other.links)
        links = list(further.elements())
        if not links:
            return f"{self.structure} between nodes of one class"
        return ", ".join(links[:_LISTED])


def wiring_of(nodes: Mapping[str, Any]) -> Wiring | None:
    """Returns how the nodes of a graph, as they are queued, are joined; None of what is no graph that saves an image."""
    graph = _Joined(nodes)
    digests = []
    kinds = []
    for name, kind in graph.kinds.items():
        if _counts(kind):
            kinds.append(kind)
        if "save" not in plain_key(kind):
            continue
        try:
            digests.append(graph.digest(name))
        except RecursionError:  # longer than any graph that a person makes
            return None
    if not digests:
        return None
    return Wiring(
        kinds=tuple(sorted(kinds)),
        links=tuple(sorted(graph.links)),
        structure=_digest(sorted(digests)),
    )


def _counts(kind: str) -> bool:
    """Returns whether a node of a class changes images."""
    return plain_key(kind) not in _REROUTES and not is_faster(kind)


class _Joined(Nodes):
    """The nodes of a graph; `links` are those that were followed."""

    def __init__(self, nodes: Mapping[str, Any]) -> None:
        super().__init__(nodes)
        self.links: list[str] = []
        self._digests: dict[str, str] = {}

    def digest(self, name: str) -> str:
        """Returns a digest of a node and of all before it."""
        if name in self._digests:
            return self._digests[name]
        self._digests[name] = ""  # of a graph in a circle
        kind = self.kinds[name]
        is_named = _counts(kind)
        parts = [kind if is_named else ""]
        for key, value in sorted(self.inputs[name].items()):
            link = self._followed(key, value)
            source = self.source(link)
            if source is None:
                continue
            # The slot of what loads several networks follows from the input.
            slot = ""
            if self._links_into(source) and len(link) > 1:
                slot = str(link[1])
            parts.append(f"{key} {slot} {self.digest(source)}")
            before = self.kinds[source]
            if is_named and _counts(before):
                numbered = f" (output {slot})" if slot not in ("", "0") else ""
                self.links.append(f"{kind}.{key} from {before}{numbered}")
        self._digests[name] = _digest(parts)
        return self._digests[name]

    def _followed(self, key: str, value: Any) -> Any:
        """Returns the link that an input comes from, past nodes that hand on what they are given; None without one."""
        for _ in range(len(self.inputs) + 1):
            source = self.source(value)
            if source is None:
                return None
            onward = self._handed_on(source, key)
            if onward is None:
                return value
            value = onward
        return None

    def _handed_on(self, name: str, key: str) -> Any:
        """Returns the link that a node hands on as an input of another one; None if it makes something of it."""
        if _counts(self.kinds[name]):
            return None
        links = self._links_into(name)
        if key in links:
            return links[key]
        if len(links) != 1:
            return None
        [link] = links.values()
        return link

    def _links_into(self, name: str) -> dict[str, Any]:
        links = {}
        for key, value in self.inputs[name].items():
            if self.source(value) is not None:
                links[key] = value
        return links


def _digest(parts: Sequence[str]) -> str:
    text = "\n".join(parts)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
