"""What tuning end to end takes of memory: it alone holds the whole model and the activations of a whole sequence."""

from collections.abc import Mapping, Sequence

from quantforge.model.sites import LinearSite
from quantforge.model.streamed import StreamedModel
from quantforge.spec import QuantSpec

FLOAT_BYTES = 4

TUNED_BYTES = 13
"""A quantized weight, while it is tuned: its code, its offset from zero, both in float32 for the pass backward."""

FACTOR_BYTES = 24
"""A factor with its scale, its gradient and what Adam keeps of it."""

TUNING_ROWS = 6
"""Of the size of the vocabulary, in float32, that a token's predictions by both models take, gradient included."""


def tuning_bytes(
    streamed: StreamedModel, sites: Sequence[LinearSite], specs: Mapping[str, QuantSpec], seqlen: int
) -> int:
    """Bytes that tuning `sites` on sequences of `seqlen` tokens takes beside the process's own."""
    inside = f"{streamed.layout.stack}."
    tuned = sum(site.out_features * site.in_features for site in sites)
    whole, outer = 0, 0
    for name, parameter in streamed.model.named_parameters():
        whole += parameter.numel()
        outer += 0 if name.startswith(inside) else parameter.numel()
    rest = FLOAT_BYTES * (whole + outer - tuned)  # embeddings and head of both models
    factors = FACTOR_BYTES * sum(site.out_features * specs[site.name].groups(site.in_features) for site in sites)
    text = streamed.text_config
    widths = sum(site.in_features + site.out_features for site in {site.module: site for site in sites}.values())
    token = widths + 2 * len(streamed.layers) * int(text.hidden_size) + TUNING_ROWS * int(text.vocab_size)
    return rest + TUNED_BYTES * tuned + factors + FLOAT_BYTES * seqlen * token
