"""Logs that programs keep beside their images say what was made; the images themselves need not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from sdopt.apps.exchange.pairing import other_settings
from sdopt.apps.exchange.pictures import read_folder
from tests.apps.exchange.test_unlike_folders import COUNT, plain

Values = dict[str, Any]


def values_of(number: int, **more: Any) -> Values:
    values = {
        "prompt": "a harbour, dusk",
        "negative_prompt": "fog",
        "seed": str(number),
        "steps": 30,
    }
    values |= {
        "resolution": "(1152, 896)",
        "guidance_scale": 4,
        "sharpness": 2,
        "base_model": "xl.safetensors",
    }
    return (
        values
        | {
            "sampler": "dpmpp_2m_sde_gpu",
            "scheduler": "karras",
            "lora_combined_1": "ships.st : 0.5",
        }
        | more
    )


def copied(name: str, values: Values) -> str:
    """As Fooocus writes it since version 2.1.8."""
    rows = "".join(
        f"<tr><td class='label'>{key}</td><td class='value'>{value}</td></tr>"
        for key, value in values.items()
    )
    button = quote(json.dumps(values, indent=0), safe="")
    picture = (
        f"<a href=\"{name}\"><img src='{name}' loading='lazy'/></a><div>{name}</div>"
    )
    return f'<div id="x">{picture}<table>{rows}</table><button onclick="to_clipboard(\'{button}\')">Copy</button></div>'


def early(name: str, values: Values) -> str:
    """As its first versions did: names in words, in bold."""
    named = {
        "Negative Prompt": "negative_prompt",
        "Guidance Scale": "guidance_scale",
        "Base Model": "base_model",
    }
    named |= {
        word.capitalize(): word
        for word in ("prompt", "seed", "steps", "sampler", "sharpness", "resolution")
    }
    told = "".join(
        f"<p>{label}: <b>{values[key]}</b></p>" for label, key in named.items()
    )
    return f'<div id="x"><img src="{name}" width=auto></img>{told}</div>'


def folder_of(folder: Path, block: Callable[[str, Values], str], **more: Any) -> Path:
    plain(folder)
    blocks = [
        block(f"{number:05d}.png", values_of(number, **more)) for number in range(COUNT)
    ]
    (folder / "log.html").write_text(
        f"<html><body><p>Fooocus Log</p>{''.join(blocks)}</body></html>"
    )
    return folder


@pytest.mark.parametrize("block", [copied, early])
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"steps": 15}, ["steps 15 (baseline 30)"]),
        ({"sharpness": 9}, ["sharpness 9 (baseline 2)"]),
        ({"base_model": "other.safetensors"}, ["model other (baseline xl)"]),
        ({}, []),
    ],
)
def test_of_fooocus_are_held_against_each_other(
    tmp_path: Path, block: Callable[[str, Values], str], more: Values, said: list[str]
) -> None:
    first = read_folder(folder_of(tmp_path / "base", block))
    second = read_folder(folder_of(tmp_path / "other", block, **more))
    assert [picture.made_from for picture in first] == [
        ("a harbour, dusk", "fog", number) for number in range(COUNT)
    ]
    words = [word.lower() for word in other_settings(first, second)]
    assert words == [word.lower() for word in said]


def test_a_lora_of_the_log_is_one(tmp_path: Path) -> None:
    [picture, *_] = read_folder(folder_of(tmp_path / "base", copied))
    assert picture.origin.program == "Fooocus"
    assert (picture.origin.settings["LoRA"], picture.origin.settings["size"]) == (
        "ships.st:0.5",
        "1152×896",
    )


def test_of_images_that_the_web_ui_saved(tmp_path: Path) -> None:
    folders = []
    for name, steps in (("base", 30), ("other", 20)):
        folder = plain(tmp_path / name)
        rows = [
            f'"a harbour, dusk",{n},512,768,Euler a,7,{steps},{n:05d}.png,fog'
            for n in range(COUNT)
        ]
        head = "prompt,seed,width,height,sampler,cfgs,steps,filename,negative_prompt"
        (folder / "log.csv").write_text("\n".join([head, *rows]))
        folders.append(read_folder(folder))
    assert folders[0][3].made_from == ("a harbour, dusk", "fog", 3)
    assert folders[0][0].origin.settings["guidance scale"] == "7"
    assert other_settings(folders[0], folders[1]) == ["steps 20 (baseline 30)"]


@pytest.mark.parametrize(
    "text",
    ["", "<img src='a.png'>", "<img src='00000.png'> to_clipboard('%7B')", "{" * 9],
)
def test_that_say_nothing_are_no_error(tmp_path: Path, text: str) -> None:
    folder = plain(tmp_path / "base")
    for name in ("log.html", "log.csv"):
        (folder / name).write_text(text)
    assert {picture.seed for picture in read_folder(folder)} == {None}
