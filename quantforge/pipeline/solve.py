"""From observed input groups to quantized sites and their reports."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from quantforge.methods import Solution, WeightProblem, load_method
from quantforge.model.observe import InputGroup
from quantforge.model.sites import LinearSite
from quantforge.model.skeleton import is_conv1d
from quantforge.numerics.metrics import relative_proxy_loss
from quantforge.pipeline.plan import Plan
from quantforge.quantized import QuantizedWeight
from quantforge.report import LayerReport, SiteReport, TransformReport

STACK_LIMIT_ELEMENTS = 64 << 20
"""Sites of one input group are solved as one stacked matrix up to this size: rows are independent, it saves time."""


def solve_sites(
    plan: Plan, sites: Sequence[LinearSite], modules: Mapping[str, nn.Module], group: InputGroup
) -> list[tuple[LinearSite, QuantizedWeight, SiteReport]]:
    """Solve the sites of one input group; the modules are not changed."""
    specs = dict.fromkeys(plan.specs[site.name] for site in sites)
    if len(specs) > 1:
        apart = [[site for site in sites if plan.specs[site.name] == spec] for spec in specs]
        return [result for own in apart for result in solve_sites(plan, own, modules, group)]
    (spec,) = specs
    weights = [weight_of(modules[site.module]) for site in sites]
    if len(sites) > 1 and sum(weight.numel() for weight in weights) > STACK_LIMIT_ELEMENTS:
        return [result for site in sites for result in solve_sites(plan, [site], modules, group)]
    stacked = torch.cat(weights) if len(weights) > 1 else weights[0]
    gram = group.gram if group.tokens else None
    name = " + ".join(site.name for site in sites)
    rtn, nearest = load_method("rtn"), WeightProblem(name, stacked, spec, None, 0, {"grid": "minmax"})
    if gram is None and plan.solver.wants_gram(plan.options):
        reason = f"{plan.method}: no calibration token reached it; rounded to nearest"
        solution = replace(rtn.solve(nearest), fallback=reason)
    else:
        solution = plan.solver.solve(WeightProblem(name, stacked, spec, gram, group.tokens, plan.options))
    rounded = rtn.solve(nearest).quantized if gram is not None and not _is_nearest(plan) else None
    results = []
    start = 0
    for site, weight in zip(sites, weights, strict=True):
        stop = start + weight.shape[0]
        own = solution.quantized.rows(start, stop)
        reference = rounded.rows(start, stop) if rounded is not None else None
        results.append((site, own, _site_report(site, weight, own, reference, group, solution)))
        start = stop
    return results


def _is_nearest(plan: Plan) -> bool:
    """True when what is solved is round to nearest on min-max grids, with which others are compared."""
    return plan.solver.name == "rtn" and plan.options["grid"] == "minmax"


def put_back(module: nn.Module, weight: QuantizedWeight) -> None:
    """Give a module the weights its codes stand for, so that what follows is calibrated on what will be served."""
    dequantized = weight.dequantize()
    module.weight.data.copy_(dequantized.t() if is_conv1d(module) else dequantized)  # type: ignore[operator]


def weight_of(module: nn.Module) -> torch.Tensor:
    """The module's weight as [out, in]."""
    weight: torch.Tensor = module.weight.detach()  # type: ignore[operator]
    return weight.t().contiguous() if is_conv1d(module) else weight


def _site_report(
    site: LinearSite,
    weight: torch.Tensor,
    solved: QuantizedWeight,
    rounded: QuantizedWeight | None,
    group: InputGroup,
    solution: Solution,
) -> SiteReport:
    gram, spec = group.gram if group.tokens else None, solved.spec
    return SiteReport(
        name=site.name,
        layer=site.layer,
        out_features=site.out_features,
        in_features=site.in_features,
        bits=spec.bits,
        bits_per_weight=spec.bits_per_weight(site.in_features),
        loss=None if gram is None else relative_proxy_loss(weight, solved.dequantize(), gram),
        rtn_loss=None if gram is None or rounded is None else relative_proxy_loss(weight, rounded.dequantize(), gram),
        damping=solution.damping,
        damping_steps=solution.damping_steps,
        dead_inputs=solution.dead_inputs,
        tokens=group.tokens,
        has_zero_zero=not spec.symmetric and bool((solved.zero == 0).any()),
        fallback=solution.fallback,
    )


def layer_report(
    layer: int, reports: Sequence[SiteReport], folds: Sequence[TransformReport], remarks: Sequence[str]
) -> LayerReport:
    """The report of a solved layer; `remarks` are warnings beside those that the sites' reports call for."""
    return LayerReport(layer, tuple(reports), (*remarks, *_warnings(reports)), tuple(folds))


def _warnings(reports: Sequence[SiteReport]) -> Iterator[str]:
    for report in reports:
        if report.fallback is not None:
            yield f"{report.name}: {report.fallback}"
        elif report.damping_steps:
            yield f"{report.name}: damping raised {report.damping_steps} times, to {report.damping}"
        if 0 < report.tokens < report.in_features:
            yield (
                f"{report.name}: {report.tokens} calibration tokens for {report.in_features} inputs; raise --nsamples"
            )
        if report.dead_inputs:
            yield f"{report.name}: {report.dead_inputs} of {report.in_features} inputs were never active"
