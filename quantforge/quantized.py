"""What a solver produces and a format consumes."""

from dataclasses import dataclass

import torch

from quantforge.spec import QuantSpec

SCALE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, eq=False)
class CacheScales:
    """Scales of what one attention module caches: floats, [1], or [key-value heads]; see `KvCacheSpec`."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight matrix as codes on a grid: ``w[o, i] = (codes[o, i] - zero[o, g]) * scale[o, g]``, g the group of i.

    Attributes:
        spec: the grid.
        codes: uint8 [out, in], one code per weight, 0 .. spec.code_max, unpacked.
        scale: [out, groups] in the stored dtype of `spec`, finite. It may be negative, which turns a grid round: a
            symmetric one then reaches one step further up than down (`numerics.grid.searched_grid`).
        zero: uint8 [out, groups], 0 .. spec.code_max; all equal to spec.symmetric_zero when symmetric.
        group_index: int64 [in], the group of each input, where that is not the whole of `group_size` inputs after
            another: in checkpoints of other tools, whose inputs may be in any order and whose last group may be short.
    """

    spec: QuantSpec
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    group_index: torch.Tensor | None = None

    def __post_init__(self) -> None:
        out_features, in_features = self.codes.shape
        if self.group_index is None:
            expected = (out_features, self.spec.groups(in_features))
        else:
            expected = (out_features, int(self.group_index.max()) + 1)
            if tuple(self.group_index.shape) != (in_features,) or int(self.group_index.min()) < 0:
                raise ValueError(f"group_index must give each of {in_features} inputs a group")
        if tuple(self.scale.shape) != expected or tuple(self.zero.shape) != expected:
            raise ValueError(
                f"scale {tuple(self.scale.shape)} and zero {tuple(self.zero.shape)} must both be {expected} for "
                f"codes {tuple(self.codes.shape)} with {self.spec.label()}"
            )
        dtypes = (self.codes.dtype, self.scale.dtype, self.zero.dtype)
        if dtypes != (torch.uint8, SCALE_DTYPES[self.spec.scale_dtype], torch.uint8):
            raise ValueError(f"codes, scale, zero have dtypes {dtypes}, expected uint8, {self.spec.scale_dtype}, uint8")
        if self.codes.numel() and int(self.codes.max()) > self.spec.code_max:
            raise ValueError(f"codes exceed {self.spec.code_max}")
        if not bool(torch.isfinite(self.scale).all()):
            raise ValueError("scales are not finite")
        if self.spec.symmetric and not bool((self.zero == self.spec.symmetric_zero).all()):
            raise ValueError(f"a symmetric grid has zero {self.spec.symmetric_zero} everywhere")

    @property
    def out_features(self) -> int:
        return int(self.codes.shape[0])

    @property
    def in_features(self) -> int:
        return int(self.codes.shape[1])

    def dequantize(self) -> torch.Tensor:
        """The weights this grid stands for, float32 [out, in]; exact, because code * scale fits a float32 mantissa."""
        if self.group_index is not None:
            offsets = self.codes.to(torch.float32) - self.zero.to(torch.float32)[:, self.group_index]
            return offsets * self.scale.to(torch.float32)[:, self.group_index]
        scale = self.scale.to(torch.float32).unsqueeze(-1)
        return (self.offsets(torch.float32) * scale).reshape(self.codes.shape)

    def offsets(self, dtype: torch.dtype) -> torch.Tensor:
        """``codes - zero``, by which scales are multiplied, [out, groups, group] in a signed `dtype`."""
        assert self.group_index is None, "groups of any order have no such shape"
        grouped = self.codes.to(dtype).reshape(*self.scale.shape, -1)
        return grouped - self.zero.to(dtype).unsqueeze(-1)

    def rows(self, start: int, stop: int) -> "QuantizedWeight":
        """The grid of output rows ``start:stop`` (rows are independent of each other)."""
        return QuantizedWeight(
            self.spec,
            self.codes[start:stop].contiguous(),
            self.scale[start:stop].contiguous(),
            self.zero[start:stop].contiguous(),
            self.group_index,
        )
