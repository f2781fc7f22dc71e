"""Packs the suite's results into one small archive, to move them between machines."""

import io
import lzma
import tarfile
import tempfile
from itertools import chain
from pathlib import Path

from sdopt.errors import UsageError
from sdopt.record.files import write_atomically
from sdopt.suite.record import FILE, PAGE, read_record

SUFFIX = ".tar.xz"

_WHOLE = (FILE, PAGE, "parts/*/*/result.json", "parts/*/*/.hydra/*", "parts/*/*/doctor.json")
"""What a later call reads, and what `sdopt show` and `sdopt report` make everything else from."""

_LOGS = ("parts/*/log.txt", "parts/*/*/logs/*.log")
_LOG_BYTES = 64 * 1024
"""How much of each log is kept, from its end."""


def pack(folder: Path, archive: Path) -> None:
    """Writes the results in a folder of the suite to an archive, which is replaced in one step; leaves images out.

    Raises OSError where the archive cannot be written.
    """
    packed = io.BytesIO()
    # The lowest level: it is written before and after every part, and text becomes small at any level.
    with tarfile.open(fileobj=packed, mode="w:xz", preset=1) as tar:
        for path in chain.from_iterable(sorted(folder.glob(pattern)) for pattern in (*_WHOLE, *_LOGS)):
            content = path.read_bytes()
            content = content[-_LOG_BYTES:] if path.suffix in (".txt", ".log") else content
            member = tarfile.TarInfo(str(path.relative_to(folder)))
            member.size, member.mtime = len(content), int(path.stat().st_mtime)
            tar.addfile(member, io.BytesIO(content))
    write_atomically(archive, packed.getvalue())


def unpack(archive: Path, folder: Path, device: str) -> str:
    """Makes the folder of the suite from an archive, whole or not at all.

    Args:
        archive: a file that `pack` wrote.
        folder: the folder to make.
        device: the name of the device that the results must be of; of another one, no folder is made, nor is a folder
            replaced that exists.

    Returns:
        the name of the device that the results are of.

    Raises:
        UsageError: it is no such file, or holds more than files within the folder.
        OSError: the folder cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
        made = Path(beside) / "made"
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(made, filter=_within)
        except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
            raise UsageError(f"archive={archive}: not an archive of the suite ({error})") from error
        record = read_record(made)
        if record is None:
            raise UsageError(f"archive={archive}: not an archive of the suite (it has no {FILE})")
        if record.device == device and not folder.exists():
            made.rename(folder)
        return record.device


def _within(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """Refuses links and devices too, which `tarfile.data_filter` allows within the folder."""
    if not member.isfile():
        raise tarfile.SpecialFileError(member)
    return tarfile.data_filter(member, folder)
