"""Downloads the folder of a run or a sweep from an address that fsspec knows, for example `s3://bucket/sweeps/one`."""

import tempfile
from pathlib import Path, PurePosixPath

from sdopt.errors import UnavailableError, UsageError
from sdopt.record.checks import stays_within
from sdopt.scratch import own_folder

_MOST_FILES, _MOST_BYTES = 100_000, 16 * 2**30
"""More files than the largest sweep leaves: naming a whole bucket by mistake is an error before the disk is full."""


def is_address(name: str) -> bool:
    """Returns whether a name is an address, not a folder, an MLflow run or an override (`tracking.uri=http://…`)."""
    return "://" in name.partition("=")[0]


def download(address: str) -> Path:
    """Copies the files below an address to a folder of the same name; returns it. It is removed when this process ends.

    Raises:
        UsageError: the protocol is unknown or its package is missing, nothing is there, or too much.
        UnavailableError: it cannot be read, or not be written here.
    """
    import fsspec

    try:
        system, root = fsspec.url_to_fs(address)
        listed = system.find(root, detail=True).items()
        found = {path: entry["size"] or 0 for path, entry in listed if entry["type"] == "file"}
        _require_sweep(address, found)
        folder = Path(tempfile.mkdtemp(prefix="download-", dir=own_folder())) / (PurePosixPath(root).name or "root")
        for path in found:
            relative = str(PurePosixPath(path).relative_to(root))
            if relative == ".":
                raise UsageError(f"{address}: is a file; name the folder that contains it")
            if not stays_within(relative):
                raise UsageError(f"{address}: {relative!r} lies outside of it")
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            system.get_file(path, str(folder / relative))
    except (ImportError, ValueError) as error:  # the package is missing, which it names; the protocol is unknown
        raise UsageError(f"{address}: {error}") from error
    except UsageError:
        raise
    except Exception as error:  # each protocol has errors of its own
        raise UnavailableError(f"{address}: cannot be read: {type(error).__name__}: {error}") from error
    return folder


def _require_sweep(address: str, found: dict[str, int]) -> None:
    """Raises UsageError if there is no result among the files, or more than a sweep leaves."""
    if not any(PurePosixPath(path).name == "result.json" for path in found):
        raise UsageError(f"{address}: no result.json at or below it")
    size = sum(found.values())
    if len(found) > _MOST_FILES or size > _MOST_BYTES:
        raise UsageError(
            f"{address}: {len(found)} files, {size / 2**30:.1f} GiB, are too much for a sweep; name a folder in it"
        )
