"""Recognises a search that was answered before, so that the same command answers at once.

What counts as the same is told by the words of the command line, the files that they name, and the machine: no library
that measures is imported. In doubt the search is set up as usual, which compares every setting.
"""

import json
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from sdopt.about import PACKAGE, __version__
from sdopt.config.paths import CONF
from sdopt.record.files import short_digest, write_atomically

ANSWERED = "answered.json"

_HOW_LONG = ("search.budget_s", "search.trials")
_NVIDIA = Path("/proc/driver/nvidia")
_ENVIRONMENT = ("MLFLOW_TRACKING_URI",)
_LIBRARIES = (
    *("ATEN_", "CUBLAS", "CUDA_", "CUDNN", "DIFFUSERS_", "DNNL_", "KMP_", "LD_PRELOAD"),
    *("MKL_", "NVIDIA_", "OMP_", "ONEDNN_", "PYTORCH_", "TORCH", "TRITON_"),
)
"""How the names of variables begin that libraries read which measure."""
_MOST_FILES = 500
"""Files of a model's folder that are looked at."""


@dataclass(frozen=True)
class Answered:
    """How long a search was given when it was answered, and a digest of what was asked."""

    budget_s: float
    trials: int | None
    question: str = ""

    def covers(self, budget_s: float, trials: int | None) -> bool:
        """Returns whether a call with this budget would find nothing new."""
        return budget_s <= self.budget_s and (
            self.trials is None or (trials or sys.maxsize) <= self.trials
        )


def write_answered(folder: Path, answered: Answered) -> None:
    """Writes that a search was answered. Raises OSError."""
    write_atomically(folder / ANSWERED, json.dumps(asdict(answered)).encode())


def read_answered(folder: Path) -> Answered | None:
    """Returns how a search was answered; None if it was not, or if the file cannot be read."""
    try:
        return Answered(**json.loads((folder / ANSWERED).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def numbered(base: Path) -> list[Path]:
    """Returns the folders of one search and of those that `--again` began, the oldest first."""
    begun = [(1, base)] if base.is_dir() else []
    for path in base.parent.glob(f"{base.name}.*"):
        number = path.name.removeprefix(f"{base.name}.")
        if number.isdigit() and path.is_dir():
            begun.append((int(number), path))
    return [path for _, path in sorted(begun)]


def question_of(overrides: Sequence[str], config_dir: Path | None) -> str:
    """Returns a digest of what is asked, however long it may take; "" if the words alone do not tell."""
    words = [
        word
        for word in overrides
        if word.lstrip("+").partition("=")[0] not in _HOW_LONG
    ]
    # What an interpolation stands for, and what a function of a file imports.
    untold = any("${" in word or ".py:" in word for word in words)
    if config_dir is not None or untold:
        return ""
    facts = [
        __version__,
        sys.prefix,
        str(Path.cwd()),
        *words,
        *_stamps(words),
        *_revisions(),
        *_machine(),
        *_software(),
    ]
    return short_digest("\n".join(facts).encode())


def answered_before(overrides: Sequence[str], config_dir: Path | None) -> Path | None:
    """Returns the folder of the search that answered the same command within the same budget; None if there is none."""
    question = question_of(overrides, config_dir)
    asked = dict(word.lstrip("+").partition("=")[::2] for word in overrides)
    defaults = yaml.safe_load((CONF / "search.yaml").read_text(encoding="utf-8"))[
        "search"
    ]
    folder = Path(asked.get("search.folder", defaults["folder"])).expanduser()
    try:
        budget_s = float(asked.get("search.budget_s", defaults["budget_s"]))
        trials = (
            int(asked["search.trials"])
            if "search.trials" in asked
            else defaults["trials"]
        )
    except ValueError:
        return None
    for path in sorted(folder.glob(f"*/{ANSWERED}")):
        answered = read_answered(path.parent)
        if not question or answered is None or answered.question != question:
            continue
        newest = numbered(path.parent.parent / re.sub(r"\.\d+$", "", path.parent.name))[
            -1:
        ]
        if newest == [path.parent] and answered.covers(budget_s, trials):
            return path.parent
    return None


def _stamps(words: Sequence[str]) -> Iterator[str]:
    """Yields the size and the time of each file that the words name."""
    for word in words:
        # A name of a file may have signs in it that end a value in a list.
        value = word.partition("=")[2].strip("'\"")
        parts = re.split(r"[=\[\]{},:'\"]", word)
        for part in dict.fromkeys([value, *parts]):
            named = part.strip()
            with suppress(OSError, RuntimeError):  # of a user whom nobody knows
                path = Path(named).expanduser()
                yield from _stamps_of(path)


def _stamps_of(path: Path) -> Iterator[str]:
    if path.name and path.is_file():
        yield _stamp(path)
        beside = path.with_suffix(".yaml")  # which may say what a model predicts
        if beside.is_file():
            yield _stamp(beside)
    elif path.name and path.is_dir():
        # A part of a pipeline may be a link to the folder of another one, into which `rglob` does not look.
        files = chain(path.glob("*/*"), path.rglob("*"))
        for inside in sorted({*islice(files, _MOST_FILES)}):
            yield _stamp(inside)


def _stamp(file: Path) -> str:
    stat = file.stat()
    return f"{file} {stat.st_size} {stat.st_mtime_ns}"


def _revisions() -> Iterator[str]:
    """Yields which commits of repositories the hub's cache has: a repository of the same name may have others by now."""
    with suppress(OSError, RuntimeError):
        cache = _cache_of_the_hub()
        for file in sorted(cache.glob("models--*/refs/*")):
            yield f"{file} {file.read_text(encoding='utf-8')}"


def _cache_of_the_hub() -> Path:
    """Returns where `huggingface_hub` keeps repositories, which takes long to import. Raises RuntimeError as Path does."""
    own = os.environ.get
    caches = own("XDG_CACHE_HOME", "~/.cache")
    home = own("HF_HOME", f"{caches}/huggingface")
    cache = own("HF_HUB_CACHE", own("HUGGINGFACE_HUB_CACHE", f"{home}/hub"))
    return Path(os.path.expandvars(cache)).expanduser()


def _software() -> Iterator[str]:
    """Yields what is installed, by the names of its folders, and variables by which libraries compute otherwise.

    sdopt itself may be a checkout, whose version stays as it is when its files change.
    """
    for file in sorted(PACKAGE.rglob("*.py")):
        yield _stamp(file)
    installed = Path(sysconfig.get_path("purelib")).glob("*.dist-info")
    yield from sorted(folder.name for folder in installed)
    for name in sorted(os.environ):
        if name.startswith(_LIBRARIES):
            yield f"{name}={os.environ[name]}"


def _machine() -> Iterator[str]:
    """Yields what tells this machine from another one that shares the folder."""
    yield platform.node()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        yield next((line for line in lines if line.startswith("model name")), "")
    yield f"{len(os.sched_getaffinity(0))} cores"
    for file in sorted([*_NVIDIA.glob("version"), *_NVIDIA.glob("gpus/*/information")]):
        yield file.read_text(encoding="utf-8")
    yield from (f"{name}={os.environ.get(name)}" for name in _ENVIRONMENT)
