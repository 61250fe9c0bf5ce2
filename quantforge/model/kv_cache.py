"""Keys and values on their way into the cache: observed, for scales, and rounded through them, as servers keep them.

An attention module hands what it caches (keys after their rotation) to the ``update`` of a transformers ``Cache``, and
goes on with what that returns. So a stand-in, given to every module that takes a cache, sees just that, and can change
it, without anything being known of the architecture. A module that asks its cache for anything else (the states of
linear attention) keeps no keys and values.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor, nn

from quantforge.errors import NumericsError, SourceError
from quantforge.model.packed import PackedCheckpoint
from quantforge.model.streamed import StreamedModel, StreamedPass
from quantforge.numerics.activations import round_cached
from quantforge.quantized import CacheScales
from quantforge.readers import ActivationScheme
from quantforge.spec import KvCacheSpec

ARGUMENTS = ("cache", "past_key_values", "past_key_value", "layer_past")
"""What a module's forward calls its cache; transformers 5.24 says ``cache``, those before it the others."""

Keep = Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(module path, keys, values), both [batch, heads, tokens, dim], to those that attention goes on with."""


class _Enough(Exception):
    """All that this layer caches has been seen; the rest of it need not run. Never leaves this module."""


class _KeepsElse(SourceError):
    """A module keeps something that is not keys and values."""

    def __init__(self, module: str, asked: str) -> None:
        super().__init__(f"{module} asks its cache for {asked}; only one of keys and values is simulated")
        self.module = module


@dataclass(frozen=True, eq=False)
class CachedRange:
    """Largest magnitudes of what a module caches, float32 [heads] each, over `tokens` calibration tokens."""

    module: str
    k: Tensor
    v: Tensor
    tokens: int


class _StandIn:
    """An empty cache, for one forward pass of one module."""

    def __init__(self, module: str, keep: Keep) -> None:
        self.__dict__.update(_module=module, _keep=keep)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        shapes = [list(states.shape) for states in (key_states, value_states)]
        if len(shapes[0]) != 4 or shapes[0][:3] != shapes[1][:3]:
            raise SourceError(
                f"{self._module} caches tensors {shapes[0]} and {shapes[1]}; keys and values are both "
                "[batch, heads, tokens, dim]: --kv-cache none leaves them alone"
            )
        kept: tuple[Tensor, Tensor] = self._keep(self._module, key_states, value_states)
        return kept

    def get_seq_length(self, *args: Any) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        raise _KeepsElse(self.__dict__["_module"], name)

    def __getitem__(self, place: Any) -> Any:
        raise _KeepsElse(self.__dict__["_module"], f"[{place!r}]")


def cache_takers(module: nn.Module, path: str) -> dict[str, nn.Module]:
    """`module`, at `path`, and the modules in it whose forward takes a cache, by path."""
    named = ((f"{path}.{name}" if name else path, found) for name, found in module.named_modules())
    return {name: found for name, found in named if _argument(found) is not None}


def _argument(module: nn.Module) -> tuple[str, int] | None:
    """Name and place of the argument that is the module's cache; None where it takes none."""
    names = list(inspect.signature(module.forward).parameters)
    return next(((name, names.index(name)) for name in ARGUMENTS if name in names), None)


@contextmanager
def _given(takers: Mapping[str, nn.Module], keep: Keep) -> Iterator[None]:
    """While this is open, each of the modules is given a cache of its own, whatever it is called with."""

    def hook(stand_in: _StandIn, name: str, place: int) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
        def hand(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            rest = {key: value for key, value in kwargs.items() if key not in ARGUMENTS}
            if len(args) > place:
                return (*args[:place], stand_in, *args[place + 1 :]), rest
            return args, {**rest, name: stand_in}

        return hand

    handles = []
    try:
        for path, module in takers.items():
            argument = _argument(module)
            assert argument is not None, f"{path} takes no cache"
            handles.append(module.register_forward_pre_hook(hook(_StandIn(path, keep), *argument), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


# ------------------------------------------------------------------------------------------------ observing


@torch.no_grad()
def observe_cache(run: StreamedPass, index: int) -> list[CachedRange]:
    """What layer `index`, which must be loaded, caches of the pass's hidden states, its input; nothing is changed.

    Empty for a layer that caches no keys and values. Raises NumericsError for values that are not finite, SourceError
    for what is no keys and values, or is cached in a way that one set of scales cannot describe.
    """
    layer = run.owner.layers[index]
    takers = cache_takers(layer, f"{run.owner.layout.stack}.{index}")
    while True:
        watch = _Watch()
        try:
            with _given(takers, watch.keep):
                for call, hidden in run.batches(index):
                    try:
                        call.run(layer, hidden)
                    except _Enough as stop:
                        clear_frames(stop.__traceback__)  # they hold activations, in cycles that are collected late
                    watch.batch_done()
            return watch.found()
        except _KeepsElse as other:
            clear_frames(other.__traceback__)
            takers = {name: module for name, module in takers.items() if name != other.module}


class _Watch:
    """Collects the ranges of one layer."""

    def __init__(self) -> None:
        self._largest: dict[str, tuple[Tensor, Tensor]] = {}
        self._tokens: dict[str, int] = {}
        self._seen: list[str] = []  # in this batch
        self._expected: list[str] | None = None  # what the first batch saw

    def keep(self, name: str, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if name in self._seen:
            raise SourceError(f"{name} caches more than once a pass; there is one pair of scales for a module")
        self._seen.append(name)
        own = (_largest(keys, name, "keys"), _largest(values, name, "values"))
        known = self._largest.get(name, own)
        self._largest[name] = (torch.maximum(known[0], own[0]), torch.maximum(known[1], own[1]))
        self._tokens[name] = self._tokens.get(name, 0) + keys.shape[0] * keys.shape[2]
        if self._seen == self._expected:
            raise _Enough
        return keys, values

    def batch_done(self) -> None:
        if self._expected is None:
            self._expected = self._seen
        self._seen = []

    def found(self) -> list[CachedRange]:
        return [CachedRange(name, k.cpu(), v.cpu(), self._tokens[name]) for name, (k, v) in self._largest.items()]


def _largest(states: Tensor, name: str, what: str) -> Tensor:
    """Of each head, float32 [heads]."""
    largest = states.to(torch.float32).abs().amax(dim=(0, 2, 3))
    if not bool(torch.isfinite(largest).all()):
        raise NumericsError(f"{name}: {what} that are not finite were to be cached")
    return largest


def checkpoint_name(streamed: StreamedModel, module: str) -> str:
    """What the checkpoint calls a module, by the tensors that it stores for it; its path where it stores none."""
    for target, key in streamed.keys.plain.items():
        rest = target.removeprefix(f"{module}.")
        if rest != target and key.endswith(f".{rest}"):
            return key.removesuffix(f".{rest}")
    return module


# ------------------------------------------------------------------------------------------------ rounding


@contextmanager
def rounded_cache(
    takers: Mapping[str, nn.Module], scales: Mapping[str, CacheScales], spec: KvCacheSpec
) -> Iterator[None]:
    """While this is open, modules go on with their keys and values as an 8-bit cache would give them back.

    Args:
        takers: those that may cache, by path (see `cache_takers`); one that does and has no `scales` is a SourceError.
    """

    def keep(name: str, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if name not in scales:
            raise SourceError(f"{name} caches keys and values, and has no scales (k_scale, v_scale)")
        own = scales[name]
        for scale, states in ((own.k, keys), (own.v, values)):
            if scale.numel() not in (1, states.shape[1]):
                raise SourceError(f"{name}: {scale.numel()} scales for {states.shape[1]} key-value heads")
        return round_cached(keys, own.k, spec), round_cached(values, own.v, spec)

    with _given(takers, keep):
        yield


@contextmanager
def stored_cache(streamed: StreamedModel) -> Iterator[str | None]:
    """While this is open, a checkpoint with scales for its cache runs as if its keys and values came out of that cache.

    Yields what is done, in words; None where the config asks for no such cache. Raises SourceError when it asks for one
    that `KvCacheSpec` cannot describe, or scales belong to no module; and while it runs, for keys and values without.
    """
    source = streamed.source
    scheme = source.cache_scheme if isinstance(source, PackedCheckpoint) else None
    if not isinstance(source, PackedCheckpoint) or scheme is None:
        yield None
        return
    spec, stored = cache_spec(scheme), source.cache_scales()
    takers: dict[str, nn.Module] = {}
    for index, layer in enumerate(streamed.layers):
        takers |= cache_takers(layer, f"{streamed.layout.stack}.{index}")
    paths = {checkpoint_name(streamed, path): path for path in takers}
    if strangers := [name for name in stored if name not in paths]:
        raise SourceError(f"{source.path}: {strangers[0]}.k_scale belongs to no module that is given a cache")
    if not stored:
        raise SourceError(f"{source.path}: kv_cache_scheme asks for static scales, and there are none")
    scales = {paths[name]: own for name, own in stored.items()}
    alike = {type(takers[path]) for path in scales}
    with rounded_cache({path: found for path, found in takers.items() if type(found) in alike}, scales, spec):
        yield f"{spec.label()}, in {len(scales)} layers"


def cache_spec(scheme: ActivationScheme) -> KvCacheSpec:
    """What a config says of the cache as a KvCacheSpec; SourceError for any other grid than that."""
    kinds, strategies = {"float": "fp8", "int": "int8"}, ("tensor", "attn_head")
    static = scheme.bits == 8 and not scheme.dynamic and scheme.symmetric
    if not static or scheme.kind not in kinds or scheme.strategy not in strategies:
        raise SourceError(
            f"kv_cache_scheme is {scheme.label('keys and values')}; known is 8-bit float or int, per tensor or "
            "attn_head, static, symmetric"
        )
    return KvCacheSpec("fp8" if scheme.kind == "float" else "int8", scheme.strategy == "attn_head")
