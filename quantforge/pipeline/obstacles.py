"""What forbids carrying out a recipe, told from config and tensor headers, or for want of memory."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from quantforge.formats import Format
from quantforge.model.memory import memory_bytes
from quantforge.model.shards import DTYPES
from quantforge.model.source import Checkpoint
from quantforge.model.streamed import StreamedModel
from quantforge.pipeline.grids import Grids
from quantforge.pipeline.tuning_cost import tuning_bytes
from quantforge.spec import ActivationSpec

SHOWN_TENSORS = 20


def misfits(streamed: StreamedModel, checkpoint: Checkpoint) -> Iterator[str]:
    """Tensors that are not what the model described by config.json needs."""
    state = streamed.model.state_dict()
    wrong = []
    for target, key in streamed.keys.plain.items():
        info, needed = checkpoint.tensors[key], state[target]
        if info.shape != tuple(needed.shape):
            wrong.append(f"  {key}: {list(info.shape)}, needed {list(needed.shape)}")
        elif needed.is_floating_point() and not DTYPES[info.dtype].is_floating_point:
            wrong.append(f"  {key}: {info.dtype}, needed a floating point dtype")
    aliases: dict[int, list[str]] = defaultdict(list)  # tied parameters are one object with several names
    for name, parameter in streamed.model.named_parameters(remove_duplicate=False):
        aliases[id(parameter)].append(name)
    filled = streamed.keys.plain.keys() | streamed.keys.converted.keys()
    inside = f"{streamed.layout.stack}."  # the layers' own were looked for when the layout was read
    missing = [names[0] for names in aliases.values() if not names[0].startswith(inside) and not filled & set(names)]
    if missing:
        yield f"{checkpoint.path}: no tensor for {len(missing)} parameters: {', '.join(missing[:SHOWN_TENSORS])}"
    if wrong:
        more = [f"  ... and {len(wrong) - SHOWN_TENSORS} more"] if len(wrong) > SHOWN_TENSORS else []
        yield "\n".join(
            [f"{checkpoint.path}: {len(wrong)} tensors do not fit config.json", *wrong[:SHOWN_TENSORS], *more]
        )


def container_problems(formats: Iterable[Format], checkpoint: Checkpoint, grids: Grids) -> Iterator[str]:
    """Why a model cannot be written in the files of a format's own that were asked for."""
    names = [site.name for site in grids.sites]
    for target in formats:
        if target.container is not None:
            found = target.container.problems(checkpoint, names, [f"{name}.weight" for name in names])
            yield from (f"{target.name}: {problem}" for problem in found)


def untunable(activations: ActivationSpec | None) -> Iterator[str]:
    """What forbids tuning end to end, whatever the machine."""
    if activations is not None:
        yield (
            "--tune-epochs follows gradients, and rounded activations have none; use --tune-epochs 0 with "
            "--activation-bits"
        )


def too_large_to_tune(streamed: StreamedModel, grids: Grids, seqlen: int) -> Iterator[str]:
    """The model does not fit into memory whole, with what tuning on sequences of `seqlen` tokens needs."""
    needed_bytes = tuning_bytes(streamed, grids.sites, grids.specs, min(seqlen, streamed.positions or seqlen))
    available_bytes = memory_bytes(streamed.device)
    if needed_bytes > available_bytes:
        yield (
            f"--tune-epochs needs the whole model, its gradients and activations of {seqlen} tokens in memory, about "
            f"{needed_bytes / 1e9:.1f} GB of {available_bytes / 1e9:.1f} GB; use a smaller --seqlen, or --tune-epochs 0"
        )
