"""Images in which ComfyUI's editor left its workflow alone are read as those with the graph that was queued."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sdopt.apps.exchange.metadata import Origin, origin_of
from sdopt.apps.exchange.pairing import other_settings
from sdopt.apps.exchange.pictures import ImportedPicture
from sdopt.apps.exchange.workflows import graph_of_workflow
from sdopt.record.images import open_image
from tests.apps.exchange.test_metadata import chunks

Node = dict[str, Any]

_MUTED, _BYPASSED = 2, 4


def node(number: int, kind: str, *values: Any, mode: int = 0, **ends: Any) -> Node:
    """Returns a node with inputs `name=(type, link)` and its outputs as `out=[(type, links)]`."""
    outputs = ends.pop("out", [])
    inputs = [
        {"name": name, "type": end[0], "link": end[1]} for name, end in ends.items()
    ]
    return {
        "id": number, "type": kind, "mode": mode, "widgets_values": list(values), "inputs": inputs,
        "outputs": [{"type": type_of, "links": links} for type_of, links in outputs],
    }  # fmt: skip


def guided(mode: int = 0, strength: float = 1.3) -> Node:
    return node(
        3,
        "FreeU_V2",
        strength,
        1.4,
        mode=mode,
        model=("MODEL", 1),
        out=[("MODEL", [2])],
    )


def sampled(steps: int = 30, seed: int = 42) -> Node:
    return node(
        5, "KSampler", seed, "randomize", steps, 7, "euler", "karras", 1, model=("MODEL", 2),
        positive=("CONDITIONING", 4), negative=("CONDITIONING", 6), latent_image=("LATENT", 7),
        out=[("LATENT", [8])],
    )  # fmt: skip


LOADED = node(
    1, "CheckpointLoaderSimple", "m.safetensors", out=[("MODEL", [1]), ("CLIP", [3, 5]), ("VAE", [9])]
)  # fmt: skip

OTHERS = [
    LOADED,
    node(2, "CLIPTextEncode", "a harbour", clip=("CLIP", 3), out=[("CONDITIONING", [4])]),
    node(4, "CLIPTextEncode", "fog", clip=("CLIP", 5), out=[("CONDITIONING", [6])]),
    node(6, "EmptyLatentImage", 512, 768, 1, out=[("LATENT", [7])]),
    node(7, "VAEDecode", samples=("LATENT", 8), vae=("VAE", 9), out=[("IMAGE", [10])]),
    node(8, "SaveImage", "prefix", images=("IMAGE", 10)),
    node(9, "Note", "remember the milk"),
]  # fmt: skip

LINKS: list[list[int | str]] = [
    [1, 1, 0, 3, 0, "MODEL"], [2, 3, 0, 5, 0, "MODEL"], [3, 1, 1, 2, 0, "CLIP"], [4, 2, 0, 5, 1, "CONDITIONING"],
    [5, 1, 1, 4, 0, "CLIP"], [6, 4, 0, 5, 2, "CONDITIONING"], [7, 6, 0, 5, 3, "LATENT"], [8, 5, 0, 7, 0, "LATENT"],
    [9, 1, 2, 7, 1, "VAE"], [10, 7, 0, 8, 0, "IMAGE"],
]  # fmt: skip


def workflow(guide: Node | None = None, sampler: Node | None = None) -> Node:
    nodes = [*OTHERS, guide or guided(), sampler or sampled()]
    return {"nodes": nodes, "links": LINKS, "version": 0.4}


def within_a_subgraph(guide: Node | None = None) -> Node:
    """Returns the same, whose guide and sampler are in a subgraph."""
    inner = {
        "id": "7f3c", "nodes": [guide or guided(), sampled()],
        "links": [
            {"id": 1, "origin_id": -10, "origin_slot": 0, "target_id": 3, "target_slot": 0},
            {"id": 2, "origin_id": 3, "origin_slot": 0, "target_id": 5, "target_slot": 0},
            {"id": 4, "origin_id": -10, "origin_slot": 1, "target_id": 5, "target_slot": 1},
            {"id": 6, "origin_id": -10, "origin_slot": 2, "target_id": 5, "target_slot": 2},
            {"id": 7, "origin_id": -10, "origin_slot": 3, "target_id": 5, "target_slot": 3},
            {"id": 8, "origin_id": 5, "origin_slot": 0, "target_id": -20, "target_slot": 0},
        ],
    }  # fmt: skip
    stands = node(
        20, "7f3c", model=("MODEL", 1), positive=("CONDITIONING", 4), negative=("CONDITIONING", 6),
        latent=("LATENT", 7), out=[("LATENT", [8])],
    )  # fmt: skip
    links: list[list[int | str]] = [
        [1, 1, 0, 20, 0, "MODEL"], [4, 2, 0, 20, 1, "CONDITIONING"], [6, 4, 0, 20, 2, "CONDITIONING"],
        [7, 6, 0, 20, 3, "LATENT"], [8, 20, 0, 7, 0, "LATENT"],
    ]  # fmt: skip
    inside = {2, *(link[0] for link in links)}
    links += [link for link in LINKS if link[0] not in inside]
    return {
        "nodes": [*OTHERS, stands], "links": links, "definitions": {"subgraphs": [inner]},
    }  # fmt: skip


def of_steps_from_elsewhere(steps: int) -> Node:
    """Returns the same, whose steps come from a node of one value, by way of a reroute."""
    sampler = sampled(steps=1)
    sampler["inputs"].append({"name": "steps", "type": "INT", "link": 12})
    content = workflow(sampler=sampler)
    further = [
        node(30, "PrimitiveNode", steps, "fixed", out=[("INT", [11])]),
        node(31, "Reroute", any=("*", 11), out=[("INT", [12])]),
    ]
    links: list[list[int | str]] = [[11, 30, 0, 31, 0, "INT"], [12, 31, 0, 5, 4, "INT"]]
    return {"nodes": [*content["nodes"], *further], "links": [*LINKS, *links]}


def with_steps_at_it(*values: int, own: int = 30) -> Node:
    """Returns the same, whose steps stand at the subgraph in place of a link; its sampler has others of its own."""
    content = within_a_subgraph()
    [inner] = content["definitions"]["subgraphs"]
    shown = {"name": "steps", "type": "INT", "widget": {"name": "steps"}}
    inner["nodes"][1] = sampled(steps=own)
    inner["nodes"][1]["inputs"].append({**shown, "link": 20})
    link = {"id": 20, "origin_id": -10, "origin_slot": 4}
    inner["links"].append({**link, "target_id": 5, "target_slot": 4})
    content["nodes"][-1]["inputs"].append({**shown, "link": None})
    content["nodes"][-1]["widgets_values"] = list(values)
    return content


def by_names() -> Node:
    """Returns the same, whose guide takes the model from a node that goes on from a named link."""
    content = workflow()
    further = [
        node(40, "SetNode", "base", any=("MODEL", 13), out=[("*", [])]),
        node(41, "GetNode", "base", out=[("MODEL", [1])]),
    ]
    links: list[list[int | str]] = [
        [1, 41, 0, 3, 0, "MODEL"],
        [13, 1, 0, 40, 0, "MODEL"],
    ]
    return {"nodes": [*content["nodes"], *further], "links": [*LINKS[1:], *links]}


def origin(folder: Path, content: Node) -> Origin:
    file = chunks({"workflow": json.dumps(content)})(folder)
    return origin_of(open_image(file), file)


SETTINGS = {
    "steps": "30",
    "sampler": "euler",
    "schedule": "karras",
    "guidance scale": "7",
    "size": "512×768",
    "model": "m",
    "denoising strength": "1",
}


@pytest.mark.parametrize(
    "content",
    [
        workflow(),
        within_a_subgraph(),
        with_steps_at_it(30, own=99),
        with_steps_at_it(),
        of_steps_from_elsewhere(30),
        by_names(),
    ],
)
def test_settings_stand_in_it(tmp_path: Path, content: Node) -> None:
    said = origin(tmp_path, content)
    assert (said.prompt, said.negative, said.seed) == ("a harbour", "fog", 42)
    assert said.program == "ComfyUI"
    assert said.settings == SETTINGS
    assert list(said.others) == ["FreeU_V2 of the workflow"]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (workflow(sampler=sampled(steps=20)), ["steps 20 (baseline 30)"]),
        (of_steps_from_elsewhere(20), ["steps 20 (baseline 30)"]),
        (workflow(guided(mode=_BYPASSED)), ["FreeU_V2 of the workflow none"]),
        (within_a_subgraph(guided(mode=_BYPASSED)), ["FreeU_V2 of the workflow none"]),
        (workflow(guided(strength=1.5)), ["FreeU_V2 of the workflow value 1=1.5"]),
        (within_a_subgraph(), []),
    ],
)
def test_what_ran_otherwise_is_said(
    tmp_path: Path, other: Node, said: list[str]
) -> None:
    file = tmp_path / "a.png"
    baseline = ImportedPicture(file, origin(tmp_path, workflow()))
    candidate = ImportedPicture(file, origin(tmp_path, other))
    words = other_settings([baseline], [candidate])
    assert len(words) == len(said)
    for word, begin in zip(words, said, strict=True):
        assert word.startswith(begin)


def test_a_muted_node_did_not_run() -> None:
    graph = graph_of_workflow(workflow(guided(mode=_MUTED)))
    assert "3" not in graph
    assert "model" not in graph["5"]["inputs"]


def test_names_beside_values_count_more_than_their_order() -> None:
    loaded = node(1, "SomeLoader", "a", 5, "fixed", 3)
    loaded["inputs"] = [
        {"name": name, "widget": {"name": name}} for name in ("file", "seed", "count")
    ]
    [queued] = graph_of_workflow({"nodes": [loaded]}).values()
    assert queued == {
        "class_type": "SomeLoader",
        "inputs": {"file": "a", "seed": 5, "count": 3},
    }


def test_exif_of_webp_holds_it_too(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x010F] = f"Workflow:{json.dumps(workflow())}"
    Image.new("RGB", (16, 16)).save(tmp_path / "a.webp", exif=exif)
    file = tmp_path / "a.webp"
    assert origin_of(open_image(file), file).settings == SETTINGS


@pytest.mark.parametrize(
    "content",
    [
        {"nodes": 3},
        {"nodes": [[], {"id": []}], "links": [3, [], [[1], [2], 0, 1, 0], {"id": {}}]},
        {"nodes": [{"id": 1, "type": "x"}], "definitions": {"subgraphs": [{"id": "x", "nodes": [{"type": "x"}]}]}},
        {"nodes": [node(1, "Reroute", any=("*", 1))], "links": [[1, 1, 0, 1, 0, "*"]]},
    ],
)  # fmt: skip
def test_what_is_damaged_says_nothing(tmp_path: Path, content: Node) -> None:
    assert origin(tmp_path, content).settings == {}
