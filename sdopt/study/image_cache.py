"""Caches drawn images by a digest of everything that they depend on, so that none is drawn twice.

An input that the key omits could change unnoticed. So the key covers digests of the weights, of the prompts and of
sdopt's own code, and the versions of the libraries. Images of a user's own options are not cached: such an option may
read files that the key cannot cover.
"""

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sdopt.record.records import Environment
from sdopt.record.scores import ImageRecord
from sdopt.scratch import CACHES
from sdopt.variant import Variant
from sdopt.worker.draws import Draw

_RECORDS = "records.json"

_UNFINISHED, _STALE_S = "tmp", 3600
"""Beginning of the name of a folder that is being filled, and the age at which one was left by a killed process."""


def content_key(variant: Variant, draw: Draw, inputs: Mapping[str, str], environment: Environment) -> str:
    """Returns a digest of everything that the images of a draw depend on.

    Args:
        variant: its model, task, scheduler, workload and options.
        draw: which images.
        inputs: digests of the weights, and of the code of users' options.
        environment: device, versions, digest of sdopt's code.
    """
    parts: dict[str, Any] = {
        "work": [asdict(part) for part in variant.work],
        "options": {
            axis: [f"{type(option).__module__}.{type(option).__qualname__}", asdict(option)]
            for axis, option in sorted(variant.optimizations.items())
        },
        "hardware": [variant.hardware.device, variant.hardware.threads],
        "draw": asdict(draw),
        "latents": _digest_of(variant.workload.latents),
        "inputs": dict(inputs),
        "device": {k: v for k, v in environment.device.items() if "free" not in k},
        "cpu": environment.cpu,
        "variables": {k: v for k, v in environment.variables.items() if k not in CACHES},
        "versions": [environment.python, environment.packages, environment.sdopt_version, environment.code],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _digest_of(file: str | None) -> str:
    return hashlib.sha256(Path(file).expanduser().read_bytes()).hexdigest() if file else ""


class ImageCache:
    """Images by content key, in a folder that several studies may use at once.

    Args:
        root: the folder; None keeps nothing.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root

    def fetch(self, key: str, folder: Path) -> list[ImageRecord] | None:
        """Copies the images of a key to `folder` and returns their records; None if not all of them are there."""
        kept = self._folder(key)
        if kept is None or not (kept / _RECORDS).is_file():
            return None
        try:
            records = [ImageRecord(**entry) for entry in json.loads((kept / _RECORDS).read_text())]
            folder.mkdir(parents=True, exist_ok=True)
            for file in kept.iterdir():
                if file.name != _RECORDS:
                    shutil.copyfile(file, folder / file.name)
        except (OSError, ValueError, TypeError):
            return None  # if another process removes the folder meanwhile, the images are drawn again
        return records if all((folder / record.path).is_file() for record in records) else None

    def keep(self, key: str, folder: Path, records: Sequence[ImageRecord]) -> None:
        """Copies the images of `folder` into the cache, as a whole or not at all. On a full disk nothing is kept."""
        target = self._folder(key)
        if target is None or target.is_dir():
            return
        with suppress(OSError):
            self._remove_stale()
            target.parent.mkdir(parents=True, exist_ok=True)
            fresh = Path(tempfile.mkdtemp(dir=target.parent, prefix=_UNFINISHED))
            try:
                for file in folder.iterdir():
                    shutil.copyfile(file, fresh / file.name)
                (fresh / _RECORDS).write_text(json.dumps([asdict(record) for record in records]))
                fresh.replace(target)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)

    def _remove_stale(self) -> None:
        for left in self._root.glob(f"*/{_UNFINISHED}*") if self._root else ():
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)

    def _folder(self, key: str) -> Path | None:
        return self._root / key[:2] / key if self._root else None
