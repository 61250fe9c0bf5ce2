"""Perplexity of a model, and its divergence from a reference, over the windows of a protocol.

Everything is computed from logits in float64: KL(reference || model) = sum p_ref (log p_ref - log p_model) is exactly 0
where the logits are equal, and negative by no more than rounding elsewhere.

Tokens of one window are correlated, so a standard error that takes them for independent is usually too small. Means
carry both: over tokens, and over the means of windows (which all have as many predictions). Believe the larger.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from quantforge.errors import NumericsError, QuantforgeError
from quantforge.evaluate.protocol import Windows

_CHUNK_VALUES = 1 << 23
"""Logits taken to float64 at a time, 64 MiB of them: 256 positions of a vocabulary of 32k."""


class WindowModel(Protocol):
    """Gives the logits of a window.

    `index` counts the rows of `Windows.tokens`. The result is float32 [window, vocab], on a device with float64.
    """

    def logits(self, index: int) -> torch.Tensor: ...


@dataclass(frozen=True)
class Divergence:
    """A model against its reference, over predicted tokens. Standard errors are None for fewer than two observations.

    Attributes:
        kl: mean KL(reference || model), nats a token; `kl_se` over tokens, `kl_se_window` over windows.
        kl_p99: 99th percentile of a token's KL, nearest rank; `kl_max` the largest.
        top1: share of tokens whose most likely continuation is the same; `top1_se` binomial.
        reference_nll: mean negative log likelihood of the reference, nats a token.
        reference_ppl: its perplexity, exp(reference_nll).
        ppl_ratio: perplexity over that of the reference; `ppl_ratio_se` by the delta method from the paired
            differences, the larger of over tokens and over windows.
    """

    kl: float
    kl_se: float | None
    kl_se_window: float | None
    kl_p99: float
    kl_max: float
    top1: float
    top1_se: float
    reference_nll: float
    reference_ppl: float
    ppl_ratio: float
    ppl_ratio_se: float | None


@dataclass(frozen=True)
class EvalResult:
    """Scores of one model. `protocol` and `source` belong beside every number that is shown.

    Attributes:
        predictions: predicted tokens, windows * (window - 1).
        nll: mean negative log likelihood, nats a token; `nll_se` over tokens, `nll_se_window` over windows.
        ppl: exp(nll), infinite beyond the range of a float; `ppl_se` by the delta method from the larger error of nll.
        divergence: None without a reference.
        activations: how the model's activations were quantized while it was scored; None when they were not.
        kv_cache: how its keys and values were, as if they came out of such a cache; None when they were not.
    """

    protocol: str
    source: str
    windows: int
    predictions: int
    nll: float
    nll_se: float | None
    nll_se_window: float | None
    ppl: float
    ppl_se: float | None
    divergence: Divergence | None = None
    activations: str | None = None
    kv_cache: str | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Scores:
    """Per predicted token, float64 [window - 1] of one window or [windows, window - 1] of all."""

    nll: torch.Tensor
    reference_nll: torch.Tensor
    kl: torch.Tensor
    agree: torch.Tensor


def evaluate_windows(
    windows: Windows,
    model: WindowModel,
    reference: WindowModel | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EvalResult:
    """Score `model` on every window, against `reference` when there is one.

    Args:
        progress: called with (windows done, windows in all) after each window.

    Raises:
        NumericsError: logits that are not finite; names the window and the model.
        QuantforgeError: logits of another shape, or vocabularies that differ.
    """
    parts = []
    for index in range(windows.count):
        parts.append(_score_window(windows, index, model, reference))
        if progress is not None:
            progress(index + 1, windows.count)
    nll = torch.stack([part.nll for part in parts])  # [windows, window - 1]
    nll_se, nll_se_window = _standard_error(nll.flatten()), _standard_error(nll.mean(dim=1))
    mean = nll.mean().item()
    ppl, error = _exp(mean), _larger(nll_se, nll_se_window)
    divergence = None
    if reference is not None:
        others = (torch.stack([getattr(p, name) for p in parts]) for name in ("reference_nll", "kl", "agree"))
        divergence = _divergence(_Scores(nll, *others))
    return EvalResult(
        protocol=windows.protocol,
        source=windows.source,
        windows=windows.count,
        predictions=nll.numel(),
        nll=mean,
        nll_se=nll_se,
        nll_se_window=nll_se_window,
        ppl=ppl,
        ppl_se=None if error is None else ppl * error,
        divergence=divergence,
        notes=windows.notes,
    )


def _score_window(windows: Windows, index: int, model: WindowModel, reference: WindowModel | None) -> _Scores:
    """Scores of window `index`, on the CPU; the three that need a reference are empty without one."""
    tokens = windows.tokens[index]
    where = f"window {windows.indices[index]} of {windows.source}"
    logits = _checked(model.logits(index), tokens, f"the model, {where}")
    compared = None if reference is None else _checked(reference.logits(index), tokens, f"the reference, {where}")
    if compared is not None and compared.shape[1] != logits.shape[1]:
        raise QuantforgeError(
            f"vocabularies differ: {logits.shape[1]} logits from the model, {compared.shape[1]} from the reference; "
            "a divergence needs the checkpoint this model was made from, with the same tokenizer and padding"
        )
    targets = tokens[1:].to(logits.device)
    step = max(1, _CHUNK_VALUES // logits.shape[1])
    chunks = []
    for start in range(0, len(targets), step):
        stop = min(start + step, len(targets))
        other = None if compared is None else _finite(compared, start, stop, f"the reference, {where}")
        chunks.append(_score(_finite(logits, start, stop, f"the model, {where}"), other, targets[start:stop]))
    return _Scores(*(torch.cat([getattr(c, n) for c in chunks]).cpu() for n in ("nll", "reference_nll", "kl", "agree")))


def _score(logits: torch.Tensor, reference: torch.Tensor | None, targets: torch.Tensor) -> _Scores:
    """Scores of a chunk: logits [positions, vocab] predict `targets` int64 [positions]."""
    pick = targets[:, None]
    log_p = logits.log_softmax(dim=-1, dtype=torch.float64)
    nll = -log_p.gather(1, pick)[:, 0]
    if reference is None:
        empty = nll.new_empty(0)
        return _Scores(nll, empty, empty, empty)
    reference = reference.to(logits.device)
    log_r = reference.log_softmax(dim=-1, dtype=torch.float64)
    reference_nll = -log_r.gather(1, pick)[:, 0]
    agree = (logits.argmax(dim=-1) == reference.argmax(dim=-1)).double()
    kl = (log_p.neg_().add_(log_r)).mul_(log_r.exp_()).sum(dim=-1)
    return _Scores(nll, reference_nll, kl, agree)


def _checked(logits: torch.Tensor, tokens: torch.Tensor, whose: str) -> torch.Tensor:
    if logits.ndim != 2 or logits.shape[0] != len(tokens):
        raise QuantforgeError(f"{whose}: logits are {list(logits.shape)}; expected [{len(tokens)}, vocab]")
    largest = int(tokens.max())
    if largest >= logits.shape[1]:
        raise QuantforgeError(
            f"{whose}: the text holds token {largest}, but there are {logits.shape[1]} logits; "
            "the tokenizer is another model's"
        )
    return logits


def _finite(logits: torch.Tensor, start: int, stop: int, whose: str) -> torch.Tensor:
    chunk = logits[start:stop]
    if not torch.stack(chunk.aminmax()).isfinite().all():  # both are NaN if any logit is
        bad = (~chunk.isfinite()).nonzero()  # [bad, 2]
        raise NumericsError(
            f"{whose}: {len(bad)} logits are not finite, the first for position {start + int(bad[0, 0])}, "
            f"token {int(bad[0, 1])}; evaluate in float32, or look at the layers' reports"
        )
    return chunk


def _divergence(scores: _Scores) -> Divergence:
    """Sums up scores [windows, window - 1]."""
    kl = scores.kl.flatten()
    ranked = kl.sort().values
    difference = scores.nll - scores.reference_nll
    ratio = _exp(difference.mean().item())
    error = _larger(_standard_error(difference.flatten()), _standard_error(difference.mean(dim=1)))
    top1 = scores.agree.mean().item()
    reference_nll = scores.reference_nll.mean().item()
    return Divergence(
        kl=kl.mean().item(),
        kl_se=_standard_error(kl),
        kl_se_window=_standard_error(scores.kl.mean(dim=1)),
        kl_p99=ranked[(99 * kl.numel() + 99) // 100 - 1].item(),  # rank ceil(0.99 n)
        kl_max=ranked[-1].item(),
        top1=top1,
        top1_se=math.sqrt(top1 * (1 - top1) / kl.numel()),
        reference_nll=reference_nll,
        reference_ppl=_exp(reference_nll),
        ppl_ratio=ratio,
        ppl_ratio_se=None if error is None else ratio * error,
    )


def _standard_error(values: torch.Tensor) -> float | None:
    """Of the mean of `values` [n], taken as independent; None for fewer than two."""
    return None if values.numel() < 2 else values.std().item() / math.sqrt(values.numel())


def _larger(first: float | None, second: float | None) -> float | None:
    known = [value for value in (first, second) if value is not None]
    return max(known, default=None)


def _exp(value: float) -> float:
    """exp, infinite where it would overflow."""
    return math.exp(value) if value < 709 else math.inf
