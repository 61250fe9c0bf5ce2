"""How much each calibration token matters at each site: weights for the grams.

A gram that counts all tokens alike makes a solver keep the outputs of a site close on the tokens with large inputs,
whatever becomes of them. To second order, what an error e_t of a site's output does to the model's prediction is
``1/2 mean_t (g_t . e_t)^2``, with g_t the gradient of the output for labels drawn from the model (`model.backward`).
With ``g_t g_t^T`` replaced by its mean over output features, a number for each token, that is the error under the gram
``sum_t |g_t|^2 x_t x_t^T``: the solver's problem stays what it was, only its gram is another. Weighting the layer-wise
problem by the gradient of the model's loss is the idea of SqueezeLLM (arXiv 2306.07629), for whole output vectors that
of GuidedQuant (arXiv 2505.07004).
"""

from collections.abc import Collection, Generator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from quantforge.model.backward import SiteGradient, backward
from quantforge.model.observe import input_groups
from quantforge.model.sites import LinearSite
from quantforge.model.streamed import StreamedModel, StreamedPass
from quantforge.pipeline.job import Job
from quantforge.report import Event, Weighing

SEED = 0

TokenWeights = dict[str, torch.Tensor]
"""By module path, float32 [samples * length]: the mean square of each token's gradient, over output features."""


def gather_weights(jobs: Sequence[Job]) -> Generator[Event, None, TokenWeights]:
    """The weights that the unsolved layers of all jobs (of one model and the same tokens) need.

    What no work directory holds yet comes from one new pass. Each job's own are kept in its work directory, so that it
    can be carried on without the others.
    """
    weighed = (job for job in jobs if job.observed and job.plan.needs_gram)
    asking = [job for job in weighed if job.recipe.token_weights == "gradient" and job.unsolved]
    modules = {job: {site.module for site in job.plan.sites} for job in asking}
    weights: TokenWeights = {}
    lacking: list[Job] = []
    missing: set[str] = set().union(*modules.values())
    for job in asking:
        kept = job.workspace.token_weights()
        if kept is None:
            lacking.append(job)
        else:
            weights |= kept
            missing -= modules[job]  # of these, those without weights are known to have none
    if missing:
        calibration, streamed = lacking[0].calibration, lacking[0].plan.streamed
        assert calibration is not None
        with lacking[0].workspace.scratch() as directory:
            weights |= yield from token_weights(streamed, missing, calibration.tokens, directory)
    for job in lacking:
        job.workspace.keep_token_weights({name: own for name, own in weights.items() if name in modules[job]})
    return weights


def token_weights(
    model: StreamedModel, modules: Collection[str], tokens: torch.Tensor, directory: Path | None
) -> Generator[Event, None, TokenWeights]:
    """One pass forward and one backward over int64 tokens [samples, length], for the sites at these module paths.

    A site that not every token reaches (of a routed expert) has no weights: its tokens count alike.

    Args:
        directory: for the inputs of all layers, samples * length * hidden * 4 bytes each; None keeps them in memory.
    """
    length = tokens.shape[1]
    weights: TokenWeights = {}
    partial: set[str] = set()

    def on_site(seen: SiteGradient) -> None:
        rows, start = len(seen.gradient), seen.first_sample * length
        if rows != seen.samples * length:
            partial.add(seen.module)
            return
        own = weights.setdefault(seen.module, torch.zeros(tokens.numel()))
        own[start : start + rows] += seen.gradient.float().square().mean(dim=1).cpu()

    generator = torch.Generator().manual_seed(SEED)
    for done, steps in backward(model, tokens, on_site, generator=generator, modules=modules, directory=directory):
        yield Weighing(done, steps)
    return {name: own for name, own in weights.items() if name not in partial}


def shared_weights(
    weights: TokenWeights,
    run: StreamedPass,
    index: int,
    sites: Mapping[str, LinearSite],
    modules: Mapping[str, nn.Module],
) -> TokenWeights:
    """The weights at layer `index`, made the same for sites that share an input, so that these can share a gram.

    Weights are means over output features, so those of several sites are averaged in proportion to their outputs: what
    the sites stacked into one would have. Sites of a set in which one has no weights get none.

    Args:
        sites, modules: those of the layer, by module path; the layer must be loaded.
    """
    shared: TokenWeights = {}
    for names in input_groups(run, index, modules):
        if all(name in weights for name in names):
            outputs = torch.tensor([sites[name].out_features for name in names], dtype=torch.float32)
            stacked = torch.stack([weights[name] for name in names])  # [sites, tokens]
            shared |= dict.fromkeys(names, outputs @ stacked / outputs.sum())
    return shared
