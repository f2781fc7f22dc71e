"""The limit that a shell or a batch system sets to the address space of this process (`ulimit -v`)."""

import resource

from sdopt.errors import UnavailableError


def require_address_space(what: str, least: int) -> None:
    """Raises UnavailableError if the address space of this process is limited to less than `least` bytes."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if allowed != resource.RLIM_INFINITY and allowed < least:
        needed = f"but at least {least / 2**20:g} MiB is required for {what}; allow more (ulimit -v unlimited)"
        raise UnavailableError(f"{limited_address_space()}, {needed}")


def limited_address_space() -> str:
    """Returns a sentence about the limit of this process's address space; "" if there is no limit."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    return "" if allowed == resource.RLIM_INFINITY else f"address space is limited to {allowed / 2**20:.0f} MiB"
