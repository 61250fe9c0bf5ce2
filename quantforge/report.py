"""What happened, as data. Events are yielded while a run goes on; reports are kept beside the weights.

Nothing here holds a wall-clock time that would end up in an output directory: two runs of one job are byte-identical.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class SiteReport:
    """One quantized matrix.

    Attributes:
        loss: proxy loss tr((W-Q) H (W-Q)^T) / tr(W H W^T), H the gram; None without statistics.
        rtn_loss: the same for round-to-nearest on the same grid rule.
        damping: relative damping finally used by a solver that inverts H; None when it does not.
        damping_steps: times the damping had to be raised before the factorization succeeded.
        dead_inputs: input features never active during calibration; their weights are rounded to nearest.
        tokens: calibration tokens this site saw.
        has_zero_zero: some group has a zero of 0 (ambiguous in the first gptq checkpoint format).
        fallback: why the requested method was not used, or None.
    """

    name: str
    layer: int
    out_features: int
    in_features: int
    bits: int
    bits_per_weight: float
    loss: float | None = None
    rtn_loss: float | None = None
    damping: float | None = None
    damping_steps: int = 0
    dead_inputs: int = 0
    tokens: int = 0
    has_zero_zero: bool = False
    fallback: str | None = None


@dataclass(frozen=True)
class TransformReport:
    """One pair of one layer, and what a transform made of it.

    Attributes:
        producer, consumers: module paths; the producer was divided, and everything that reads it multiplied.
        alpha, rule: what the scale was made with; 0 for no scale.
        error_before, error_after: expected output error of the consumers rounded to nearest, relative to their
            outputs' energy, over all calibration tokens; None when no scale was searched.
        output_before, output_after: measured squared error of the layer's output, relative to each token's energy, mean
            over tokens, with all its sites quantized by the run's solver; None when it did not come to that.
        kept: whether the layer was changed. `reason` says why not.
    """

    transform: str
    layer: int
    producer: str
    consumers: tuple[str, ...]
    alpha: float = 0.0
    rule: str = "none"
    error_before: float | None = None
    error_after: float | None = None
    output_before: float | None = None
    output_after: float | None = None
    kept: bool = False
    reason: str | None = None


@dataclass(frozen=True)
class CacheReport:
    """Keys and values that one attention module caches.

    Attributes:
        name: of the module, in the checkpoint.
        tokens: calibration tokens that were seen.
        k_max, v_max: largest magnitudes, one a head.
        k_scale, v_scale: as stored; one, or one a head.
    """

    name: str
    tokens: int
    k_max: tuple[float, ...]
    v_max: tuple[float, ...]
    k_scale: tuple[float, ...]
    v_scale: tuple[float, ...]

    @staticmethod
    def from_json(data: dict[str, Any]) -> "CacheReport":
        numbers = (tuple(data[key]) for key in ("k_max", "v_max", "k_scale", "v_scale"))
        return CacheReport(data["name"], data["tokens"], *numbers)


@dataclass(frozen=True)
class LayerReport:
    """One decoder layer: its sites, what transforms did, what it caches, and notes worth a user's eye."""

    layer: int
    sites: tuple[SiteReport, ...]
    warnings: tuple[str, ...] = ()
    transforms: tuple[TransformReport, ...] = ()
    cache: tuple[CacheReport, ...] = ()

    @property
    def bits_per_weight(self) -> float:
        weights = sum(s.out_features * s.in_features for s in self.sites)
        return sum(s.bits_per_weight * s.out_features * s.in_features for s in self.sites) / weights if weights else 0.0

    @property
    def loss_ratio(self) -> float | None:
        """Mean over sites of loss / rtn_loss; None when nothing was measured."""
        ratios = [s.loss / s.rtn_loss for s in self.sites if s.loss is not None and s.rtn_loss]
        return sum(ratios) / len(ratios) if ratios else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> "LayerReport":
        return LayerReport(
            layer=data["layer"],
            sites=tuple(SiteReport(**site) for site in data["sites"]),
            warnings=tuple(data["warnings"]),
            transforms=tuple(
                TransformReport(**report | {"consumers": tuple(report["consumers"])}) for report in data["transforms"]
            ),
            cache=tuple(CacheReport.from_json(report) for report in data["cache"]),
        )


@dataclass(frozen=True)
class OutputReport:
    """One published directory: its format and path, the bytes of all its files and of its tensors, their number."""

    format: str
    path: str
    total_bytes: int
    tensor_bytes: int
    tensors: int


@dataclass(frozen=True)
class UnitBits:
    """Sites that share one choice of bits.

    Attributes:
        weights: how many weights they hold.
        predicted_kl: nats a token, by candidate bits (as text, the way JSON has it).
    """

    unit: str
    sites: tuple[str, ...]
    weights: int
    bits: int
    predicted_kl: dict[str, float]


@dataclass(frozen=True)
class Allocation:
    """Bits chosen for a budget.

    Attributes:
        budget: as given, ``avg_bits 3.5``.
        mean_bits: mean width of a code over all quantized weights, those with bits from a rule included.
        estimated_bytes: tensor bytes of one export; of the largest when there are several formats.
        predicted_kl: sum over the units, nats a token: a prediction, not a measurement.
        tokens: calibration tokens it was computed on.
        warnings: units about which nothing could be predicted.
    """

    budget: str
    mean_bits: float
    estimated_bytes: int
    predicted_kl: float
    tokens: int
    units: tuple[UnitBits, ...]
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Allocation":
        units = tuple(UnitBits(**unit | {"sites": tuple(unit["sites"])}) for unit in data["units"])
        return Allocation(**data | {"units": units, "warnings": tuple(data["warnings"])})


@dataclass(frozen=True)
class TuneReport:
    """What came of tuning scales and gains.

    Attributes:
        epochs, steps: how long.
        held_out: calibration sequences that were not tuned on.
        kl_before, kl_after: KL from the original on those, nats a token.
        kept: whether what was tuned is in the output.
    """

    epochs: int
    steps: int
    held_out: int
    kl_before: float
    kl_after: float
    kept: bool


@dataclass(frozen=True)
class RunReport:
    """The whole run: every layer, every output, everything a user should know.

    `kept` maps each parameter of two or more dims that was not quantized to the reason; `allocation` says how bits were
    chosen, and `tuning` what tuning brought, when they were.
    """

    method: str
    spec_label: str
    layers: tuple[LayerReport, ...]
    outputs: tuple[OutputReport, ...]
    kept: dict[str, str]
    warnings: tuple[str, ...]
    source_bytes: int
    calibration: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    allocation: Allocation | None = None
    tuning: TuneReport | None = None

    @property
    def fallbacks(self) -> list[SiteReport]:
        return [s for layer in self.layers for s in layer.sites if s.fallback is not None]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# ------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True)
class Sampling:
    """Calibration sequences are about to be sampled from the model itself, which takes a while.

    What is put into `watchers` is called meanwhile, with the steps that are done and all of them.
    """

    sequences: int
    tokens: int
    watchers: list[Callable[[int, int], None]] = field(default_factory=list, compare=False, repr=False)

    def progress(self, done: int, steps: int) -> None:
        for watcher in self.watchers:
            watcher(done, steps)


@dataclass(frozen=True)
class Weighing:
    """The model is being passed forward and backward to see how much each calibration token matters."""

    done: int
    steps: int


@dataclass(frozen=True)
class Tuning:
    """A step of tuning is done; `kl` is from the original on the sequences of this step, nats a token."""

    step: int
    steps: int
    kl: float


@dataclass(frozen=True)
class Allocating:
    """The model is being passed forward and backward to see what each site's bits are worth."""

    done: int
    steps: int


@dataclass(frozen=True)
class Allocated:
    """Bits have been chosen, now or by an earlier run with the same fingerprint."""

    allocation: Allocation


@dataclass(frozen=True)
class RunStarted:
    """Sent once. `done` layers were already committed by an earlier run with the same fingerprint."""

    layers: int
    done: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class LayerStarted:
    layer: int


@dataclass(frozen=True)
class LayerTransformed:
    """Transforms are done with a layer; its sites are solved next."""

    layer: int
    reports: tuple[TransformReport, ...]


@dataclass(frozen=True)
class SiteDone:
    report: SiteReport


@dataclass(frozen=True)
class LayerDone:
    report: LayerReport
    seconds: float


@dataclass(frozen=True)
class Assembling:
    """The output of `format` is being written under a temporary name."""

    format: str


@dataclass(frozen=True)
class Verifying:
    """The written files are being re-read and compared with what the solver produced."""

    format: str


@dataclass(frozen=True)
class RunFinished:
    report: RunReport


@dataclass(frozen=True)
class VariantsStarted:
    """Sent once by a run of several variants, which tells what it shares among them. `variants` are their names."""

    variants: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class VariantEvent:
    """What happened to one of several variants; events that come without this concern all of them."""

    variant: str
    event: "Event"


Event = (
    Sampling
    | Weighing
    | Tuning
    | Allocating
    | Allocated
    | RunStarted
    | LayerStarted
    | LayerTransformed
    | SiteDone
    | LayerDone
    | Assembling
    | Verifying
    | RunFinished
    | VariantsStarted
    | VariantEvent
)
