"""Magnitudes of a site's inputs, channel by channel, and a sample of its input rows."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Magnitudes:
    """What transforms look at.

    Attributes:
        mean_abs, abs_max: [in], mean and largest magnitude of each input.
        rows: [n, in], a sample of the inputs; n is 0 when none was asked for.
        row_weights: [n], how much each of them counts; 1 where all count alike.
    """

    mean_abs: Tensor
    abs_max: Tensor
    rows: Tensor
    row_weights: Tensor

    def divided(self, scale: Tensor) -> "Magnitudes":
        """Those of the inputs divided by `scale` [in]."""
        return Magnitudes(self.mean_abs / scale, self.abs_max / scale, self.rows / scale, self.row_weights)


class MagnitudeAccumulator:
    """Gathers `Magnitudes` batch by batch, in float32 or the inputs' wider dtype.

    Attributes:
        rows_per_batch: rows kept of each batch, evenly spread over it, always the same ones.
    """

    def __init__(self, rows_per_batch: int) -> None:
        self.rows_per_batch = rows_per_batch
        self._total: Tensor | None = None
        self._largest: Tensor | None = None
        self._tokens = 0
        self._rows: list[Tensor] = []
        self._row_weights: list[Tensor] = []

    def add(self, x: Tensor, weights: Tensor | None = None) -> None:
        """Add inputs [..., in]; leading dimensions count as tokens.

        `weights` [tokens] say how much each of them counts; they go with the sampled rows and change no magnitude.
        """
        rows = x.detach().reshape(-1, x.shape[-1])  # [tokens, in]
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        if not len(rows):
            return
        magnitudes = rows.abs()
        total, largest = magnitudes.sum(dim=0), magnitudes.amax(dim=0)
        self._total = total if self._total is None else self._total + total
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        self._tokens += len(rows)
        kept = min(self.rows_per_batch, len(rows))
        if kept:
            sampled = torch.arange(kept, device=rows.device) * len(rows) // kept
            self._rows.append(rows[sampled])
            counts = rows.new_ones(len(rows)) if weights is None else weights.to(rows)
            self._row_weights.append(counts[sampled])

    def result(self) -> Magnitudes | None:
        """None when no input came."""
        if self._total is None or self._largest is None:
            return None
        rows = torch.cat(self._rows) if self._rows else self._total.new_empty(0, len(self._total))
        weights = torch.cat(self._row_weights) if self._rows else self._total.new_empty(0)
        return Magnitudes(self._total / self._tokens, self._largest, rows, weights)
