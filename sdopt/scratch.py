"""This process's folder for temporary files, which is removed however the process ends."""

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from pathlib import Path

from sdopt.errors import UsageError, print_problems

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""The variables that name folders of compiled kernels, which affect only the time of a start."""

_OWNER = "owner"
"""A file in the folder with the id of the process that owns the folder, and locked by that process."""

_mine: dict[int, Path] = {}
"""The folder of this process, by its id: a child that was forked must not use its parent's."""


def own_folder() -> Path:
    """Returns this process's folder in the temporary one. The first call makes it; the end of the process removes it.

    A process that is killed removes nothing. So the first call also removes the folders of this user's
    dead processes: the kernel has released their locks. Folders without such a lock are never touched.

    Raises:
        UsageError: no temporary folder can be written.
    """
    folder = _mine.get(os.getpid())
    if folder is None or not folder.is_dir():
        try:
            remove_abandoned()
            place = _short_folder()
            folder = Path(tempfile.mkdtemp(prefix=f"sdopt-{os.getpid()}-", dir=place))
            _lock(folder)
        except OSError as error:
            raise UsageError(
                f"no temporary folder can be written ({error.strerror or error}): make room, or name one with TMPDIR=…"
            ) from error
        if place != tempfile.gettempdir() and parent_process() is None:
            print_problems(
                [
                    f"TMPDIR={tempfile.gettempdir()}: too long for sockets: temporary files are in {place}"
                ]
            )
        _mine[os.getpid()] = folder
        # Runs after multiprocessing has removed its own files there; a forked child does not run it.
        Finalize(
            None,
            shutil.rmtree,
            args=(folder,),
            kwargs={"ignore_errors": True},
            exitpriority=-200,
        )
    return folder


_LONGEST = 50
"""Bytes of the path of a temporary folder, so that the sockets in it stay below the 108 that Linux allows."""


def _short_folder() -> str:
    """Returns the folder for temporary files; another one if its path is too long for sockets."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) <= _LONGEST:
        return folder
    short = next(
        (name for name in ("/tmp", "/var/tmp") if os.access(name, os.W_OK | os.X_OK)),
        None,
    )
    if short is None:
        raise UsageError(
            f"TMPDIR={folder}: the path is too long for sockets; name one of at most {_LONGEST} bytes"
        )
    return short


def named_caches() -> dict[str, str]:
    """Returns the folders of compiled kernels that the user named, by their environment variables.

    PyTorch sets the variable itself once something was compiled in this process, as in a notebook: that is no choice.
    """
    folders = {name: os.environ[name] for name in CACHES if name in os.environ}
    return {
        name: folder
        for name, folder in folders.items()
        if "/torchinductor_" not in folder
    }


def unwritable(folder: Path) -> str | None:
    """Returns why a folder can be neither written nor made; None if it can."""
    there = next(
        place
        for place in (folder, *folder.absolute().parents)
        if os.path.exists(place)  # noqa: PTH110
    )
    if not there.is_dir():
        return f"{there} is no folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written"
    try:  # root may write everywhere, and a quota or a kernel's own folder says so only now
        os.rmdir(tempfile.mkdtemp(dir=there))  # noqa: PTH106
    except OSError as error:
        return f"{there} cannot be written ({error.strerror})"
    return None


def cache_folder() -> Path:
    """Returns this user's folder for caches, or of a user without a home, as in containers, this process's own."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return own_folder() / "cache"


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """Yields a new folder below this process's own, and removes it after the block.

    Raises:
        UsageError: no temporary folder can be written.
    """
    with tempfile.TemporaryDirectory(
        prefix=f"{purpose}-", dir=own_folder(), ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def remove_abandoned() -> None:
    """Removes the folders of this user's processes that have ended without removing them."""
    for mark in Path(_short_folder()).glob(f"sdopt-*/{_OWNER}"):
        with suppress(OSError):
            ours = {path.lstat().st_uid for path in (mark, mark.parent)} == {
                os.getuid()
            }
            if ours and not mark.parent.is_symlink() and _is_free(mark):
                shutil.rmtree(mark.parent, ignore_errors=True)


def _lock(folder: Path) -> None:
    """Marks a folder as this process's own, until the process ends: the handle is closed by nobody else."""
    handle, name = tempfile.mkstemp(dir=folder)
    # Locked before it bears the name that others look for.
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.write(handle, f"{os.getpid()} {' '.join(sys.argv)}\n".encode(errors="replace"))
    Path(name).rename(folder / _OWNER)


def _is_free(mark: Path) -> bool:
    """Returns whether the process that locked a file has ended. Raises OSError if locks are not supported."""
    with mark.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
