"""The ``quantize`` verb."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from quantforge.cli.flags import NOTES, listed
from quantforge.errors import UsageError

if TYPE_CHECKING:
    from quantforge.cli.ui import Ui
    from quantforge.reading import ResolvedRecipe

Text = str | None
Many = list[str] | None
Switch = bool | None

MAKE = "What to make"
SITES = "Bits by site, or from a budget"
CALIBRATION = "Calibration"
ADVANCED = "Advanced"


def quantize(
    context: typer.Context,
    model: Annotated[
        Text, typer.Argument(metavar="MODEL", help="Local directory or hub id.", show_default=False)
    ] = None,
    preset: Annotated[Text, Option(help="fast, balanced or best. [balanced]", rich_help_panel=MAKE)] = None,
    scheme: Annotated[
        Text, Option(help="A grid by its name: W4A16, W4A16_ASYM, W8A8, ...", rich_help_panel=MAKE)
    ] = None,
    bits: Annotated[
        Text,
        Option(
            "--bits",
            "-b",
            metavar="BITS",
            help="2, 3, 4 or 8; several: 4,3,8. [4]",
            rich_help_panel=MAKE,
        ),
    ] = None,
    group_size: Annotated[
        Text, Option(help="Columns that share a scale, auto, or -1. [auto]", rich_help_panel=MAKE)
    ] = None,
    symmetric: Annotated[
        Switch, Option("--sym/--asym", help="Fixed zero, or one per group. [sym]", rich_help_panel=MAKE)
    ] = None,
    activation_bits: Annotated[
        int | None, Option(help="8: INT8 activations too (W8A8). [none]", rich_help_panel=MAKE)
    ] = None,
    kv_cache: Annotated[
        Text, Option(help="fp8, int8, fp8_per_head, ...: scales for an 8-bit cache. [none]", rich_help_panel=MAKE)
    ] = None,
    method: Annotated[
        Text, Option(help="gptq, rtn, awq, awq+gptq, ...; or several, comma separated. [gptq]", rich_help_panel=MAKE)
    ] = None,
    formats: Annotated[
        Many, Option("--format", metavar="NAMES", help="Comma separated. [compressed-tensors]", rich_help_panel=MAKE)
    ] = None,
    recipe: Annotated[
        Text, Option(help="YAML file, or a name of `quantforge recipes list`; flags win.", rich_help_panel=MAKE)
    ] = None,
    output: Annotated[
        Text,
        Option("--output", "-o", help="Directory to make. [MODEL-w4g64-gptq]", rich_help_panel=MAKE),
    ] = None,
    rules: Annotated[
        Many,
        Option(
            "--rule",
            metavar="PATTERN=...",
            help="Of sites: bits:8,group_size:64 or skip. Repeatable.",
            rich_help_panel=SITES,
        ),
    ] = None,
    ignore: Annotated[
        Many,
        Option(metavar="PATTERN", help="Sites to leave alone; re: begins a regex. Repeatable.", rich_help_panel=SITES),
    ] = None,
    avg_bits: Annotated[
        float | None,
        Option(help="Choose bits; their mean over quantized weights, scales not counted.", rich_help_panel=SITES),
    ] = None,
    fit: Annotated[
        Text, Option(metavar="SIZE", help="Choose bits; tensors of an export take at most 90MB.", rich_help_panel=SITES)
    ] = None,
    max_kl: Annotated[
        float | None, Option(help="Choose bits; predicted KL from the original, nats a token.", rich_help_panel=SITES)
    ] = None,
    candidate_bits: Annotated[
        Text, Option(metavar="BITS", help="To choose from, comma separated. [3,4,8]", rich_help_panel=SITES)
    ] = None,
    dataset: Annotated[
        Text, Option(help="File, directory, dataset id, builtin, self. [self]", rich_help_panel=CALIBRATION)
    ] = None,
    subset: Annotated[Text, Option(help="Configuration of the dataset.", rich_help_panel=CALIBRATION)] = None,
    split: Annotated[Text, Option(help="Split of the dataset.", rich_help_panel=CALIBRATION)] = None,
    column: Annotated[Text, Option(help="Column that holds the text.", rich_help_panel=CALIBRATION)] = None,
    nsamples: Annotated[int | None, Option(help="Sequences. [128]", rich_help_panel=CALIBRATION)] = None,
    seqlen: Annotated[int | None, Option(help="Tokens in a sequence. [512]", rich_help_panel=CALIBRATION)] = None,
    bos: Annotated[
        Literal["auto", "always", "never"] | None,
        Option(help="Start sequences with BOS. [auto]", rich_help_panel=CALIBRATION),
    ] = None,
    token_weights: Annotated[
        Literal["gradient", "none"] | None,
        Option(help="Tokens count by the model's gradient, or alike. [gradient]", rich_help_panel=CALIBRATION),
    ] = None,
    sequential: Annotated[
        Literal["layer", "group", "none"] | None,
        Option(
            help="Inputs as quantized layers give them, observed once a layer or group; none: the original's. [layer]",
            rich_help_panel=CALIBRATION,
        ),
    ] = None,
    act_order: Annotated[
        Switch, Option("--act-order/--no-act-order", help="Solve active inputs first.", rich_help_panel=ADVANCED)
    ] = None,
    damping: Annotated[float | None, Option(help="Relative damping.", rich_help_panel=ADVANCED)] = None,
    option: Annotated[
        Many, Option(metavar="KEY=VALUE", help="Of the method. Repeatable.", rich_help_panel=ADVANCED)
    ] = None,
    tune_epochs: Annotated[
        int | None, Option(help="Epochs of tuning all scales and norms end to end. [0]", rich_help_panel=ADVANCED)
    ] = None,
    scale_dtype: Annotated[
        Literal["auto", "float16", "bfloat16"] | None, Option(help="[auto]", rich_help_panel=ADVANCED)
    ] = None,
    max_shard_size: Annotated[Text, Option(help="Largest file, such as 500MB. [5GB]", rich_help_panel=ADVANCED)] = None,
    bundle_kernels: Annotated[
        Text,
        Option(
            metavar="TARGETS",
            help="Compile kernels for these GPUs, beside the weights: sm_80,sm_90,gfx942.",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    trust_remote_code: Annotated[
        Switch, Option("--trust-remote-code", help="Run code from the checkpoint.", rich_help_panel=ADVANCED)
    ] = None,
    allow_pickle: Annotated[
        Switch, Option("--allow-pickle", help="Read weights stored as pickles (.bin).", rich_help_panel=ADVANCED)
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"] | None, Option(help="[auto]")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the plan and write nothing.")] = False,
    strict: Annotated[Switch, Option("--strict", help="Fail on any fallback or warning.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Quantize a checkpoint, verify the files by reading them back, and report what was done.

    Stopped runs go on where they were: run the same command again.

    \b
    Examples:
      quantforge quantize ./SmolLM2-135M --bits 4 --group-size 64
      quantforge quantize ./SmolLM2-135M --scheme W4A16_ASYM --preset fast --dry-run
      quantforge quantize ./SmolLM2-135M --scheme W8A8
      quantforge quantize ./SmolLM2-135M --avg-bits 3.5
      quantforge quantize ./SmolLM2-135M --bits 4,3,8 --method gptq,awq+gptq --sequential none -o ./variants
      quantforge quantize ./SmolLM2-135M --bits 4 --rule "*.down_proj=bits:8" --rule "re:layers\.0\.=skip"
      quantforge quantize org/model --dataset calib.jsonl --column text --format compressed-tensors,gptq
      quantforge quantize org/model --recipe w4a16 --asym -o ./out --json
    """
    from quantforge.cli.ui import Ui

    ui = Ui(as_json=as_json, quiet=quiet)
    variants = resolve(context)
    for resolved in variants:
        ui.notes(resolved.notes)
    try:
        if len(variants) > 1:
            _several(ui, variants, dry_run)
        else:
            _one(ui, variants[0], dry_run)
    except KeyboardInterrupt:
        ui.insist(
            "what is finished is kept: layers, and sampled tokens once all are; run the same command again to continue"
        )
        raise


def resolve(context: typer.Context) -> "list[ResolvedRecipe]":
    """The recipes that a command line and the file it names come to, one for each variant."""
    from quantforge.cli.variants import expand
    from quantforge.reading import read_recipe

    file = context.params["recipe"]
    variants = [read_recipe(file, overrides) for overrides in expand(_overrides(context.params))]
    return [replace(resolved, notes=(*context.meta[NOTES], *resolved.notes)) for resolved in variants]


def _one(ui: "Ui", resolved: "ResolvedRecipe", dry_run: bool) -> None:
    from quantforge.pipeline.plan import make_plan  # torch comes with it, so a wrong recipe is refused before
    from quantforge.pipeline.run import quantize as run

    plan = make_plan(resolved.recipe)
    if dry_run:
        from quantforge.pipeline.outlook import verdicts

        ui.plan(resolved, plan, list(verdicts(plan)))
        return
    ui.notes(plan.notes)
    ui.say(f"output: {plan.output}")
    ui.report(resolved, plan, ui.follow(run(resolved.recipe, plan)))


def _several(ui: "Ui", variants: "Sequence[ResolvedRecipe]", dry_run: bool) -> None:
    from quantforge.pipeline.many import plan_many, quantize_many

    jobs = plan_many([resolved.recipe for resolved in variants])
    planned = [(replace(was, recipe=recipe), plan) for was, (recipe, plan) in zip(variants, jobs, strict=True)]
    if dry_run:
        ui.variants([(resolved, plan, None) for resolved, plan in planned])
        return
    for _, plan in planned:
        ui.notes(plan.notes)
        ui.say(f"output: {plan.output}")
    reports = ui.follow_many(quantize_many(jobs))
    ui.variants([(resolved, plan, report) for (resolved, plan), report in zip(planned, reports, strict=True)])


_NOT_RECIPE = {"recipe", "option", "act_order", "damping", "dry_run", "as_json", "quiet"}
_NOT_RECIPE |= {"tensor_parallel", "context_length", "batch", "kv_bits"}


def _overrides(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags that were given, in the recipe's keys; what was not given is left to the file and the defaults."""
    given = {key: value for key, value in flags.items() if value not in (None, [], ()) and key not in _NOT_RECIPE}
    if "formats" in given:
        given["formats"] = listed(",".join(given["formats"]))
    if "bundle_kernels" in given:
        given["bundle_kernels"] = listed(given["bundle_kernels"])
    if "ignore" in given:
        given["ignore"] = tuple(given["ignore"])
    if "candidate_bits" in given:
        given["candidate_bits"] = _numbers(given["candidate_bits"])
    if "rules" in given:
        given["rules"] = tuple(_rule(text) for text in given["rules"])
    if "group_size" in given:
        given["group_size"] = _group_size(given["group_size"])
    options = _options(flags.get("option") or [])
    for key in ("act_order", "damping"):
        if flags.get(key) is not None:
            options[key] = flags[key]
    return given | ({"options": options} if options else {})


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--candidate-bits takes numbers such as 3,4,8; got {text!r}") from error


def _group_size(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text  # `auto`, or something the recipe refuses in its own words


def _rule(text: str) -> dict[str, Any]:
    """``PATTERN=bits:8`` with values typed as YAML would."""
    from quantforge.reading import parse_scalar
    from quantforge.rules import parse_rule

    return {key: value if key == "match" else parse_scalar(value) for key, value in parse_rule(text).items()}


def _options(pairs: list[str]) -> dict[str, Any]:
    """``key=value`` pairs with values typed as YAML would; raises UsageError on anything else."""
    from quantforge.reading import parse_scalar

    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--option takes KEY=VALUE, for example --option damping=0.01; got {pair!r}")
        options[key.strip()] = parse_scalar(value)
    return options
