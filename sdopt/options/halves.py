"""The two halves of a denoiser's batch under guidance: each sample without, and then with the prompt."""

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from sdopt.pipelines.parts import is_called


def halves(arguments: Any, batch: int) -> list[Any]:
    """Returns the arguments of a denoiser for each half of its batch.

    Text states, further conditions, and what other networks (ControlNet) add have a row per sample too; the pictures of
    an IP-Adapter may have several.

    Args:
        arguments: tensors in tuples, lists and dictionaries; those with rows per sample are cut.
        batch: the number of samples.
    """

    def half(which: int) -> Any:
        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.chunk(2)[which] if tensor.ndim and len(tensor) % batch == 0 else tensor

        return tree_map_only(torch.Tensor, cut, arguments)

    return [half(0), half(1)]


class EachHalf:
    """Replaces a denoiser's forward for `memory=sequential_guidance`: runs one half of the batch after the other.

    Attributes:
        halved: the number of calls that were made as two.
    """

    def __init__(self, pipe: Any, forward: Any) -> None:
        self._pipe, self._forward = pipe, forward
        self.halved = 0

    # A compiler captures the denoiser itself, on half of the batch.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, sample: torch.Tensor, *args: Any, return_dict: bool = True, **others: Any) -> Any:
        """Replaces the denoiser's forward; another pipeline with this denoiser may have no two halves."""
        if not (is_called(self._pipe) and self._pipe.do_classifier_free_guidance) or len(sample) % 2:
            return self._forward(sample, *args, return_dict=return_dict, **others)
        found = []
        for first, given, more in halves((sample, args, others), len(sample)):
            output = self._forward(first, *given, return_dict=return_dict, **more)
            found.append(output if return_dict else output[0])
        self.halved += 1
        if not return_dict:
            return (torch.cat(found),)
        found[0].sample = torch.cat([output.sample for output in found])
        return found[0]
