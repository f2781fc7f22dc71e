"""Checks the resource limits of a shell or a batch system (`ulimit`) against the minimum for a measurement.

Below the minimum, libraries abort the process with unrelated errors, or results cannot be written.
"""

import resource

from sdopt.errors import UnavailableError

SIZES = (
    (resource.RLIMIT_AS, "v", "address space", 8 * 2**30),
    (resource.RLIMIT_FSIZE, "f", "the size of a file", 64 * 2**20),
)
"""Limits in bytes: resource, flag of `ulimit`, description, minimum. Importing PyTorch and diffusers takes most of the
address space; the largest files are results with many samples, final latents, and MLflow's database."""


def require_limits() -> None:
    """Checks the limits of this process, which its workers inherit.

    Raises:
        UnavailableError: some limits are too low; the error has a line for each.
    """
    found = (_too_low(*row) for row in SIZES)
    if problems := [*filter(None, found)]:
        raise UnavailableError(problems)


def require_address_space(what: str, least: int) -> None:
    """Raises UnavailableError if the address space of this process is limited to less than `least` bytes."""
    if problem := _too_low(
        resource.RLIMIT_AS, "v", "address space", least, f" for {what}"
    ):
        raise UnavailableError(problem)


def _too_low(
    limit: int, flag: str, what: str, least: int, purpose: str = ""
) -> str | None:
    allowed, _ = resource.getrlimit(limit)
    if allowed == resource.RLIM_INFINITY or allowed >= least:
        return None
    has = f"{what} is limited to {round(allowed / 2**20, 1):g} MiB"
    problem = f"{has}, but at least {least / 2**20:g} MiB is required"
    return f"{problem}{purpose}; allow more (ulimit -{flag} unlimited)"
