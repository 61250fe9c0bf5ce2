"""A run as a user follows it: events become lines, and a bar on a terminal."""

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.progress import Progress, TaskID

from quantforge import report as events

if TYPE_CHECKING:
    from quantforge.cli.ui import Ui


def megabytes(size_bytes: int) -> str:
    """``269.1 MB``, a megabyte being 10^6 bytes."""
    return f"{size_bytes / 1e6:,.1f} MB"


def duration(seconds: float) -> str:
    """``0:07``, ``12:40``, ``3:02:11``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def gathered(remarks: Iterable[str]) -> list[str]:
    """Remarks ``<site>: <what>`` that say the same about several sites become one; others stay as they are."""
    sites: dict[str, list[str]] = {}
    for remark in remarks:
        site, colon, what = remark.partition(": ")
        about_site = bool(colon) and " " not in site and "." in site
        sites.setdefault(what if about_site else remark, []).extend([site] if about_site else [])
    result = []
    for what, names in sites.items():
        more = f" and {len(names) - 1} more sites" if len(names) > 1 else ""
        result.append(f"{names[0]}{more}: {what}" if names else what)
    return result


def folded(folds: Sequence[events.TransformReport]) -> str:
    return f"{sum(fold.kept for fold in folds)} of {len(folds)}"


def chosen(allocation: events.Allocation) -> str:
    return (
        f"{allocation.mean_bits:.3f} bits a weight without scales, {megabytes(allocation.estimated_bytes)}, "
        f"predicted KL {allocation.predicted_kl:.4g} nats a token"
    )


def leaf(name: str) -> str:
    """The last part of a site's name that is not a number: ``q_proj``, ``down_proj``."""
    parts = [part for part in name.split(".") if not part.isdigit() and part != "weight"]
    return parts[-1] if parts else name


class Pace:
    """How long layers take, and how many are left; of several variants in one run, all of them."""

    def __init__(self) -> None:
        self.left = 0
        self._seconds: list[float] = []

    def done(self, seconds: float) -> str:
        """One layer more is done; the time left, in words."""
        self.left -= 1
        self._seconds.append(seconds)
        return f"ETA {duration(sum(self._seconds) / len(self._seconds) * max(self.left, 0))}"


class RunView:
    """Turns the events of a run into lines; with `bar`, keeps it up to date as well.

    Attributes:
        variants: of a run of several, by name; lines of each begin with its name.
    """

    def __init__(self, ui: "Ui", name: str | None = None, pace: Pace | None = None) -> None:
        self.ui = ui
        self.variants: dict[str, RunView] = {}
        self._prefix = "" if name is None else f"{name}: "
        self._pace = pace or Pace()
        self.bar: Progress | None = None
        self.finished: events.RunReport | None = None
        self.verified: set[str] = set()
        self._task: TaskID | None = None
        self._total = 0
        self._done = 0
        self._pass_started = 0.0

    def show(self, event: events.Event) -> None:
        match event:
            case events.Sampling(sequences=sequences, tokens=tokens):
                self._stage(f"sampling {sequences} x {tokens} calibration tokens from the model itself")
                event.watchers.append(self._sampling)
            case events.Weighing(done=done, steps=steps):
                self._pass("weighing calibration tokens", done, steps)
            case events.Tuning(step=step, steps=steps, kl=kl):
                self._tuning(step, steps, kl)
            case events.Allocating(done=done, steps=steps):
                self._pass("choosing bits", done, steps)
            case events.Allocated(allocation=allocation):
                self._allocated(allocation)
            case events.RunStarted():
                self._start(event)
            case events.LayerStarted(layer=layer):
                self._update(f"layer {layer + 1}/{self._total}")
            case events.LayerTransformed(layer=layer, reports=folds):
                self._update(f"layer {layer + 1}/{self._total} folded {folded(folds)} pairs")
            case events.SiteDone(report=site):
                self._update(f"layer {site.layer + 1}/{self._total} {leaf(site.name)}")
            case events.LayerDone():
                self._layer(event)
            case events.Assembling(format=name):
                self._stage(f"writing {name}")
            case events.Verifying(format=name):
                self.verified.add(name)
                self._stage(f"verifying {name}: reading it back")
            case events.RunFinished(report=report):
                self.finished = report
            case events.VariantsStarted(variants=names, notes=notes):
                self.ui.notes(notes)
                self.variants = {name: RunView(self.ui, name, self._pace) for name in names}
            case events.VariantEvent(variant=name, event=inner):
                view = self.variants[name]
                view.bar = self.bar
                view.show(inner)

    def _pass(self, what: str, done: int, steps: int) -> None:
        """Of a pass over the whole model, forward and backward: a line at each fifth of the way, with the time left."""
        self._fifths(what, done, steps, " of a pass forward and backward")

    def _sampling(self, done: int, steps: int) -> None:
        self._fifths("sampling calibration tokens", done, steps)

    def _fifths(self, what: str, done: int, steps: int, of: str = "") -> None:
        eta = self._eta(done, steps)
        if done == 1 or 5 * done // steps != 5 * (done - 1) // steps:
            self._stage(f"{what}: {100 * done // steps}%{of}{eta and ', '}{eta}")

    def _tuning(self, step: int, steps: int, kl: float) -> None:
        eta = self._eta(step, steps)
        self._stage(f"tuning: step {step}/{steps}  KL {kl:.4f}{eta and '  '}{eta}")

    def _eta(self, done: int, steps: int) -> str:
        """Of steps that take alike, counted from the first that is seen; nothing after that one."""
        now = time.monotonic()
        if done == 1:
            self._pass_started = now
            return ""
        return f"ETA {duration((now - self._pass_started) / (done - 1) * (steps - done))}"

    def _allocated(self, allocation: events.Allocation) -> None:
        self._say(f"bits chosen for {allocation.budget}: {chosen(allocation)}")

    def _start(self, event: events.RunStarted) -> None:
        self._total, self._done = event.layers, event.done
        self._pace.left += event.layers - event.done
        self.ui.notes(event.notes)
        if 0 < event.done < event.layers:
            self._say(f"resuming: {event.done} of {event.layers} layers were already done")
        if self.bar is not None:
            self._task = self.bar.add_task(
                f"{self._prefix}starting", total=event.layers, completed=event.done, remark=""
            )

    def _layer(self, event: events.LayerDone) -> None:
        """``layer 3/30  loss 0.412 x RTN  4.250 bits/weight  3.1 s  ETA 1:24``"""
        report = event.report
        self._done += 1
        eta = self._pace.done(event.seconds)
        ratio = report.loss_ratio
        parts = [
            f"layer {report.layer + 1}/{self._total}",
            "loss not measured" if ratio is None else f"loss {ratio:.3f} x RTN",
            f"{report.bits_per_weight:.3f} bits/weight",
            f"{event.seconds:.1f} s",
        ]
        self._say("  ".join(parts if self.bar else [*parts, eta]))
        for remark in gathered(report.warnings):  # fallbacks are among them
            self._say(f"  {remark}")
        if self.bar is not None and self._task is not None:
            self.bar.update(self._task, completed=self._done, remark=eta)

    def _stage(self, text: str) -> None:
        self._say(text)
        self._update(text)

    def _update(self, text: str) -> None:
        if self.bar is not None and self._task is not None:
            self.bar.update(self._task, description=f"{self._prefix}{text}")

    def _say(self, text: str) -> None:
        self.ui.say(f"{self._prefix}{text}")
