"""Calls past the dispatcher: the operators' bits, and operators for everything that wants to see them."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from quantforge.kernels import eager, native
from quantforge.kernels.linear import Activations, Grid, PackedLinear

pytestmark = pytest.mark.skipif(native.status().library is None, reason="there is no compiled kernel here")
IN, OUT, GROUP = 64, 40, 32


def layer_of(
    bits: int = 4, *, bias: bool = False, activations: Activations = "float", group: int = GROUP, shuffled: bool = False
) -> PackedLinear:
    torch.manual_seed(bits)
    index = torch.arange(IN) // group
    zeros = torch.randint(0, 1 << bits, (OUT, IN // group), dtype=torch.uint8)
    grid = Grid(
        torch.randint(0, 1 << bits, (OUT, IN), dtype=torch.uint8),
        (torch.rand(OUT, IN // group) * 0.02).half(),
        torch.full_like(zeros, 128) if activations == "int8-token" else zeros,
        index[torch.randperm(IN)] if shuffled else index,
    )
    layer = PackedLinear(IN, OUT, bits=bits, bias=bias, activations=activations)
    layer.fill(grid)
    if bias:
        torch.nn.init.normal_(layer.bias)
    return layer


def by_operator(layer: PackedLinear, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr("quantforge.kernels.linear.unobserved", lambda x: False)
        return layer(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "settings",
    [
        {"bits": 4},
        {"bits": 3, "shuffled": True},
        {"bits": 8, "bias": True},
        {"bits": 4, "activations": "int8-group", "bias": True},
        {"bits": 8, "activations": "int8-token", "group": IN},
        {"bits": 8, "activations": "int8-token"},
    ],
    ids=str,
)
def test_results_are_those_of_the_operator(
    settings: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(**settings).to(dtype)
    for shape in ((IN,), (1, IN), (2, 3, IN), (eager.MOST_TOKENS + 1, IN), (0, IN)):
        x = torch.randn(shape).to(dtype)
        found = layer(x)
        assert torch.equal(found, by_operator(layer, x, monkeypatch)) and found.dtype == dtype
        assert found.shape == (*shape[:-1], OUT)
        with torch.inference_mode():
            assert torch.equal(layer(x.clone()), found)
    assert (layer.direct is None) == (settings.get("activations") == "int8-token" and "group" not in settings)


def test_strided_inputs_and_wrong_ones_are_the_operators_matter() -> None:
    layer = layer_of()
    for x in (torch.randn(IN, 3).t(), torch.randn(3, 2 * IN)[:, ::2], torch._neg_view(torch.randn(2, IN))):
        assert torch.equal(layer(x), layer(x.clone().contiguous()))
    wrong = (
        torch.randn(2, IN + 8),
        torch.randn(2, IN // 2),
        torch.randn(2, IN).double(),
        torch.randn(IN, 0),
        torch.tensor(1.0),
    )
    for x in wrong:
        with pytest.raises(ValueError):
            layer(x)


# ------------------------------------------------------------------------------------------------ who watches


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_operator() -> None:
    layer, x = layer_of(), torch.randn(1, IN)
    layer(x)
    with Recorder() as recorder:
        layer(x)
    assert "quantforge.w4a16_linear.default" in recorder.names


def test_a_profiler_sees_the_operator() -> None:
    layer, x = layer_of(), torch.randn(1, IN)
    layer(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x)
    assert "quantforge::w4a16_linear" in {event.key for event in profile.key_averages()}


def test_tracers_see_the_operator() -> None:
    layer, x = layer_of(), torch.randn(1, IN)
    layer(x)
    traced = torch.jit.trace(layer, x)
    fx = torch.fx.experimental.proxy_tensor.make_fx(layer)(x)
    exported = torch.export.export(layer, (x,)).module()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert "quantforge::w4a16_linear" in str(traced.graph) and "w4a16_linear" in fx.code
    other = torch.randn(1, IN)
    for found in (traced, fx, exported, compiled):
        assert torch.equal(found(other), layer(other))


class Scaled(Tensor):
    """Twice its numbers, to operators of ours."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "w4a16_linear" in str(func):
            return 2 * func(*(each.as_subclass(Tensor) if isinstance(each, cls) else each for each in args))
        return super().__torch_function__(func, types, args, kwargs)


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_what_catches_functions_of_torch_sees_the_operator() -> None:
    layer, x = layer_of(), torch.randn(1, IN)
    expected = layer(x)
    assert torch.equal(layer(x.as_subclass(Scaled)).as_subclass(Tensor), 2 * expected)
    with Functions() as seen:
        layer(x)
    assert any("w4a16_linear" in name for name in seen.names)
    assert torch.equal(torch.fx.symbolic_trace(torch.nn.Sequential(layer))(x), expected)


def test_tensors_without_values_are_for_the_operator() -> None:
    layer, x = layer_of(), torch.randn(1, IN)
    layer(x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(x)).shape == (1, OUT)
    assert not eager.unobserved(torch.empty(1, IN, device="meta"))


def test_a_gradient_goes_through() -> None:
    layer = layer_of(bias=True)
    layer(torch.randn(1, IN))
    x = torch.randn(1, IN, requires_grad=True)
    layer(x).sum().backward()
    assert torch.allclose(x.grad, layer.dequantize().sum(0), atol=1e-5)
    layer.bias.requires_grad_()
    layer(torch.randn(1, IN)).sum().backward()
    assert torch.equal(layer.bias.grad, torch.ones(OUT))
    with torch.no_grad():
        assert not eager.unobserved(x)


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: lambda x: torch.func.grad(lambda y: f(y).sum())(x)])
def test_transforms_are_applied_to_the_operator(transform: Callable[[Any], Any]) -> None:
    layer, x = layer_of(), torch.randn(3, IN)
    layer(x)
    seen: list[bool] = []

    def f(y: Tensor) -> Tensor:
        seen.append(eager.unobserved(y))
        return y * 2

    transform(f)(x)
    assert seen == [False]


# ------------------------------------------------------------------------------------------------ what is kept


def test_other_tensors_are_taken_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, other, x = layer_of(bias=True), layer_of(bias=True), torch.randn(1, IN)
    before = layer(x)
    changes: list[Callable[[], Any]] = [
        lambda: layer.scales.mul_(2),
        lambda: setattr(layer, "scales", layer.scales * 3),
        lambda: setattr(layer.weight, "data", layer.weight.flip(0)),
        lambda: setattr(layer.zeros, "data", layer.zeros + 1),
        lambda: setattr(layer, "zeros", None),
        lambda: layer.bias.data.mul_(2),
        lambda: setattr(layer.bias, "data", torch.ones(OUT)),
        lambda: setattr(layer, "bias", torch.nn.Parameter(torch.arange(OUT) * 1.0, requires_grad=False)),
        lambda: setattr(layer, "bias", None),
        lambda: layer.fill(other.grid()._replace(codes=15 - other.grid().codes)),
        lambda: layer.float(),
    ]
    for change in changes[:-1]:
        change()
        after = layer(x)
        assert torch.equal(after, by_operator(layer, x, monkeypatch)) and not torch.equal(after, before)
        before = after
    changes[-1]()
    assert torch.equal(layer(x), before)
    layer = layer_of()
    expected = layer(x)
    layer.scales = layer.scales.transpose(1, 2).contiguous().transpose(1, 2)
    assert not layer.scales.is_contiguous() and torch.equal(layer(x), expected)
    layer = layer_of()
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        assert torch.equal(layer(x.to(dtype)), by_operator(layer, x.to(dtype), monkeypatch))


def test_what_does_not_belong_together_is_refused() -> None:
    x = torch.randn(1, IN)
    changes: dict[str, Callable[[PackedLinear], Any]] = {
        "scales are": lambda layer: setattr(layer, "scales", layer.scales[:, :1]),
        "bias is": lambda layer: setattr(layer, "bias", torch.nn.Parameter(torch.zeros(3), requires_grad=False)),
        "expected floats": lambda layer: setattr(layer, "group_size", 16),
        "on meta": lambda layer: layer.to("meta"),
    }
    for said, change in changes.items():
        layer = layer_of(bias=True)
        layer(x)
        change(layer)
        with pytest.raises(ValueError, match=said):
            layer(x)


def test_the_same_tensors_with_another_meaning_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 512)

    def views_scales(layer: PackedLinear) -> None:
        layer.scales.data = layer.scales.data.view(torch.bfloat16)

    def negates_scales(layer: PackedLinear) -> None:
        layer.scales = torch._neg_view(layer.scales)

    def keeps_activations(layer: PackedLinear) -> None:
        layer.activations = "float"

    def wants_gradients(layer: PackedLinear) -> None:
        layer.scales = torch.nn.Parameter(layer.scales * 2)

    def doubles_scales(layer: PackedLinear) -> None:
        torch.nn.utils.parametrize.register_parametrization(layer, "scales", Double(), unsafe=True)

    def transposes_scales(layer: PackedLinear) -> None:
        layer.scales.transpose_(1, 2)  # 16 groups by 16 rows: the same shape

    for change in (
        views_scales, negates_scales, keeps_activations, wants_gradients, doubles_scales, transposes_scales
    ):  # fmt: skip
        layer = PackedLinear(512, OUT, bits=4, activations="int8-group")
        codes, scales = torch.randint(0, 16, (OUT, 512), dtype=torch.uint8), torch.rand(OUT, 16).half()
        layer.fill(Grid(codes, scales, torch.randint(0, 16, (OUT, 16), dtype=torch.uint8), torch.arange(512) // 32))
        before = layer(x)
        change(layer)
        for _ in range(2):
            after = layer(x)
            assert torch.equal(after, by_operator(layer, x, monkeypatch)), change
            assert not torch.equal(after, before), change


class Double(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_nothing_is_kept_alive() -> None:
    layer, x = layer_of(), torch.randn(1, IN)
    layer(x)
    weight, scales = weakref.ref(layer.weight), weakref.ref(layer.scales)
    layer.scales = layer.scales * 2
    layer.to("meta")
    gc.collect()
    assert layer.direct is not None and weight() is None and scales() is None


def test_a_module_of_before_can_be_called() -> None:
    layer, x = layer_of(), torch.randn(1, IN)
    expected = layer(x)
    del layer.__dict__["direct"]
    assert torch.equal(layer(x), expected)


def test_copies_have_addresses_of_their_own() -> None:
    layer, x = layer_of(), torch.randn(1, IN)
    expected = layer(x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin.direct is None and torch.equal(twin(x), expected)
        twin.scales.zero_()
        assert torch.equal(twin(x), torch.zeros(1, OUT)) and torch.equal(layer(x), expected)


def test_without_a_library_it_is_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of(), torch.randn(1, IN)
    expected = layer(x)
    assert layer.direct is not None
    monkeypatch.setattr(native, "status", lambda: native.Status(None, "a test"))
    assert torch.allclose(layer(x), expected, atol=1e-5) and layer.direct is None


def test_torch_is_one_whose_keys_are_known() -> None:
    """Else every call would take the long way, silently."""
    assert eager.KNOWN and eager.unobserved(torch.randn(1, 3))
    with torch.inference_mode():
        assert eager.unobserved(torch.randn(1, 3))
    assert not eager.unobserved(torch.randn(1, 3).to_sparse())
