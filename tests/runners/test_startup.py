"""What a command imports: those that only read, refuse or list answer at once, without the libraries that measure."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from sdopt.search.answered import Answered, question_of, write_answered
from sdopt.search.optimize import optimize_overrides
from sdopt.search.record import SearchRecord
from tests.command import ROOT

QUICKSTART = str(ROOT / "outputs/records/amd-epyc/quickstart")

HEAVY = {
    *(
        "torch",
        "diffusers",
        "transformers",
        "accelerate",
        "safetensors.torch",
        "torchmetrics",
    ),
    *(
        "mlflow",
        "pandas",
        "vl_convert",
        "matplotlib",
        "optuna",
        "scipy.stats",
        "scipy.ndimage",
    ),
}
"""Each takes from half a second to ten."""

COMPOSING = {"hydra", "omegaconf", "scipy.special"}
"""Some tenths of a second: only for commands that compose a configuration, or derive a statistic."""

_PROGRAM = """
import json, sys
sys.argv = ["sdopt", *json.loads(sys.argv[1])]
from sdopt.cli import main
try:
    code = main()
except SystemExit as end:
    code = end.code
print(json.dumps({"code": code, "modules": sorted(sys.modules)}), file=sys.stderr)
"""


def imported(
    cwd: Path, *words: str, more: Mapping[str, str] = {}
) -> tuple[int, set[str], str]:
    """Runs a command; returns its exit code, the modules that it imported, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(words)],
        cwd=cwd,
        env=os.environ | more,
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
    )
    said = json.loads(done.stderr.splitlines()[-1])
    return said["code"], set(said["modules"]), done.stdout + done.stderr


OPTIONS = {"sdopt.options", "sdopt.pipelines.hub", "sdopt.study.designs", "aiohttp"}
"""What composes variants, and what sends requests: reports know neither."""


@pytest.mark.parametrize(
    ("words", "code", "forbidden", "most"),
    [
        (["show", QUICKSTART], 0, HEAVY | OPTIONS | {"hydra", "omegaconf"}, 790),
        (["--help"], 0, HEAVY | COMPOSING, 130),
        (["shwo"], 2, HEAVY | COMPOSING, 130),
        (["optimize", "--help"], 0, HEAVY | COMPOSING, 290),
        (["ui"], 2, HEAVY | COMPOSING, 360),
        (["run", "--help"], 0, HEAVY, 930),
        (["run", "precison=bf16"], 2, HEAVY | OPTIONS | {"scipy.special"}, 600),
        (["run", "workload.steps=many"], 2, HEAVY, 930),
        (["run", "caching.interval=x", "caching=deepcache"], 2, HEAVY, 930),
        (["optimize", "emoji", "precison=bf16"], 2, HEAVY, 910),
        (["serve", "serve.port=80"], 2, HEAVY, 800),
        (["load-test", "precison=bf16"], 2, HEAVY, 900),
        (["plan", "precison=bf16"], 2, HEAVY, 700),
        (["doctor", "precison=bf16"], 2, HEAVY, 700),
        (["optimize", "emoji", "--bugdet", "4m"], 2, HEAVY | COMPOSING, 290),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.walk(2)
def test_a_command_that_measures_nothing(
    tmp_path: Path, words: list[str], code: int, forbidden: set[str], most: int
) -> None:
    """`most` is a tenth above the modules that it takes: an import that creeps in is seen before it is felt."""
    ended, modules, said = imported(tmp_path, *words)
    assert ended == code, said
    assert not modules & forbidden
    assert len(modules) <= most, sorted(modules)


def test_a_search_that_was_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("outputs/searches/emoji-0123456789")
    folder.mkdir(parents=True)
    write_answered(
        folder,
        Answered(
            1800,
            None,
            question_of(optimize_overrides("emoji", None, None, None, []), None),
        ),
    )
    record = SearchRecord(
        "emoji",
        str(folder),
        "",
        [],
        ["latency"],
        "mse",
        "Keep the baseline.",
        [],
        {},
        [],
        [],
    )
    (folder / "search.json").write_text(json.dumps(asdict(record)))
    ended, modules, said = imported(tmp_path, "optimize", "emoji")
    assert ended == 3, said
    assert "Keep the baseline." in said
    assert "answered before" in said
    assert not modules & HEAVY


def test_completion(tmp_path: Path) -> None:
    line = {"COMP_LINE": "sdopt run precis", "COMP_POINT": "16"}
    ended, modules, said = imported(tmp_path, "-sc", "query=bash", more=line)
    assert ended == 0
    assert "precision=" in said
    assert not modules & HEAVY
    assert len(modules) <= 465, sorted(modules)
