"""Gradients of every site's output, with one decoder layer in memory at a time.

The loss is the model's own: labels are drawn from what the model predicts, and the summed negative log likelihood of
those labels is differentiated. The mean outer product of such gradients is the true Fisher information (arXiv
1905.12558), that is the curvature of KL(model || changed model), and not the empirical one that the text's labels give.

Forward, the input of each layer is kept (in memory, or in mapped files); backward, each layer is loaded again, its
forward is repeated on the kept input with the layer's own recorded arguments, and the gradient of its output is pulled
through. Weights get no gradients. Of the activations, those of one batch in one layer are alive at a time.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from quantforge.model.streamed import StreamedModel, StreamedPass
from quantforge.numerics.metrics import require_finite


@dataclass(frozen=True, eq=False)
class SiteGradient:
    """What one call of a site saw, forward and backward; rows are tokens, sequence after sequence.

    A sum over rows is a sum over calibration tokens. For a site that reads every token (all but routed experts) the
    rows are those of `samples` sequences from `first_sample` on, each as long as the calibration sequences.

    Attributes:
        module: the site's module path.
        layer: its decoder layer.
        first_sample: the first sequence of the batch.
        samples: how many sequences the batch has.
        inputs: float32 [rows, in]; sites that read one tensor get the same memory.
        gradient: float32 [rows, out]: derivative of the summed negative log likelihood of labels drawn from the model
            by the site's output (before anything is added to it but the bias). Row t is g_t; ``g_t g_t^T`` averages
            to the Fisher information of the outputs, and ``gradient.square().sum(1)`` are weights for a gram.
    """

    module: str
    layer: int
    first_sample: int
    samples: int
    inputs: torch.Tensor
    gradient: torch.Tensor


OnSite = Callable[[SiteGradient], None]
"""Called once a site and batch, in the order of the backward pass, without gradient recording. It may not change what
it is given, and should keep sums and not the tensors themselves."""

BeforeLayer = Callable[[StreamedPass, int], None]
"""Called once a layer, last to first, when it is loaded and before its gradients: ``run.hidden`` is the layer's input,
so that `observe` and the like can be used. It may not change the hidden states or the weights."""


def backward(
    model: StreamedModel,
    tokens: torch.Tensor,
    on_site: OnSite,
    *,
    generator: torch.Generator,
    modules: Collection[str],
    before_layer: BeforeLayer | None = None,
    directory: Path | None = None,
) -> Iterator[tuple[int, int]]:
    """Forward and backward over int64 tokens [samples, length], layer by layer; run it to its end.

    Yields (steps done, steps in all), a step being a layer forward, the head, or a layer backward.

    Args:
        on_site: receives each site's inputs and gradients. A site that no token reaches is never reported.
        generator: draws the labels, on the CPU; the global random state is not touched.
        modules: module paths of the sites of interest.
        directory: where the layers' inputs (samples * length * hidden * 4 bytes a layer) go as files that are mapped
            and removed as the pass proceeds; None keeps them in memory.

    Raises:
        NumericsError: hidden states or gradients that are not finite; names the layer.
    """
    steps = 2 * len(model.layers) + 1
    run = model.begin(tokens)
    model.drop_outer()
    kept: list[Callable[[], torch.Tensor]] = []
    for index in range(len(model.layers)):
        kept.append(_keep(run.hidden, index, directory))
        model.load_layer(index)
        run.advance(index)
        model.drop_layer(index)
        require_finite(run.hidden, f"layer {index}: the output")
        yield index + 1, steps
    gradient = _head_gradient(run, generator)
    model.drop_outer()
    yield len(model.layers) + 1, steps
    for index in reversed(range(len(model.layers))):
        layer = model.load_layer(index)
        run.hidden = kept.pop()()
        sites = {name: model.model.get_submodule(name) for name in modules if _inside(name, model, index)}
        if before_layer is not None:
            before_layer(run, index)
        _layer_backward(run, index, layer, sites, gradient, on_site)
        require_finite(gradient, f"layer {index}: the gradient of the input")
        model.drop_layer(index)
        if directory is not None:
            _file(directory, index).unlink()
        yield steps - index, steps


def _layer_backward(
    run: StreamedPass,
    index: int,
    layer: nn.Module,
    sites: dict[str, nn.Module],
    gradient: torch.Tensor,
    on_site: OnSite,
) -> None:
    """Turn `gradient` [samples, length, hidden], of the layer's output, into that of its input, reporting the sites."""
    first_sample = samples = 0

    def watch(
        name: str,
    ) -> Callable[[nn.Module, tuple[torch.Tensor, ...], dict[str, torch.Tensor], torch.Tensor], None]:
        def called(
            module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor], output: torch.Tensor
        ) -> None:
            value = args[0] if args else kwargs["input"]
            inputs = value.detach().reshape(-1, value.shape[-1])  # [rows, in]

            def pulled(g: torch.Tensor) -> None:
                on_site(SiteGradient(name, index, first_sample, samples, inputs, g.reshape(-1, g.shape[-1])))

            if output.requires_grad and len(inputs):
                # on the tensor, not after the pass: what is written into the output later does not change its gradient
                output.register_hook(pulled)  # type: ignore[no-untyped-call]

        return called

    hooks = [module.register_forward_hook(watch(name), with_kwargs=True) for name, module in sites.items()]
    try:
        for (call, hidden), outgoing in zip(run.batches(index), torch.split(gradient, run.batch_size), strict=True):
            samples = len(hidden)
            with torch.enable_grad():
                leaf = hidden.detach().requires_grad_()
                output = call.run(layer, leaf.clone())  # a clone: some layers add into their input
                output = output[0] if isinstance(output, tuple | list) else output
            (incoming,) = torch.autograd.grad(output, leaf, outgoing.to(output.device))
            outgoing.copy_(incoming)  # a view into `gradient`
            first_sample += samples
    finally:
        for hook in hooks:
            hook.remove()


def _head_gradient(run: StreamedPass, generator: torch.Generator) -> torch.Tensor:
    """[samples, length, hidden]: derivative of drawn labels' negative log likelihood by the last layer's output."""
    gradient = torch.empty_like(run.hidden)
    for sample in range(len(run.tokens)):
        with torch.enable_grad():
            leaf = run.hidden[sample : sample + 1].to(run.owner.device).detach().requires_grad_()
            logits = run.head(sample, leaf)  # [length, vocab]
        chances = logits.detach().softmax(dim=-1)
        labels = torch.multinomial(chances.cpu(), 1, generator=generator).to(chances.device)
        # of -log softmax(logits)[label] by the logits: the chances, less one at the label
        chances.scatter_add_(1, labels, torch.full_like(labels, -1, dtype=chances.dtype))
        (incoming,) = torch.autograd.grad(logits, leaf, chances)
        gradient[sample : sample + 1] = incoming.cpu()
    require_finite(gradient, "the output head: the gradient of the input")
    return gradient


def _keep(hidden: torch.Tensor, index: int, directory: Path | None) -> Callable[[], torch.Tensor]:
    """Gives the hidden states back when they are needed; until then those in a file take no memory."""
    if directory is None:
        kept = hidden.clone()
        return lambda: kept
    file, shape, dtype = _file(directory, index), hidden.shape, hidden.dtype
    with open(file, "wb") as handle:  # written, not mapped and filled: a full disk is an error here, not a crash later
        handle.write(hidden.contiguous().numpy().data)
    return lambda: torch.from_file(str(file), shared=True, size=shape.numel(), dtype=dtype).reshape(shape)


def _file(directory: Path, index: int) -> Path:
    return directory / f"input-{index:05d}.bin"


def _inside(module: str, model: StreamedModel, index: int) -> bool:
    return module.startswith(f"{model.layout.stack}.{index}.")
