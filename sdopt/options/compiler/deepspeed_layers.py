"""DeepSpeed's attention as a module of diffusers. Imports PyTorch."""

from __future__ import annotations

from typing import Any

import torch


class Layer(torch.nn.Module):
    """DeepSpeed's attention with the arguments of a layer of diffusers, whose weights it has."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the output of the attention, of the shape of `hidden_states`. Raises ValueError for a mask."""
        if attention_mask is not None:
            raise ValueError("attention=deepspeed takes no mask")
        # The first layer of a model allocates the workspace, and has the most latents.
        config = self.attention.config
        config.max_out_tokens = config.min_out_tokens = hidden_states.shape[1]
        output: torch.Tensor = self.attention(
            hidden_states, context=encoder_hidden_states
        )
        return output


class ByHead(torch.nn.Module):
    """Splits queries, keys and values into heads, as a replacement for DeepSpeed's `pad_transform`.

    `pad_transform` copies `padded_seq_len / 2` pairs of tokens (`transform.cu`): of the 77 tokens of a prompt, the last
    would be stale data from the workspace.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        heads: int,
        _padded: bool,
    ) -> list[torch.Tensor]:
        """Returns query, key and value, each as (batch, heads, tokens, channels of a head)."""
        return [
            projected.unflatten(-1, (heads, -1)).transpose(1, 2)
            for projected in (query, key, value)
        ]
