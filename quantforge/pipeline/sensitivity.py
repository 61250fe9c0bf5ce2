"""What quantizing each site would cost the model, predicted before anything is decided.

To second order, with g_t the gradient of a site's output at token t for labels drawn from the model (`model.backward`)
and E the error of its weight, quantizing the site changes what the model predicts by

    KL(model || quantized) per token = 1/2 mean_t (g_t . E x_t)^2

because the Fisher information is the curvature of KL. The errors are those that the run's own method makes, corrected
for having been fitted to the few tokens that they are judged by: with n tokens and a gram of p inputs, a fit looks
better than it is by about 1 - p / n, as the residuals of a regression do.

What the errors of several sites do to each other, and those of one site at several tokens of a sequence, is left out,
so that predictions can be added up (docs/allocation.md compares them with measurements).
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from quantforge.methods import Method, WeightProblem, load_method
from quantforge.model.backward import SiteGradient, backward
from quantforge.model.observe import InputGroup, observe
from quantforge.model.sites import LinearSite
from quantforge.model.streamed import StreamedPass
from quantforge.pipeline.plan import Plan
from quantforge.pipeline.solve import STACK_LIMIT_ELEMENTS, weight_of
from quantforge.quantized import QuantizedWeight
from quantforge.spec import QuantSpec

SEED = 0
LARGEST_FIT = 0.75
"""p / n is not corrected for beyond this: the correction diverges at 1."""

ROUNDED_FROM_BITS = 8
"""From here on rounding to nearest stands in for the method: what either loses is next to nothing."""

Candidates = Mapping[str, Mapping[int, QuantSpec]]
"""The grids to try for each site, by its name and by bits."""

Predictions = dict[str, dict[int, float]]
"""Predicted KL, nats a token, by site and bits."""


def predict_kl(
    plan: Plan, tokens: torch.Tensor, candidates: Candidates, directory: Path | None
) -> Generator[tuple[int, int], None, Predictions]:
    """Predict what each candidate grid of each site would cost.

    Args:
        tokens: int64 [samples, length].
        directory: for the files of `backward`.

    Yields (steps done, steps in all). A site that no token reaches costs 0 on every grid. In memory at a time, beside
    one layer and one gram of it, are the codes of all candidates of that layer, a byte each.
    """
    sites = [site for site in plan.sites if site.name in candidates]
    predicted: Predictions = {site.name: dict.fromkeys(candidates[site.name], 0.0) for site in sites}
    names = {site.module: site.name for site in sites}
    solved: dict[str, tuple[nn.Module, dict[int, QuantizedWeight]]] = {}  # by module, of one layer
    seen_share: dict[str, float] = {}  # by module, what is left of the error of a method that fits its gram

    def before_layer(run: StreamedPass, index: int) -> None:
        solved.clear()
        own = {site.module: site for site in sites if site.layer == index}
        modules = {name: plan.streamed.model.get_submodule(name) for name in own}
        for group in observe(run, index, modules) if own else []:
            if group.tokens:
                members = [own[name] for name in group.names]
                for site, weights in _solve(plan, members, modules, group, candidates):
                    solved[site.module] = (modules[site.module], weights)
                    seen_share[site.module] = 1 - min(LARGEST_FIT, site.in_features / group.tokens)

    def on_site(seen: SiteGradient) -> None:
        module, weights = solved[seen.module]
        weight = weight_of(module)
        for bits, quantized in weights.items():
            error = weight - quantized.dequantize().to(weight.dtype)
            changes = ((seen.inputs @ error.t()) * seen.gradient).sum(1)  # [rows], of the loss
            fitted = plan.solver.needs_gram and bits < ROUNDED_FROM_BITS
            share = seen_share[seen.module] if fitted else 1.0
            predicted[names[seen.module]][bits] += float(changes.square().sum()) / (2 * tokens.numel() * share)

    yield from backward(
        plan.streamed,
        tokens,
        on_site,
        generator=torch.Generator().manual_seed(SEED),
        modules=list(names),
        before_layer=before_layer,
        directory=directory,
    )
    return predicted


def _solve(
    plan: Plan,
    sites: Sequence[LinearSite],
    modules: Mapping[str, nn.Module],
    group: InputGroup,
    candidates: Candidates,
) -> Iterator[tuple[LinearSite, dict[int, QuantizedWeight]]]:
    """Each site on each of its candidate grids; sites of one input group with the same candidates are solved as one."""
    weights = [weight_of(modules[site.module]) for site in sites]
    small = sum(weight.numel() for weight in weights) <= STACK_LIMIT_ELEMENTS
    if len(sites) > 1 and not (small and all(candidates[site.name] == candidates[sites[0].name] for site in sites)):
        for site in sites:
            yield from _solve(plan, [site], modules, group, candidates)
        return
    stacked = torch.cat(weights)
    name = " + ".join(site.name for site in sites)
    whole: dict[int, QuantizedWeight] = {}
    for bits, spec in candidates[sites[0].name].items():
        solver: Method = load_method("rtn") if bits >= ROUNDED_FROM_BITS else plan.solver
        options = plan.options if solver is plan.solver else solver.resolve({})
        whole[bits] = solver.solve(WeightProblem(name, stacked, spec, group.gram, group.tokens, options)).quantized
    start = 0
    for site in sites:
        stop = start + site.out_features
        yield site, {bits: quantized.rows(start, stop) for bits, quantized in whole.items()}
        start = stop
