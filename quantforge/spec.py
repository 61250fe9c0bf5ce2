"""The grid a weight matrix is rounded to."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from quantforge.errors import UsageError

Bits = Literal[2, 3, 4, 8]
ScaleDtype = Literal["float16", "bfloat16", "float32"]


@dataclass(frozen=True)
class QuantSpec:
    """Bits, group and symmetry of one quantized matrix.

    Attributes:
        bits: width of a code, one of 2, 3, 4, 8.
        group_size: consecutive input columns that share a scale; None means the whole row (per channel).
        symmetric: the zero is fixed at 2^(bits-1); otherwise each group has its own zero.
        scale_dtype: dtype the scale is stored in. ``bfloat16`` scales are kept exactly representable in
            float16 as well, so one grid can be exported to formats of either dtype. ``float32`` is never chosen here;
            other tools write it.
        exact_minima: scales have `scale_digits` significant bits, so that ``-zero * scale`` is a float16 number too, as
            formats need that store it in place of zeros. Means nothing for a symmetric grid.
    """

    bits: int
    group_size: int | None = 128
    symmetric: bool = True
    scale_dtype: ScaleDtype = "bfloat16"
    exact_minima: bool = False

    def __post_init__(self) -> None:
        if self.bits not in get_args(Bits):
            raise UsageError(f"bits must be one of {', '.join(map(str, get_args(Bits)))}; got {self.bits}")
        if self.group_size is not None and self.group_size < 1:
            raise UsageError(f"group_size must be positive, or None for one scale per row; got {self.group_size}")
        if self.scale_dtype not in get_args(ScaleDtype):
            raise UsageError(f"scale_dtype must be one of {', '.join(get_args(ScaleDtype))}; got {self.scale_dtype}")

    @property
    def code_max(self) -> int:
        """Largest code, 2^bits - 1."""
        return (1 << self.bits) - 1

    @property
    def symmetric_zero(self) -> int:
        """The code that stands for 0.0 in a symmetric grid, 2^(bits-1)."""
        return 1 << (self.bits - 1)

    @property
    def scale_digits(self) -> int:
        """Significant bits of a scale. A zero adds at most `bits` to them in ``-zero * scale``, and float16 has 11."""
        stored = {"float16": 11, "bfloat16": 8, "float32": 24}[self.scale_dtype]
        return min(stored, 11 - self.bits) if self.exact_minima and not self.symmetric else stored

    def fits(self, in_features: int) -> bool:
        """True when groups tile a row of `in_features` exactly."""
        return self.group_size is None or in_features % self.group_size == 0

    def groups(self, in_features: int) -> int:
        """Groups in a row; `in_features` must be a multiple of `group_size`."""
        if not self.fits(in_features):
            raise UsageError(f"group size {self.group_size} does not divide {in_features} input features")
        return 1 if self.group_size is None else in_features // self.group_size

    def bits_per_weight(self, in_features: int) -> float:
        """The grid's own bits per weight: codes, scales and, when asymmetric, zeros (`bits` bits).

        A format may store a little more (gptq: zeros of symmetric grids too, and the group of each input;
        compressed-tensors: the shape). `describe_checkpoint` counts what a checkpoint really holds.
        """
        per_group = (32 if self.scale_dtype == "float32" else 16) + (0 if self.symmetric else self.bits)
        return self.bits + per_group * self.groups(in_features) / in_features

    def label(self) -> str:
        """Short human name, for example ``4 bits, group 64, symmetric``."""
        group = "per channel" if self.group_size is None else f"group {self.group_size}"
        return f"{self.bits} bits, {group}, {'symmetric' if self.symmetric else 'asymmetric'}"


@dataclass(frozen=True)
class ActivationSpec:
    """The grid the inputs of a quantized site are rounded to when the model runs: per token, dynamic, symmetric.

    Each token's scale is ``max |x| / 127.5``, half the 255 steps of the range -128 .. 127, as compressed-tensors
    computes it for strategy ``token``, ``dynamic`` (version 0.20.1, quantization/utils/helpers.py: `calculate_qparams`
    and `compute_dynamic_scales_and_zp`). Nothing of it is stored but the fact.
    """

    bits: int = 8

    def __post_init__(self) -> None:
        if self.bits != 8:
            raise UsageError(f"activations can be quantized to 8 bits only; got {self.bits}")

    def label(self) -> str:
        """``8-bit activations per token``."""
        return f"{self.bits}-bit activations per token"


KvCacheName = Literal["none", "fp8", "int8", "fp8_per_head", "int8_per_head"]


@dataclass(frozen=True)
class KvCacheSpec:
    """The grid keys and values are rounded to when they enter a server's cache: 8 bits, static scales, symmetric.

    ``x ~ q * scale``. FP8 is E4M3, whose largest number is 448; INT8 reaches from -128 to 127, and its scale is, as
    compressed-tensors has it, half of the 255 steps. (compressed-tensors 0.20.1, quantization/utils/helpers.py,
    `calculate_qparams`: the largest magnitude over half the range.)

    Attributes:
        per_head: keys and values of each head have scales of their own (strategy ``attn_head``), instead of one scale
            for all keys of a layer and one for all its values (strategy ``tensor``).
    """

    kind: Literal["fp8", "int8"]
    per_head: bool = False
    bits: int = 8

    @staticmethod
    def named(name: str) -> "KvCacheSpec | None":
        """The spec of a name in a recipe; None for ``none``."""
        if name == "none":
            return None
        return KvCacheSpec("fp8" if name.startswith("fp8") else "int8", name.endswith("_per_head"))

    @property
    def top(self) -> float:
        """What the largest magnitude is scaled to."""
        return 448.0 if self.kind == "fp8" else 127.5

    def label(self) -> str:
        """``FP8 (E4M3) keys and values, scales per layer``."""
        numbers = "FP8 (E4M3)" if self.kind == "fp8" else "INT8"
        return f"{numbers} keys and values, scales per {'head' if self.per_head else 'layer'}"


_CACHE_NAMES = {"fp8_e4m3": "fp8", "fp8_e4m3fn": "fp8", **dict.fromkeys(("auto", "float16", "bfloat16"), "none")}
_CACHE_SCHEME = {"num_bits": 8, "dynamic": False, "symmetric": True}


def kv_cache_name(value: Any) -> Any:
    """What servers and other tools call a cache, as a recipe names it; anything that is not known comes back as it is.

    A ``kv_cache_scheme`` (8 bits, static, symmetric) is one of those names too.
    """
    if isinstance(value, Mapping):
        kind = {"float": "fp8", "int": "int8"}.get(str(value.get("type", "int")))
        ending = {"tensor": "", "attn_head": "_per_head"}.get(str(value.get("strategy") or "tensor"))
        known = all(value.get(key, meant) == meant for key, meant in _CACHE_SCHEME.items())
        return f"{kind}{ending}" if known and kind is not None and ending is not None else value
    name = value.lower().replace("-", "_") if isinstance(value, str) else "none" if value is None else value
    return _CACHE_NAMES.get(name, name) if isinstance(name, str) else name


def label_of(specs: Iterable[QuantSpec], activations: ActivationSpec | None = None) -> str:
    """The grids of several sites in words, each with the number of its sites when they differ; the commonest first."""
    counted = Counter(specs).most_common()
    alone = len(counted) == 1
    labels = [spec.label() if alone else f"{spec.label()}: {count} sites" for spec, count in counted]
    return "; ".join(labels) + ("" if activations is None else f", {activations.label()}")
