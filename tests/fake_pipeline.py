"""A pipeline that does what a test tells it to, for the tests of the command line."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from quantforge import report as events
from quantforge.contracts import Problem, Verdict
from quantforge.evaluate.divergence import Divergence, EvalResult
from quantforge.recipe import Recipe
from quantforge.spec import QuantSpec

PROTOCOL = "classic-ppl/2048 (rows joined by \\n\\n, one tokenization, 4 of 141 windows)"


def site(layer: int, name: str = "q_proj", **changes: Any) -> events.SiteReport:
    values = {"name": f"model.layers.{layer}.self_attn.{name}", "layer": layer, "out_features": 8, "in_features": 16}
    return events.SiteReport(**(values | {"bits": 4, "bits_per_weight": 4.25, "loss": 0.2, "rtn_loss": 0.5} | changes))


def run_of(layers: int = 2, done: int = 0, **changes: Any) -> Iterator[events.Event]:
    """As the real run does, a layer's warnings and the report's hold every fallback."""
    reports = []
    for layer in range(layers):
        done_site = site(layer, **changes)
        warnings = (f"{done_site.name}: {done_site.fallback}",) if done_site.fallback else ()
        reports.append(events.LayerReport(layer, (done_site,), warnings))
    yield events.RunStarted(layers, done, ("group size 64 was chosen",))
    for report in reports[done:]:
        yield events.LayerStarted(report.layer)
        yield events.SiteDone(report.sites[0])
        yield events.LayerDone(report, seconds=3.0)
    yield events.Assembling("compressed-tensors")
    yield events.Verifying("compressed-tensors")
    output = events.OutputReport("compressed-tensors", "out", 106_000_000, 102_000_000, 423)
    kept = {"lm_head.weight": "the output head", "model.embed_tokens.weight": "an embedding"}
    warnings = tuple(warning for report in reports for warning in report.warnings)
    yield events.RunFinished(
        events.RunReport("gptq", "4 bits, group 64, symmetric", tuple(reports), (output,), kept, warnings, 269_000_000)
    )


@dataclass
class FakePlan:
    model_type: str = "llama"
    label: str = "4 bits, group 64, symmetric"
    specs: dict[str, QuantSpec] = field(default_factory=lambda: {site(n).name: QuantSpec(4, 64) for n in range(2)})
    method: str = "gptq"
    formats: tuple[str, ...] = ("compressed-tensors",)
    output: Path = Path("out")
    sites: tuple[Any, ...] = tuple(site(layer) for layer in range(2))
    kept: dict[str, str] = field(default_factory=lambda: {"lm_head.weight": "the output head"})
    notes: tuple[str, ...] = ("group size 64 was chosen",)
    source_bytes: int = 269_000_000
    estimated_bytes: int = 102_000_000
    bits_per_weight: float = 4.25
    layers: int = 2
    settled: bool = True
    units: tuple[Any, ...] = ()
    kv_cache: Any = None

    def to_json(self) -> dict[str, Any]:
        return {"method": self.method, "layers": self.layers}


class Pipeline:
    """Stands in for `quantforge.pipeline`; keeps the recipe it was given, and does what a test tells it to."""

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.asked: dict[str, Any] = {}
        self.started = False
        self.run: Callable[[], Iterator[events.Event]] = run_of
        self.plan_error: Exception | None = None
        self.divergence: Divergence | None = None

    def make_plan(self, recipe: Recipe) -> FakePlan:
        self.recipe = recipe
        if self.plan_error is not None:
            raise self.plan_error
        return FakePlan()

    def verdicts(self, plan: FakePlan) -> Iterator[tuple[str, tuple[Verdict, ...]]]:
        refused = Verdict("tgi", None, (Problem("it has no kernel for it", "tgi 3, kernels.py"),), remedy="add one")
        yield "compressed-tensors", (Verdict("vllm", "Marlin", notes=("slower than it could be",)), refused)

    def quantize(self, recipe: Recipe, plan: FakePlan) -> Iterator[events.Event]:
        self.started = True
        yield from self.run()

    def evaluate_checkpoint(self, checkpoint: str, **asked: Any) -> Any:
        self.asked = {"checkpoint": checkpoint} | asked
        for done in range(5):
            asked["progress"]("checkpoint", done, 4)
        values: dict[str, Any] = {"protocol": PROTOCOL, "source": "wiki.test.raw", "windows": 4}
        values |= {"predictions": 8188, "nll": 2.97, "nll_se": 0.01, "nll_se_window": 0.02, "ppl": 19.5, "ppl_se": 0.25}
        return EvalResult(**values, divergence=self.divergence)

    def describe_checkpoint(self, path: str, allow_pickle: bool = False, trust_remote_code: bool = False) -> Any:
        self.asked = {"path": path, "allow_pickle": allow_pickle, "trust_remote_code": trust_remote_code}
        rows = [
            SimpleNamespace(name=f"model.layers.{i}.down_proj", shape=(8, 16), bits=4, group_size=16) for i in (0, 1)
        ]
        values = {"path": path, "model_type": "llama", "scheme": "4 bits, group 16", "format": "pack-quantized"}
        kept, files = {"lm_head.weight": "the output head"}, {"model.safetensors": 2_500_000}
        return SimpleNamespace(
            **values,
            total_bytes=2_500_000,
            bits_per_weight=5.0,
            quantized=rows,
            kept=kept,
            files=files,
            parameters=1234,
            kv_cache=None,
            to_json=lambda: values,
        )


def raising(error: BaseException) -> Callable[[], Iterator[events.Event]]:
    def run() -> Iterator[events.Event]:
        yield events.RunStarted(2, 0, ())
        raise error

    return run
