"""Tuning: the scales of all sites and the gains of all norms together, so that the model predicts what it did.

The codes are kept. Each scale and each gain is multiplied by a factor, and the factors follow the gradient of
KL(original || quantized) on the calibration tokens, with Adam (arXiv 1412.6980) and a cosine schedule: the end-to-end
phase of EfficientQAT (arXiv 2407.11062) with the original's predictions as targets, and with gains, as in Norm Tweaking
(arXiv 2309.02784). Solvers look at one site at a time; this is where the errors of different sites are set off against
each other. A scale acts on one group of one output, a gain on one input of every output behind it, so the two correct
different things. It takes gradients through the whole model, so the whole model must fit into memory; `plan` refuses it
otherwise.

Some sequences are held out. What was tuned is kept only if the KL on those is lower.
"""

import math
import time
from collections import Counter
from collections.abc import Generator, Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from quantforge.calibration import CalibrationSet
from quantforge.errors import NumericsError
from quantforge.model.shards import DTYPES
from quantforge.model.skeleton import is_conv1d
from quantforge.model.source import Checkpoint
from quantforge.model.streamed import StreamedModel, StreamedPass
from quantforge.numerics.grid import store_signed_scale
from quantforge.pipeline.plan import Plan
from quantforge.pipeline.workspace import TuningState, Workspace
from quantforge.quantized import QuantizedWeight
from quantforge.report import Event, TuneReport, Tuning

LEARNING_RATE = 2e-3
WARMUP_STEPS = 3
BETAS = (0.9, 0.95)
TOKENS_PER_STEP = 2048
HELD_OUT_SHARE = 8
"""One sequence of so many is held out."""

SECONDS_BETWEEN_SAVES = 30.0


class _Dequantize(nn.Module):
    """Makes a module's weight out of factors [out, groups] of its scales."""

    def __init__(self, weight: QuantizedWeight, transposed: bool, device: torch.device) -> None:
        super().__init__()
        self.offsets = weight.offsets(torch.int16).to(device)  # [out, groups, group]
        self.scale = weight.scale.to(device, torch.float32)
        self.transposed = transposed

    def forward(self, factor: Tensor) -> Tensor:
        values = self.offsets.to(torch.float32) * (self.scale * factor).unsqueeze(-1)  # [out, groups, group]
        matrix = values.flatten(1)
        return matrix.t() if self.transposed else matrix


class _Multiply(nn.Module):
    """Makes a norm's gain out of factors [features]."""

    def __init__(self, gain: Tensor) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, factor: Tensor) -> Tensor:
        return self.gain * factor


class _Student:
    """The whole quantized model, with a factor for each scale and each gain.

    Attributes:
        weights: the committed sites, by name.
        gains: float32 gains before tuning, by checkpoint key.
        factors: what is tuned, by site name or checkpoint key.
    """

    def __init__(self, plan: Plan, workspace: Workspace, trust_remote_code: bool) -> None:
        device = plan.streamed.device
        self.streamed = StreamedModel(plan.checkpoint, str(device), trust_remote_code=trust_remote_code)
        self.streamed.load_outer()
        for index in range(plan.layers):
            self.streamed.load_layer(index)
        names = {key: name for name, key in self.streamed.keys.plain.items()}
        for key, file in workspace.floats().items():
            self.streamed.model.get_parameter(names[key]).data.copy_(workspace.float_tensor(file, key))
        self.weights: dict[str, QuantizedWeight] = {}
        self.gains: dict[str, Tensor] = {}
        self.factors: dict[str, nn.Parameter] = {}
        for site in plan.sites:
            weight = workspace.weight(site.layer, site.name, site.in_features)
            module = self.streamed.model.get_submodule(site.module)
            self.weights[site.name] = weight
            made = _Dequantize(weight, is_conv1d(module), device)
            self._tune(site.name, module, made, torch.ones(weight.scale.shape, device=device))
        for name, key in gains_of(self.streamed).items():
            module = self.streamed.model.get_submodule(name.removesuffix(".weight"))
            gain = self.gains[key] = self.streamed.model.get_parameter(name).detach().clone()
            self._tune(key, module, _Multiply(gain), torch.ones_like(gain))

    def _tune(self, name: str, module: nn.Module, made: nn.Module, factor: Tensor) -> None:
        module.weight = self.factors[name] = nn.Parameter(factor)
        parametrize.register_parametrization(module, "weight", made, unsafe=True)

    def logits(self, tokens: Tensor) -> Tensor:
        """[length, vocab] of one sequence [1, length]."""
        result: Tensor = self.streamed.model(tokens.to(self.streamed.device), use_cache=False).logits[0]
        return result

    def scales(self) -> dict[str, Tensor]:
        """The tuned scales in their stored dtype; a factor that lost its meaning (not positive) changes nothing."""
        tuned = {}
        for name, weight in self.weights.items():
            factor = self.factors[name].detach().cpu()
            exact = weight.scale.to(torch.float32) * torch.where(factor > 0, factor, 1.0)
            tuned[name] = store_signed_scale(exact, weight.spec)
        return tuned

    def tuned_gains(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """The tuned gains in the dtype the checkpoint has for them, by key; of norms that no text reaches, none."""
        tuned = {}
        for key, gain in self.gains.items():
            factor = self.factors[key].detach()
            if bool((factor != 1).any()):
                tuned[key] = (gain * factor).to(DTYPES[checkpoint.tensors[key].dtype]).cpu()
        return tuned

    def round_factors(self, checkpoint: Checkpoint) -> None:
        """Make the factors those of the scales and gains that can be stored."""
        for name, scale in self.scales().items():
            factor = scale.to(torch.float32) / self.weights[name].scale.to(torch.float32)
            self.factors[name].data.copy_(factor)
        for key, stored in self.tuned_gains(checkpoint).items():
            gain = self.gains[key]
            factor = torch.where(gain == 0, 1.0, stored.to(gain) / gain)
            self.factors[key].data.copy_(factor)


def gains_of(model: StreamedModel) -> dict[str, str]:
    """Parameter name -> checkpoint key of vectors that are the weight of a module: of norms, that is.

    Those that several places share are left out.
    """
    stored = model.keys.plain
    shared = {key for key, count in Counter(stored.values()).items() if count > 1}
    vectors = {name for name, parameter in model.model.named_parameters() if parameter.ndim == 1}
    return {
        name: key for name, key in stored.items() if name in vectors and name.endswith(".weight") and key not in shared
    }


def tune(
    plan: Plan, workspace: Workspace, calibration: CalibrationSet, epochs: int, *, trust_remote_code: bool = False
) -> Generator[Event, None, TuneReport]:
    """Tune all committed layers for so many epochs and put the scales and gains into the workspace, if they are better.

    Carried on where it was when the process died. Raises NumericsError when the loss is not finite.
    """
    known = workspace.tuned()
    if known is not None:
        return known
    reference = plan.streamed.begin(calibration.tokens)
    plan.streamed.drop_outer()
    reference.run_all()
    student = _Student(plan, workspace, trust_remote_code)
    samples, length = calibration.tokens.shape
    held_out = max(1, samples // HELD_OUT_SHARE)
    order = list(_steps(samples - held_out, length, epochs))
    state = workspace.tuning() or TuningState(0, _held_out_kl(student, reference, held_out), {})
    optimizer = torch.optim.Adam(student.factors.values(), lr=LEARNING_RATE, betas=BETAS)
    _restore(student, optimizer, state)
    saved = time.monotonic()
    for step in range(state.step, len(order)):
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * (1 + math.cos(math.pi * step / len(order))) / 2
        for settings in optimizer.param_groups:
            settings["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        loss = sum(_gradient(student, reference, sample, length * len(order[step])) for sample in order[step])
        if not math.isfinite(loss):
            raise NumericsError(f"tuning: the KL at step {step + 1} of {len(order)} is {loss}; use --tune-epochs 0")
        optimizer.step()
        if time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
            workspace.keep_tuning(TuningState(step + 1, state.kl_before, _saved(student, optimizer)))
            saved = time.monotonic()
        yield Tuning(step + 1, len(order), loss)
    student.round_factors(plan.checkpoint)
    after = _held_out_kl(student, reference, held_out)
    kept = after < state.kl_before
    report = TuneReport(epochs, len(order), held_out, state.kl_before, after, kept)
    workspace.keep_tuned(report, *((student.scales(), student.tuned_gains(plan.checkpoint)) if kept else ({}, {})))
    return report


def _steps(samples: int, length: int, epochs: int) -> Iterator[list[int]]:
    """Which sequences each step sees; every epoch has its own order."""
    size = max(1, TOKENS_PER_STEP // length)
    for epoch in range(epochs):
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch)).tolist()
        yield from (order[start : start + size] for start in range(0, samples, size))


def _gradient(student: _Student, reference: StreamedPass, sample: int, tokens: int) -> float:
    """Add one sequence's part of the gradient of the mean KL over so many tokens; returns its part of the KL."""
    target = _log_chances(reference, sample)
    with torch.enable_grad():
        logits = student.logits(reference.tokens[sample : sample + 1])
    guess = logits.detach().log_softmax(dim=-1)
    logits.backward((guess.exp() - target.exp()) / tokens)  # type: ignore[no-untyped-call]
    return float(_kl(target, guess).sum()) / tokens


@torch.no_grad()
def _held_out_kl(student: _Student, reference: StreamedPass, count: int) -> float:
    """Mean over the tokens of the last so many sequences."""
    samples = len(reference.tokens)
    total = 0.0
    for sample in range(samples - count, samples):
        guess = student.logits(reference.tokens[sample : sample + 1]).log_softmax(dim=-1)
        total += float(_kl(_log_chances(reference, sample), guess).mean())
    return total / count


@torch.no_grad()
def _log_chances(reference: StreamedPass, sample: int) -> Tensor:
    final = reference.hidden[sample : sample + 1].to(reference.owner.device)
    return reference.head(sample, final).float().log_softmax(dim=-1)


def _kl(target: Tensor, guess: Tensor) -> Tensor:
    """KL of each row, [length], from log-chances [length, vocab]."""
    return (target.exp() * (target - guess)).sum(dim=-1, dtype=torch.float64)


def _saved(student: _Student, optimizer: torch.optim.Adam) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, factor in student.factors.items():
        own = optimizer.state[factor]
        parts = {"factor": factor.detach(), "first": own["exp_avg"], "second": own["exp_avg_sq"]}
        tensors |= {f"{name}.{part}": tensor.cpu().contiguous() for part, tensor in parts.items()}
    return tensors


def _restore(student: _Student, optimizer: torch.optim.Adam, state: TuningState) -> None:
    if not state.step:
        return
    for name, factor in student.factors.items():
        factor.data.copy_(state.tensors[f"{name}.factor"])
        optimizer.state[factor] = {
            "step": torch.tensor(float(state.step)),
            "exp_avg": state.tensors[f"{name}.first"].to(factor),
            "exp_avg_sq": state.tensors[f"{name}.second"].to(factor),
        }
