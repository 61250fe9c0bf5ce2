"""Packed layers in the place of linear ones: placed before weights are loaded, filled from the files one by one."""

import re
from collections.abc import Iterable

import torch
from torch import nn

from quantforge.errors import SourceError, UsageError
from quantforge.formats import CheckpointFacts, load_format
from quantforge.kernels.linear import Activations, Grid, PackedLinear
from quantforge.model.activations import activation_spec
from quantforge.model.packed import PackedCheckpoint
from quantforge.model.skeleton import is_conv1d, map_keys
from quantforge.quantized import SCALE_DTYPES, QuantizedWeight
from quantforge.spec import ActivationSpec, QuantSpec

NAMED = 3
DTYPE_NAMES = {dtype: name for name, dtype in SCALE_DTYPES.items()}


def place(model: nn.Module, packed: PackedCheckpoint, activations: Activations = "float") -> dict[str, str]:
    """Put an empty `PackedLinear` where each site of the checkpoint belongs; returns site -> module name.

    Args:
        model: as transformers builds it, on the meta device or not.
        activations: what is done to the inputs of sites whose config leaves them in floating point.

    Raises:
        SourceError: sites that are no linear module of the model, or whose activations cannot be run.
    """
    targets = {
        key: target for target, key in map_keys(model, [f"{site}.weight" for site in packed.sites]).plain.items()
    }
    places, wrong = {}, []
    for site in packed.sites:
        name = targets.get(f"{site}.weight", "").rpartition(".")[0]
        old = model.get_submodule(name) if name else None
        if isinstance(old, nn.Linear) or (old is not None and is_conv1d(old)):
            places[site] = name
        else:
            wrong.append(site)
    if wrong:
        raise SourceError(
            f"{packed.path}: {len(wrong)} packed sites are no linear modules of {type(model).__name__}, such as "
            f"{', '.join(wrong[:NAMED])}; experts in one tensor cannot be run packed"
        )
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    if shared := [name for name in places.values() if f"{name}.weight" in tied]:
        raise SourceError(f"{packed.path}: config.json ties {', '.join(shared)} to another tensor, but it is packed")
    for site, name in places.items():
        scheme = packed.schemes[site]
        rounded = activation_spec(scheme.activations, site) is not None
        owner, _, leaf = name.rpartition(".")
        old = model.get_submodule(name)
        layer = _empty(old, scheme.bits, "int8-token" if rounded else activations)
        setattr(model.get_submodule(owner), leaf, layer.train(old.training))
        for module in (layer, model.get_submodule(owner)):  # else transformers draws weights that are no more
            module._is_hf_initialized = True  # type: ignore[assignment]
    return places


def _empty(old: nn.Module, bits: int, activations: Activations) -> PackedLinear:
    """A layer of the size of `old`, its bias where and of what dtype the old one's is."""
    if isinstance(old, nn.Linear):
        in_features, out_features = old.in_features, old.out_features
    else:  # Conv1D stores [in, out]
        in_features, out_features = (int(size) for size in old.get_parameter("weight").shape)
    bias = getattr(old, "bias", None)
    return PackedLinear(
        in_features,
        out_features,
        bits=bits,
        bias=bias is not None,
        activations=activations,
        dtype=None if bias is None else bias.dtype,
        device=None if bias is None else bias.device,
    )


def unexpected_keys(packed: PackedCheckpoint, places: dict[str, str]) -> set[str]:
    """Regular expressions for the names of packed tensors, which the model itself has no parameters for."""
    suffixes = {suffix for found in (packed.sites, packed.cache) for parts in found.values() for suffix in parts}
    patterns = {rf"\.{re.escape(suffix)}$" for suffix in suffixes - {"weight"}}
    if "weight" in suffixes:
        patterns |= {rf"(^|\.){re.escape(name)}\.weight$" for name in places.values()}
    return patterns


def fill(model: nn.Module, packed: PackedCheckpoint, places: dict[str, str], devices: dict[str, torch.device]) -> None:
    """Read, decode and pack one site after another; nothing of it is ever a float matrix.

    `devices` says where each module goes. Raises SourceError for a site that is damaged or of another size than its
    module.
    """
    for site, name in places.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, PackedLinear)
        decoded = packed.decode(site)
        try:
            layer.fill(Grid(decoded.codes, decoded.scale, decoded.zero, decoded.group_index), devices[name])
        except ValueError as error:
            raise SourceError(f"{packed.path}: {site}: {error}") from error


def encoded(model: nn.Module, packed: PackedCheckpoint, places: dict[str, str]) -> dict[str, torch.Tensor]:
    """The packed tensors of all sites by checkpoint key, as the checkpoint that was loaded holds them.

    Raises UsageError for a variant that no format here writes with exactly its tensors.
    """
    tensors: dict[str, torch.Tensor] = {}
    for site, name in places.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, PackedLinear)
        found = _encode(site, layer, packed)
        expected = set(packed.sites[site].values())
        if missing := sorted(expected - found.keys()):
            raise UsageError(
                f"{site} cannot be saved as it was loaded: nothing here writes {', '.join(missing)}; copy the "
                f"checkpoint's own files ({packed.path})"
            )
        tensors |= {key: tensor for key, tensor in found.items() if key in expected}
    return tensors


def _encode(site: str, layer: PackedLinear, packed: PackedCheckpoint) -> dict[str, torch.Tensor]:
    scheme, grid = packed.schemes[site], layer.grid()
    method, variant = packed.reader.quant_method, scheme.checkpoint_format
    is_awq, is_ct = variant == "gemm", method == "compressed-tensors"
    try:
        spec = QuantSpec(
            scheme.bits,  # other numbers are refused
            scheme.group_size,
            scheme.symmetric,
            DTYPE_NAMES[grid.scales.dtype],  # type: ignore[arg-type]
        )
    except UsageError as error:
        raise UsageError(f"{site} cannot be saved: {error}") from error
    regular = torch.arange(layer.in_features) // (scheme.group_size or layer.in_features)
    plain = torch.equal(grid.group_index, regular) and spec.fits(layer.in_features)
    weight = QuantizedWeight(spec, grid.codes, grid.scales, grid.zeros, None if plain else grid.group_index)
    unpacked = is_ct and variant != "pack-quantized"
    facts = CheckpointFacts(
        {site: spec}, (), has_zero_zero=variant == "gptq_v2", activations=ActivationSpec(8) if unpacked else None
    )
    name = "compressed-tensors" if is_ct else "awq" if is_awq else "gptq"
    tensors = load_format(name).encode(site, weight, facts)
    if f"{site}.weight_g_idx" in packed.sites[site].values():
        tensors[f"{site}.weight_g_idx"] = grid.group_index.to(torch.int32)
    return tensors


def packed_layers(model: nn.Module) -> Iterable[tuple[str, PackedLinear]]:
    """Every packed layer with its name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, PackedLinear))
