"""Loads what tests share, and orders their files.

It imports nothing heavy: of pytest-xdist's processes, the one that hands out the tests runs none itself.
"""

import compileall
import gc
import math
import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

LONGEST = (
    "study/test_study.py",
    "test_guest.py",
    "library/test_applying.py",
    "apps/loadtest/test_loadtest.py",
    "tracking/test_tracking.py",
    "apps/exchange/test_judge.py",
    "tracking/test_tracking_server.py",
    "study/test_resume.py",
    "options/test_pairs.py",
    "gate/test_commands.py",
)
"""Files that take longest. They are begun first, so that none keeps a single process busy at the end.

The first two share no study: one process would wait for the other.
"""

NUMERIC = (
    "library/test_applying.py",
    "options/test_attention.py",
    "options/test_caching.py",
    "options/test_lora.py",
    "options/test_memory.py",
    "options/test_precision.py",
    "options/test_proofs.py",
    "pipelines/test_models.py",
    "pipelines/test_sampling.py",
    "pipelines/test_tasks.py",
    "quality/test_distances.py",
    "quality/test_metrics.py",
    "worker/test_calls.py",
)
"""Files whose tests compare numbers that networks compute, which other instructions of a processor round otherwise."""


def pytest_configure(config: pytest.Config) -> None:
    """Imports the fixtures, and with them PyTorch, where tests run; what is shown is as wide for all who run them."""
    os.environ["COLUMNS"] = "160"
    if not hasattr(config, "workerinput"):
        # Hundreds of processes of sdopt start: containers often set PYTHONDONTWRITEBYTECODE, and each would compile it.
        compileall.compile_dir(Path(__file__).parents[1] / "sdopt", quiet=1, workers=0)
    # And each process that runs tests would rewrite the assertions of all of them, which takes eleven seconds.
    sys.dont_write_bytecode = False
    hands_out = config.getoption("numprocesses", None) and not hasattr(
        config, "workerinput"
    )
    if not hands_out:
        # First: it imports libraries that ask for a card as on a machine without one, because they would start CUDA.
        import_module("sdopt.worker.preload")
        gc.set_threshold(
            700, 10, 1000
        )  # full collections, through all of PyTorch, took a tenth of the time
        config.pluginmanager.import_plugin("tests.fixtures")


def pytest_collection_finish() -> None:
    """Lets the files of users that tests write be compiled, or not, as the environment says."""
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the tests by file, the longest first, marks those on numerics, and leaves a few cases of each walk."""
    _shorten_walks(items)
    numeric = {Path(__file__).parent / name for name in NUMERIC}
    for item in items:
        if item.path in numeric:
            item.add_marker("numeric")
    order = {
        Path(__file__).parent / name: number for number, name in enumerate(LONGEST)
    }
    items.sort(key=lambda item: order.get(item.path, len(LONGEST)))


def _shorten_walks(items: list[pytest.Item]) -> None:
    """Marks as slow all quick cases of a walk but as many as its mark says, evenly spread."""
    walks: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("walk") and not item.get_closest_marker("slow"):
            walks.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in walks.values():
        mark = cases[0].get_closest_marker("walk")
        assert mark
        kept = cases[:: math.ceil(len(cases) / mark.args[0])]
        for case in cases:
            if case not in kept:
                case.add_marker("slow")
