"""Transforms on one loaded layer: find and prove pairs, search a scale for each, keep what helps the layer's output."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from quantforge.model.activations import quantized_inputs
from quantforge.model.folds import Fold, Pair, fold, prove, replaced
from quantforge.model.observe import InputGroup
from quantforge.model.pairs import find_pairs
from quantforge.model.shards import DTYPES
from quantforge.model.skeleton import is_conv1d
from quantforge.model.streamed import StreamedPass
from quantforge.numerics.metrics import require_finite
from quantforge.pipeline.plan import Plan
from quantforge.pipeline.solve import solve_sites, weight_of
from quantforge.report import TransformReport
from quantforge.spec import QuantSpec
from quantforge.transforms import Consumer, FoldProblem, Transform

PROBE_SEQUENCES = 2
PROBE_TOKENS = 32
"""Pairs are found and proven on this many of the calibration tokens."""

SAMPLED_ROWS = 2048


@dataclass(frozen=True, eq=False)
class Transformed:
    """What transforms did to one layer, whose parameters are changed already.

    Attributes:
        groups: the layer's input groups, their statistics those of the changed layer.
        floats: changed tensors that stay in floating point, by checkpoint key, in their stored dtype.
    """

    reports: tuple[TransformReport, ...]
    groups: list[InputGroup]
    floats: dict[str, Tensor]
    warnings: tuple[str, ...]


def rows_per_batch(plan: Plan, run: StreamedPass, index: int) -> int | None:
    """What `observe` is to be asked for at layer `index`: None without transforms, 0 when none of them needs rows."""
    if not plan.transforms:
        return None
    samples = any(transform.needs_rows for transform in plan.transforms)
    return math.ceil(SAMPLED_ROWS / len(run.calls[index])) if samples else 0


class LayerTransforms:
    """Applies a plan's transforms to one layer after another, and knows which pairs each kind of layer has."""

    def __init__(self, plan: Plan, run: StreamedPass) -> None:
        """Finds the pairs, on the first layer of each kind as it is in the checkpoint: so a run that is carried on
        finds the same ones. The outer weights must be loaded; layers are loaded and dropped here.

        Of `run`, only the first batch of each layer is used.
        """
        self.plan = plan
        self.run = run
        self._probe = plan.streamed.begin(run.tokens[:PROBE_SEQUENCES, :PROBE_TOKENS])
        self._known: dict[object, list[Pair]] = {}
        kinds = [_kind(layer) for layer in plan.streamed.layers]
        last = max(kinds.index(kind) for kind in kinds)
        for index in range(last + 1):
            layer = plan.streamed.load_layer(index)
            if kinds[index] not in self._known:
                call, hidden = next(self._probe.batches(index))
                self._known[kinds[index]] = find_pairs(layer, call, hidden)
            self._probe.advance(index)
            plan.streamed.drop_layer(index)

    @torch.no_grad()
    def apply(
        self,
        index: int,
        modules: Mapping[str, nn.Module],
        groups: list[InputGroup],
        weights: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Transformed:
        """Change the loaded layer `index`; `modules` are its sites by module path, `groups` were observed on it.

        A fold is kept when the output of the layer, all its sites quantized by the run's own solver, comes closer to
        what the layer gave before; measured on the first batch of calibration tokens, each counted by its `weights`
        (module path -> [samples * length]) if there are any.
        """
        layer = self.run.owner.layers[index]
        work = _Layer(self.plan, self.run, index, modules, groups, weights)
        pairs = self._pairs(index, layer)
        for transform in self.plan.transforms:
            for pair, broken in pairs:
                work.reports.append(work.decline(transform, pair, broken) if broken else work.attempt(transform, pair))
        warnings = [
            f"layer {index}: {pair.producer.module} cannot be folded here: {broken}" for pair, broken in pairs if broken
        ]
        if not pairs:
            warnings.append(f"layer {index}: nothing in it can be folded")
        return Transformed(tuple(work.reports), work.groups, work.floats(), tuple(warnings))

    def _pairs(self, index: int, layer: nn.Module) -> list[tuple[Pair, str | None]]:
        """The layer's pairs, each with what disproves it on this layer, if anything."""
        call = self._probe.calls[index][0]
        sequences, length = self._probe.tokens.shape
        hidden = self.run.hidden[:sequences, :length].clone().to(self.run.owner.device)
        return [(pair, prove(layer, call, hidden, pair)) for pair in self._known[_kind(layer)]]


def _kind(layer: nn.Module) -> object:
    """Equal for layers of the same modules and shapes; the weights need not be loaded."""
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    return modules, tuple((name, parameter.shape) for name, parameter in layer.named_parameters())


def token_counts(weights: Mapping[str, Tensor], groups: Sequence[InputGroup], hidden: Tensor) -> Tensor | None:
    """How much each token of `hidden` [batch, length, hidden], the first ones, counts in a layer's output.

    [batch, length]: the weights at the sites that are called last, whose outputs are added to the hidden states, so
    that gradients there are those of the layer's output. None when no site has weights that are not all zero.
    """
    batch, length, _ = hidden.shape
    for group in reversed(groups):
        own = weights.get(group.names[-1])
        if own is not None and float(own[: batch * length].sum()) > 0:
            return own[: batch * length].to(hidden.device, torch.float64).reshape(batch, length)
    return None


class _Layer:
    """One layer while it is transformed."""

    def __init__(
        self,
        plan: Plan,
        run: StreamedPass,
        index: int,
        modules: Mapping[str, nn.Module],
        groups: list[InputGroup],
        weights: Mapping[str, Tensor],
    ) -> None:
        self.plan = plan
        self.modules = modules
        self.groups = groups
        self.reports: list[TransformReport] = []
        self.index = index
        self.layer = run.owner.layers[index]
        self.prefix = f"{plan.streamed.layout.stack}.{index}."
        self.sites = plan.sites_of(index)
        self.searched = plan.options.get("grid") == "search"
        self.call, self.hidden = next(run.batches(index))
        self.reference = self._output()
        self.counts = token_counts(weights, groups, self.hidden)
        self.quantized: dict[str, Tensor] | None = None  # the sites' weights as the solver would leave them now
        self.error = 0.0  # of the layer's output with them
        self.stored: dict[str, torch.dtype] = {}  # of every parameter changed so far that stays in floating point

    def attempt(self, transform: Transform, pair: Pair) -> TransformReport:
        """Search a scale and fold it if that helps; the report says what came of it."""
        if (problem := self._problem(pair)) is None:
            return self.decline(transform, pair, "no site to be quantized reads it, or no token reaches them")
        stored, obstacle = self._stored(pair)
        if obstacle is not None:
            return self.decline(transform, pair, obstacle)
        exact_otherwise = pair.producer.name if self._is_vector(pair) else None
        coarse = any(dtype.itemsize < 4 for name, dtype in stored.items() if name != exact_otherwise)
        if coarse and not pair.exact_gain:
            return self.decline(transform, pair, "its gain is 1 + weight, and what it changes is stored in 16 bits")
        solution = transform.solve(replace(problem, powers_of_two=coarse))
        report = replace(
            self.decline(transform, pair, "no scale lowers the expected error"),
            alpha=solution.alpha,
            rule=solution.rule,
            error_before=solution.before,
            error_after=solution.after,
        )
        if solution.after >= solution.before:
            return report
        folded = fold(self.layer, pair, solution.scale, stored)
        if self.quantized is None:
            self.quantized = self._quantize(self.modules.keys(), self.groups)
            self.error = self._error(self.quantized)
        before, groups = self.error, self._divided(pair, folded)
        involved = {self.prefix + name for name in (pair.producer.module, *pair.consumers)}
        with replaced(self.layer, folded.tensors):
            quantized = self.quantized | self._quantize(involved, groups)
            after = self._error(quantized)
        report = replace(report, output_before=before, output_after=after)
        if not after < before:
            return replace(report, reason="the layer's output would not come closer")
        for name, tensor in folded.tensors.items():
            self.layer.get_parameter(name).data.copy_(tensor)
        self.groups, self.quantized, self.error = groups, quantized, after
        self.stored |= stored
        return replace(report, kept=True, reason=None)

    def decline(self, transform: Transform, pair: Pair, reason: str) -> TransformReport:
        return TransformReport(
            transform=transform.name,
            layer=self.index,
            producer=self.prefix + pair.producer.module,
            consumers=tuple(self.prefix + name for name in pair.consumers),
            reason=reason,
        )

    def floats(self) -> dict[str, Tensor]:
        """Changed tensors that stay in floating point, by checkpoint key."""
        keys = self.plan.streamed.keys.plain
        return {
            keys[self.prefix + name]: self.layer.get_parameter(name).data.to(dtype).cpu()
            for name, dtype in self.stored.items()
        }

    # -------------------------------------------------------------------------------------------- parts

    def _spec(self, module: str) -> QuantSpec:
        return self.plan.specs[self.sites[module].name]

    def _is_vector(self, pair: Pair) -> bool:
        return self.layer.get_parameter(pair.producer.name).ndim == 1

    def _is_site(self, name: str) -> bool:
        module, _, leaf = (self.prefix + name).rpartition(".")
        return leaf == "weight" and module in self.modules

    def _stored(self, pair: Pair) -> tuple[dict[str, torch.dtype], str | None]:
        """The stored dtype of what stays in floating point, and what forbids changing it, if anything."""
        keys = self.plan.streamed.keys.plain
        stored: dict[str, torch.dtype] = {}
        for name in pair.names:
            if self._is_site(name):
                continue
            key = keys.get(self.prefix + name)
            if key is None or key not in self.plan.checkpoint.tensors:
                return {}, f"{name} also reads it and is stored in another layout"
            if sum(other == key for other in keys.values()) > 1:
                return {}, f"{key} is shared with another part of the model"
            stored[name] = DTYPES[self.plan.checkpoint.tensors[key].dtype]
        return stored, None

    def _of(self, pair: Pair) -> list[int]:
        """Which input groups hold the pair's sites."""
        consumers = {self.prefix + name for name in pair.consumers}
        return [place for place, group in enumerate(self.groups) if consumers >= set(group.names)]

    def _divided(self, pair: Pair, folded: Fold) -> list[InputGroup]:
        places = self._of(pair)
        return [group.divided(folded.scale) if place in places else group for place, group in enumerate(self.groups)]

    def _problem(self, pair: Pair) -> FoldProblem | None:
        groups = [self.groups[place] for place in self._of(pair) if self.groups[place].tokens]
        if not groups:
            return None
        most = max(groups, key=lambda group: group.tokens).magnitudes
        assert most is not None
        alike = [
            (group, spec, [name for name in group.names if self._spec(name) == spec])
            for group in groups
            for spec in dict.fromkeys(self._spec(name) for name in group.names)
        ]
        consumers = tuple(
            Consumer(" + ".join(names), torch.cat([weight_of(self.modules[name]) for name in names]), spec, group.gram)
            for group, spec, names in alike
        )
        return FoldProblem(
            name=f"{self.prefix}{pair.producer.module} -> {', '.join(pair.consumers)}",
            consumers=consumers,
            channels=pair.channels.to(most.mean_abs.device),
            mean_abs=most.mean_abs,
            abs_max=most.abs_max,
            rows=most.rows if len(most.rows) else None,
            row_weights=most.row_weights,
            searched=self.searched,
            activations=self.plan.activations,
        )

    # -------------------------------------------------------------------------------------------- measuring

    def _output(self) -> Tensor:
        output = self.call.run(self.layer, self.hidden.clone())
        result: Tensor = output[0] if isinstance(output, tuple | list) else output
        require_finite(result, f"layer {self.index}: the output")
        return result

    def _error(self, quantized: Mapping[str, Tensor]) -> float:
        """How far the layer's output is off with other weights in its sites, squared, relative to its energy.

        Mean over tokens: of those weighed, energies and errors are summed first, each times its token's weight; else
        each token is relative to its own energy (what follows normalizes every token).
        """
        with replaced(self.layer, quantized), quantized_inputs(self.modules.values(), self.plan.activations):
            apart = (self._output() - self.reference).double().square().sum(dim=-1)
        energy = self.reference.double().square().sum(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        if self.counts is None:
            return float((apart / energy).mean())
        return float((self.counts * apart).sum() / (self.counts * energy).sum())

    def _quantize(self, wanted: Collection[str], groups: Sequence[InputGroup]) -> dict[str, Tensor]:
        """Weights of sites as the solver leaves them and their modules store them, by parameter."""
        quantized: dict[str, Tensor] = {}
        for group in groups:
            if sites := [self.sites[name] for name in group.names if name in wanted]:
                for site, solved, _ in solve_sites(self.plan, sites, self.modules, group):
                    weight = solved.dequantize()
                    stored_as = weight.t().contiguous() if is_conv1d(self.modules[site.module]) else weight
                    quantized[f"{site.module.removeprefix(self.prefix)}.weight"] = stored_as
        return quantized
