"""Second moments of a site's inputs, summed batch by batch."""

from itertools import pairwise

import torch
from torch import Tensor

from quantforge.errors import CalibrationError, NumericsError
from quantforge.numerics.metrics import all_finite

MAX_BLOCKS = 4
MIN_BLOCK_COLUMNS = 128


def _block_bounds(in_features: int) -> list[tuple[int, int]]:
    """Up to MAX_BLOCKS nearly equal column ranges of at least MIN_BLOCK_COLUMNS, covering all features."""
    count = max(1, min(MAX_BLOCKS, in_features // MIN_BLOCK_COLUMNS))
    edges = [in_features * k // count for k in range(count + 1)]
    return list(pairwise(edges))


class GramAccumulator:
    """The sum of x x^T, weighted or not, over every input row of a site.

    Only the upper block-columns are computed, 10/16 of the work of ``x.T @ x`` with four blocks; `mean` mirrors them in
    place and hands the matrix over, so that there is never a second one. Sums are float32, or float64 when the first
    batch is float64, on the device of the first batch.

    Attributes:
        site: name used in messages.
        in_features: width of the inputs.
        tokens: rows seen so far.
    """

    def __init__(self, in_features: int, site: str) -> None:
        self.site = site
        self.in_features = in_features
        self.tokens = 0
        self._blocks = _block_bounds(in_features)
        self._total: Tensor | None = None  # [in, in], valid on and above the diagonal blocks
        self._taken = False

    def add(self, x: Tensor, weights: Tensor | None = None) -> None:
        """Add inputs ``[..., in]`` of any floating dtype; leading dimensions count as tokens.

        `weights` [tokens], not negative, say how much each of them counts; None is 1 for all.

        Values are not looked at here (that would cost a pass a batch): `mean` finds what is not finite.
        """
        if x.shape[-1] != self.in_features:
            raise ValueError(f"{self.site}: inputs {tuple(x.shape)} must end in {self.in_features} features")
        self._require_sums()
        rows = x.detach().reshape(-1, self.in_features)  # [tokens, in]
        if self._total is None:
            dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
            self._total = torch.zeros(self.in_features, self.in_features, dtype=dtype, device=x.device)
        rows = rows.to(self._total.dtype)
        if weights is not None:
            rows = rows * weights.to(rows).sqrt().unsqueeze(1)
        for start, stop in self._blocks:
            self._total[start:stop, start:].addmm_(rows[:, start:stop].t(), rows[:, start:])
        self.tokens += rows.shape[0]

    def mean(self) -> Tensor:
        """The mean outer product, exactly symmetric [in, in], in the dtype of the sums. Ends the summing.

        Raises:
            CalibrationError: no input reached the site.
            NumericsError: an input was not finite, or its square overflows.
            ValueError: it was taken before.
        """
        self._require_sums()
        if self._total is None or self.tokens == 0:
            raise CalibrationError(f"{self.site}: no calibration token reached it, so its inputs have no statistics")
        gram, self._total, self._taken = self._total.div_(self.tokens), None, True
        for start, stop in self._blocks:
            square = gram[start:stop, start:stop]
            square.copy_(square.triu() + square.triu(1).t())
            gram[stop:, start:stop] = gram[start:stop, stop:].t()
        if not all_finite(gram):
            bad = (~torch.isfinite(gram.diagonal())).nonzero().flatten().tolist()
            raise NumericsError(
                f"{self.site}: calibration inputs are not finite (or too large to square) in {len(bad)} of "
                f"{self.in_features} features, first {bad[:5]}, over {self.tokens} tokens"
            )
        return gram

    def _require_sums(self) -> None:
        if self._taken:
            raise ValueError(f"{self.site}: the mean was taken, and the sums with it")
