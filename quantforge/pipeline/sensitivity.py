"""What each site's quantization would cost the model, predicted before anything is decided.

To second order, with g_t the gradient of a site's output at token t for labels drawn from the model (`model.backward`) and
E the error of the weight, quantizing the site changes the model's predictions by

    KL(model || quantized) per token = 1/2 mean_t (g_t . E x_t)^2

(the Fisher information is the curvature of KL; optimal brain damage and its successors, WoodFisher arXiv 2004.14340).
What several sites do to each other, and one site's errors at several tokens of a sequence, is left out, so that the
predictions of sites add up. The error is that of the run's own method on the same inputs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from quantforge.methods import Method, OptionValue
from quantforge.model.backward import SiteGradient, backward
from quantforge.model.observe import observe
from quantforge.model.sites import LinearSite
from quantforge.model.streamed import StreamedModel, StreamedPass
from quantforge.pipeline.solve import solve_errors
from quantforge.spec import QuantSpec

SEED = 0
