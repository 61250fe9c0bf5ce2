"""Which matrices can be quantized, and why the others are left alone."""

from dataclasses import dataclass

from torch import nn

from quantforge.errors import SourceError
from quantforge.formats import SiteShape
from quantforge.model.skeleton import KeyMap, find_stack, is_conv1d

ROUTER_NAMES = {"gate", "router", "shared_expert_gate"}
ROUTER = "router"
EXPERT = "expert tensor: not quantized yet"


@dataclass(frozen=True)
class LinearSite:
    """One weight matrix [out, in] of a decoder layer.

    Attributes:
        name: the site's name in the checkpoint, without ``.weight``; exports and reports use it.
        module: the module's path in the model.
        layer: index of the decoder layer.
        kind: ``linear`` or ``conv1d`` (stored [in, out]).
    """

    name: str
    module: str
    layer: int
    out_features: int
    in_features: int
    kind: str

    @property
    def shape(self) -> SiteShape:
        """The site as formats see it."""
        return SiteShape(self.name, self.out_features, self.in_features, self.kind)


@dataclass(frozen=True)
class ModelLayout:
    """Every parameter of two or more dims is a site or is listed in `kept` with its reason.

    Attributes:
        stack: module path of the decoder layers.
        layers: their count.
        sites: all sites, by layer, in module order.
        kept: parameter name -> reason.
        kept_linears: names of the linear layers (routers and experts included) that stay in floating point: the
            checkpoint's and, where it differs, the module's, because loaders match one or the other.
    """

    stack: str
    layers: int
    sites: tuple[LinearSite, ...]
    kept: dict[str, str]
    kept_linears: tuple[str, ...]


def read_layout(model: nn.Module, keys: KeyMap) -> ModelLayout:
    """Sort every matrix of the model into sites and kept parameters."""
    stack, layers = find_stack(model)
    modules = dict(model.named_modules())
    sites: list[LinearSite] = []
    kept: dict[str, str] = {}
    kept_linears: list[str] = []
    missing: list[str] = []
    for name, parameter in model.named_parameters():
        owner_name, _, leaf = name.rpartition(".")
        owner = modules[owner_name]
        below = name.startswith(f"{stack}.")
        if below and name not in keys.plain and not _converted(name, keys):
            missing.append(name)
        if parameter.ndim < 2:
            continue
        reason = _reason_to_keep(owner, owner_name, leaf, below, name, keys)
        is_linear = isinstance(owner, nn.Linear) or is_conv1d(owner)
        if reason is None:
            in_first = is_conv1d(owner)
            out_features, in_features = parameter.shape[::-1] if in_first else parameter.shape
            layer = int(name[len(stack) + 1 :].split(".")[0])
            site_name = keys.plain[name].removesuffix(".weight")
            kind = "conv1d" if in_first else "linear"
            sites.append(LinearSite(site_name, owner_name, layer, out_features, in_features, kind))
        else:
            kept[name] = reason
            if is_linear or reason in (ROUTER, EXPERT):
                stored = [keys.plain[name]] if name in keys.plain else keys.converted.get(name, [])
                kept_linears += [key.removesuffix(".weight") for key in stored] + [owner_name]
    if missing:
        raise SourceError(
            f"{len(missing)} parameters of the decoder layers have no tensor in the checkpoint: "
            f"{', '.join(missing[:3])}"
        )
    head = output_head(model)
    if head is not None:  # also when it is tied to the embedding
        kept_linears.append(head)
    return ModelLayout(stack, len(layers), tuple(sites), kept, tuple(dict.fromkeys(kept_linears)))


def _converted(name: str, keys: KeyMap) -> bool:
    """True when transformers' conversion produces `name`, or a sibling from the same tensors (many to many)."""
    return name in keys.converted or any(
        target.rpartition(".")[0] == name.rpartition(".")[0] for target in keys.converted
    )


def _reason_to_keep(owner: nn.Module, owner_name: str, leaf: str, below: bool, name: str, keys: KeyMap) -> str | None:
    """Why a parameter is not a site; None when it is one."""
    last = owner_name.rpartition(".")[2]
    if isinstance(owner, nn.Embedding):
        return "embedding"
    if last in ("lm_head", "embed_out") and not below:
        return "output head"
    if not isinstance(owner, nn.Linear) and not is_conv1d(owner):
        if "Router" in type(owner).__name__ or last in ROUTER_NAMES:
            return ROUTER
        if "Experts" in type(owner).__name__ or last == "experts":
            return EXPERT
        return f"parameter of {type(owner).__name__}, not a linear layer"
    if not below:
        return "outside the decoder layers"
    if leaf != "weight":
        return f"{leaf} of a linear layer"
    if ROUTER_NAMES & set(owner_name.split(".")):
        return ROUTER
    if name not in keys.plain:
        return "stored in another layout in the checkpoint"
    if not keys.plain[name].endswith(".weight"):
        return f"stored as {keys.plain[name]}, which does not end in .weight"
    return None


def output_head(model: nn.Module) -> str | None:
    """Module path of the output head, or None when the model has none."""
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if getter is not None else None
    return next((name for name, module in model.named_modules() if module is head), None) if head is not None else None
