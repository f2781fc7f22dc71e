"""Describes one device, as a probe in another process found it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Device:
    """One device: `type` is `cpu` or `cuda`; memory in GiB, as free and total when it was probed."""

    type: str
    index: int = 0
    name: str = ""
    capability: tuple[int, int] | None = None
    memory_total_gib: float = 0.0
    memory_free_gib: float = 0.0
    driver: str | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    """The probe's findings; empty for a device that is planned from its data sheet."""
    warning: str = ""
    """Why `auto` chose the CPU on a machine that has a card."""

    @property
    def torch_name(self) -> str:
        """PyTorch's name of the device."""
        return f"cuda:{self.index}" if self.type == "cuda" else "cpu"

    @property
    def is_cuda(self) -> bool:
        """Whether it is a CUDA device."""
        return self.type == "cuda"

    @property
    def is_here(self) -> bool:
        """Whether it was probed on this machine; for a planned device, the packages installed here do not count."""
        return bool(self.attributes)

    def needs_cuda(self, what: str, capability: tuple[int, int] = (0, 0)) -> list[str]:
        """Returns the conflict with something that needs CUDA and a least compute capability, if any."""
        if not self.is_cuda:
            return [
                f"{what} needs a CUDA device; this runs on {self.name or self.type}"
            ]
        if self.capability is not None and self.capability < capability:
            have = ".".join(map(str, self.capability))
            return [
                f"{what} needs compute capability {'.'.join(map(str, capability))}; {self.name} has {have}"
            ]
        return []
