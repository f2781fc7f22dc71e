"""The documentation: its links lead somewhere, and what it says to write works as it stands."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from sdopt.config.composer import HydraComposer
from sdopt.config.overrides import group_of
from sdopt.config.paths import CONF
from sdopt.record.records import Status, StudyResult
from sdopt.report import columns
from sdopt.report.catalog import Rendering, markdown_table
from sdopt.report.columns import Column
from sdopt.report.summary import summary_of
from tests.command import ROOT, SMOKE, sdopt
from tests.pipelines.test_hub import cache  # noqa: F401

PAGES = [
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
] or [ROOT / "README.md"]
HOW_TO_ADD = (ROOT / "sdopt" / "ADDING.md").read_text()
REFERENCE = (ROOT / "sdopt" / "README.md").read_text()
STUDIES = (ROOT / "sdopt" / "STUDIES.md").read_text()


def block(heading: str, language: str) -> str:
    """The first code block of a language below a heading of `sdopt/ADDING.md`."""
    section = HOW_TO_ADD.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert found, f"no {language} below '{heading}'"
    return found[1]


def without_code(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchor_of(heading: str) -> str:
    """What GitHub calls a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_links_lead_to_files_and_headings() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
            path, _, anchor = target.partition("#")
            if "://" in target:
                continue
            file = (page.parent / path).resolve() if path else page
            anchored = anchor and file.suffix == ".md" and file.exists()
            headings = (
                re.findall(r"^#+ (.*)$", without_code(file), re.MULTILINE)
                if anchored
                else []
            )
            if not file.exists() or (
                anchored and anchor not in map(anchor_of, headings)
            ):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken


def test_the_reference_lists_its_sections_and_every_extra() -> None:
    for page in (REFERENCE, STUDIES, HOW_TO_ADD):
        listed = re.findall(r"\]\(#([\w-]+)\)", page.split("\n## ")[0])
        sections = re.findall(r"^## (.*)$", page, re.MULTILINE)
        assert listed == list(map(anchor_of, sections))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    section = REFERENCE.split("\n## Extras\n")[1].split("\n## ")[0]
    assert not [name for name in extras if f"`{name}`" not in section]


def test_what_to_look_at_is_there() -> None:
    table = REFERENCE.split("\nWhere to look in the code:\n")[1].split("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", table)
    assert len(named) >= 10
    missing = [
        f"{file}: {name}"
        for file, names in named
        for name in re.findall(r"`([\w.]+)`", names)
        if not all(
            re.search(
                rf"^\s*(def|class) {part}\b",
                (ROOT / "sdopt" / file).read_text(),
                re.MULTILINE,
            )
            for part in name.split(".")
        )
    ]
    assert not missing


def test_the_documented_optimization_runs_and_proves_itself(tmp_path: Path) -> None:
    (tmp_path / "my_conf" / "attention").mkdir(parents=True)
    (tmp_path / "my_conf" / "attention" / "scaled.yaml").write_text(
        block("Add an optimization", "yaml")
    )
    (tmp_path / "my_options.py").write_text(block("Add an optimization", "python"))
    [command] = [
        line
        for line in block("Add an optimization", "bash").splitlines()
        if line.startswith("sdopt run")
    ]
    finished = sdopt(tmp_path, *command.split()[1:], *SMOKE)
    assert finished.code == 0, finished.shown
    assert finished.result.variants[1].status is Status.OK
    shown = [
        item.summary
        for item in finished.result.variants[1].measurements[0].shapes[0].evidence
    ]
    assert any("layers scaled by 0.8" in summary for summary in shown)


def test_the_documented_design_plans(tmp_path: Path) -> None:
    names: dict[str, object] = {"__name__": "sdopt.study.designs"}
    exec(
        "from dataclasses import dataclass, field\nfrom sdopt.study.designs import *\n",
        names,
    )
    exec("from sdopt.study import designs\nglobals().update(vars(designs))\n", names)
    exec(block("Add a study design", "python"), names)
    design = names["Neighbours"](options=["attention:math", "attention:vanilla"])  # type: ignore[operator]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        plan = design.plan(HydraComposer(SMOKE))
    assert [(edge.candidate, edge.reference) for edge in plan.edges] == [
        ("attention=math", "baseline"),
        ("attention=vanilla", "attention=math"),
    ]
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "neighbours.yaml").write_text(
        block("Add a study design", "yaml")
    )
    with initialize_config_dir(version_base="1.3", config_dir=str(tmp_path)):
        assert compose("study/neighbours").study.name == "neighbours"


def test_the_documented_report_writes(result: StudyResult, tmp_path: Path) -> None:
    names: dict[str, object] = {}
    exec(
        "from sdopt.report.catalog import *\nfrom sdopt.report import catalog\n", names
    )
    exec("globals().update(vars(catalog))\n", names)
    exec(block("Add a report", "python").partition("\n\n\nREPORTS")[0], names)
    of = Rendering(summary_of(result), tmp_path)
    content = names["speedups_csv"](of)  # type: ignore[operator]
    assert content.decode().splitlines()[0] == "variant,speedup,verdict"
    assert "bfloat16," in content.decode()


def test_the_documented_column_is_shown(
    result: StudyResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "images/s" not in markdown_table(summary_of(result))
    column = eval(block("Add a column", "python"), {"Column": Column})
    monkeypatch.setattr(columns, "COLUMNS", (*columns.COLUMNS, column))
    assert "images/s" in markdown_table(summary_of(result))


def test_the_documented_optimized_pipeline_runs(
    cache: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a model of the hub: the packaged one is a folder as others."""
    [block] = re.findall(
        r"```python\n(from diffusers import .*?)```",
        (ROOT / "README.md").read_text(),
        re.DOTALL,
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    names: dict[str, Any] = {}
    for given, other in (
        ("steps=20", "steps=2"),
        ("source = MODEL", "source = 'somebody/small-emoji'"),
    ):
        assert given in block
        block = block.replace(given, other)
    exec(block, names)
    shown = capsys.readouterr().out
    assert "attention=vanilla: " in shown
    assert "memory=vae_slicing: a batch of 2 decoded with at most 1 at a time" in shown
    assert "NO EFFECT" not in shown
    assert names["image"].size == (64, 64)


def test_the_readme_counts_the_optimizations() -> None:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        composed = HydraComposer([]).current
    groups = {group_of(axis) for axis in composed.optimizations} | {
        "memory",
        "environment",
    }
    groups.remove("patch")  # functions of the user's own
    # Of a group that combines none is chosen at first; of the others the first choice is no optimization.
    counts = {
        group: len(list((CONF / group).glob("*.yaml"))) - (group in composed.choices)
        for group in groups
    }
    readme = (ROOT / "README.md").read_text()
    assert f"sdopt has {sum(counts.values())} optimizations today" in readme
    names = {
        "precision": "precisions",
        "compiler": "compilers",
        "attention": "for attention",
    }
    names |= {"memory": "for memory", "caching": "caches"}
    assert (
        ", ".join(f"{counts[group]} {name}" for group, name in names.items()) in readme
    )
