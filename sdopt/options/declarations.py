"""What an option declares as data: packages that it needs, and options that it excludes."""

from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from packaging.requirements import Requirement
from packaging.version import Version

from sdopt.hardware.device import Device


@dataclass(frozen=True)
class Extra:
    """An extra of sdopt, and the modules of other projects that it installs."""

    extra: str
    modules: tuple[str, ...]

    def missing(self, device: Device) -> list[str]:
        """Returns a conflict if a module is not installed on this machine, or a package is too old or too new."""
        if (
            not device.is_here
        ):  # planned for another machine, of whose packages this one says nothing
            return []
        absent = [module for module in self.modules if find_spec(module) is None]
        problems = absent or outdated(self.extra)
        if not problems:
            return []
        return [f"needs {', '.join(problems)}: pip install 'sdopt[{self.extra}]'"]


@dataclass(frozen=True)
class Excludes:
    """Options of another axis that an option cannot be combined with.

    Attributes:
        axis: where the other option is chosen, such as `lora` or `memory.layerwise_casting`.
        reason: why the two cannot be combined, and what to choose instead.
        kinds: classes of the options that are excluded; () are all, of compilers those that compile.
        unless: classes of options that can be combined all the same.
    """

    axis: str
    reason: str
    kinds: tuple[type, ...] = ()
    unless: tuple[type, ...] = ()

    def forbids(self, kind: type) -> bool:
        """Returns whether an option of a class is excluded."""
        return issubclass(kind, self.kinds or object) and not issubclass(
            kind, self.unless
        )


@cache
def outdated(extra: str) -> tuple[str, ...]:
    """Returns the packages of one of sdopt's extras that are installed in a version that it does not take."""
    try:
        requirements = [Requirement(line) for line in requires("sdopt") or ()]
    except PackageNotFoundError:  # run from a checkout that is not installed
        return ()
    problems = []
    for requirement in requirements:
        if requirement.marker is None or not requirement.marker.evaluate(
            {"extra": extra}
        ):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:  # another package may have its modules
            continue
        # A build from source or of last night counts as the release that it is for.
        if Version(installed).base_version not in requirement.specifier:
            problems.append(
                f"{requirement.name}{requirement.specifier} instead of {installed}"
            )
    return tuple(problems)
