"""Locks that coordinate one user's sdopt processes: on a device, on a folder, on a store.

All are advisory (`flock`). The kernel releases a lock when its process dies, so that no lock is ever stale.
"""

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sdopt.hardware.device import Device


def runtime_folder() -> Path:
    """Returns the folder of this user's locks: below `XDG_RUNTIME_DIR`, or a folder of their own in the temporary one.

    Raises:
        OSError: the folder cannot be created, or belongs to another user.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and not os.access(
        base, os.W_OK | os.X_OK
    ):  # another user's, as after `su`, or gone
        base = None
    folder = (
        Path(base) / "sdopt"
        if base
        else Path(tempfile.gettempdir()) / f"sdopt-{os.getuid()}"
    )
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


@contextmanager
def exclusive(what: str | Path) -> Iterator[None]:
    """Waits until no other process does `what`, and keeps the others waiting meanwhile.

    A text is known to this user's processes on this machine; a file, which exists only meanwhile, to all that share its
    folder. Where no lock can be written no process waits: a full disk must not keep results from a tracking server.
    """
    try:
        if isinstance(what, str):
            what = (
                runtime_folder()
                / f"{hashlib.sha256(what.encode()).hexdigest()[:16]}.lock"
            )
        handle = _locked(what)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            what.unlink()
        os.close(handle)


def _locked(path: Path) -> int:
    """Waits for the lock of a file, which is created if it is missing; returns its handle. Raises OSError."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        # The previous holder removed the file: only the lock of the present file counts.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        os.close(handle)


@contextmanager
def lock_folder(folder: Path) -> Iterator[bool]:
    """Locks a folder while a block runs, and yields True; yields False if another process has locked it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass  # some network file systems cannot lock folders
        yield True
    finally:
        os.close(handle)


@contextmanager
def reserve(device: "Device", study: str) -> Iterator[str]:
    """Reserves a device for one study while a block runs, and yields ""; yields the holder if another study has it.

    A CPU is reserved core by core, so that studies with separate cores can run at the same time. Without a folder for
    locks nothing is reserved. Others are shown `study`.
    """
    handles: list[int] = []
    holder = ""
    try:
        with suppress(OSError):
            folder = runtime_folder()
            for name in _units(device):
                handle = os.open(
                    folder / f"{name}.device", os.O_RDWR | os.O_CREAT, 0o600
                )
                handles.append(handle)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    holder = (
                        os.read(handle, 4096).decode(errors="replace")
                        or "another study"
                    )
                    break
                os.truncate(handle, 0)
                os.write(handle, f"{study} (process {os.getpid()})".encode())
        if holder:
            while handles:
                os.close(handles.pop())
        yield holder
    finally:
        for handle in handles:
            os.close(handle)


def _units(device: "Device") -> list[str]:
    """Returns the units of a device that are reserved: the card, or each core that this process may use."""
    if device.is_cuda:
        return [
            str(device.attributes.get("uuid", device.torch_name))
            .replace(":", "-")
            .replace("/", "-")
        ]
    cores = (
        os.sched_getaffinity(0)
        if hasattr(os, "sched_getaffinity")
        else range(os.cpu_count() or 1)
    )
    return [f"core-{core}" for core in sorted(cores)]
