"""The streamed backward pass gives the gradients of plain autograd over the whole model."""

from pathlib import Path

import pytest
import torch
from test_architectures import CONFIGS, build
from torch import nn

from quantforge.errors import NumericsError
from quantforge.model import streamed as streamed_module
from quantforge.model.backward import SiteGradient, backward
from quantforge.model.skeleton import is_conv1d
from quantforge.model.source import open_checkpoint
from quantforge.model.streamed import StreamedModel, StreamedPass

TOKENS = torch.randint(3, 128, (3, 24), generator=torch.Generator().manual_seed(1))
EXACT = "llama gpt2 gemma3_text gpt_neox mixtral".split()
"""Plain, Conv1D, sliding and full attention mixed, parallel residual, routed experts."""

Sums = dict[str, torch.Tensor]


def streamed_sums(path: Path, directory: Path | None = None, seed: int = 5) -> tuple[Sums, Sums, Sums]:
    """Per site: sum over tokens of g x^T [out, in], of g^2 [out], and of |g|^2 x x^T [in, in]."""
    model = StreamedModel(open_checkpoint(path))
    products: Sums = {}
    squares: Sums = {}
    grams: Sums = {}

    def on_site(seen: SiteGradient) -> None:
        assert not torch.is_grad_enabled()
        weights = seen.gradient.square().sum(1, keepdim=True)
        for sums, value in (
            (products, seen.gradient.t() @ seen.inputs),
            (squares, seen.gradient.square().sum(0)),
            (grams, (weights * seen.inputs).t() @ seen.inputs),
        ):
            sums[seen.module] = sums.get(seen.module, 0) + value

    modules = [site.module for site in model.layout.sites]
    generator = torch.Generator().manual_seed(seed)
    steps = list(backward(model, TOKENS, on_site, generator=generator, modules=modules, directory=directory))
    assert steps == [(done, len(steps)) for done in range(1, len(steps) + 1)]
    assert all(parameter.is_meta for parameter in model.model.parameters())
    return products, squares, grams


def plain_sums(model: nn.Module, names: list[str], seed: int = 5) -> tuple[Sums, Sums]:
    """The same from the whole model: gradients of the weights, and of the outputs, squared."""
    generator = torch.Generator().manual_seed(seed)
    squares: Sums = {}
    modules = {name: model.get_submodule(name) for name in names}
    outputs: list[tuple[str, torch.Tensor]] = []
    for name, module in modules.items():
        module.weight.requires_grad_()
        module.register_forward_hook(lambda _m, _a, out, name=name: (out.retain_grad(), outputs.append((name, out)))[1])
    logits = torch.cat([model(batch[None], use_cache=False).logits for batch in TOKENS])
    log_chances = logits.log_softmax(-1)
    labels = torch.stack([torch.multinomial(rows.detach().exp(), 1, generator=generator) for rows in log_chances])
    (-log_chances.gather(-1, labels).sum()).backward()
    for name, output in outputs:
        squares[name] = squares.get(name, 0) + output.grad.reshape(-1, output.shape[-1]).square().sum(0)
    products = {n: m.weight.grad.t() if is_conv1d(m) else m.weight.grad for n, m in modules.items()}
    return products, squares


@pytest.mark.parametrize("name", EXACT)
def test_gradients_are_those_of_the_whole_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_module, "TOKENS_PER_BATCH", 48)  # two batches, the last one smaller
    model = build(name)
    model.save_pretrained(tmp_path)
    products, squares, grams = streamed_sums(tmp_path)
    expected_products, expected_squares = plain_sums(model, list(products))
    assert products.keys() == {site.module for site in StreamedModel(open_checkpoint(tmp_path)).layout.sites}
    for site in products:
        for found, expected in ((products, expected_products), (squares, expected_squares)):
            off = float((found[site] - expected[site]).norm() / expected[site].norm())
            assert off < 1e-4, (site, off)
        assert torch.linalg.eigvalsh(grams[site]).min() > -1e-4 * grams[site].diagonal().max()


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - set(EXACT)))
def test_every_architecture_gives_finite_gradients_for_every_site(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    products, _, _ = streamed_sums(tmp_path)
    assert products.keys() == {site.module for site in StreamedModel(open_checkpoint(tmp_path)).layout.sites}
    assert all(bool(torch.isfinite(value).all()) and float(value.norm()) > 0 for value in products.values())


def test_files_give_the_same_gradients_as_memory_and_are_removed(tiny_llama: Path, tmp_path: Path) -> None:
    in_memory, on_disk = streamed_sums(tiny_llama), streamed_sums(tiny_llama, tmp_path)
    for kind in range(3):
        assert all(torch.equal(in_memory[kind][site], on_disk[kind][site]) for site in in_memory[kind])
    assert list(tmp_path.iterdir()) == []


def test_labels_come_from_the_generator_alone(tiny_llama: Path) -> None:
    torch.manual_seed(1)
    first = streamed_sums(tiny_llama)[0]
    state = torch.get_rng_state()
    torch.manual_seed(2)
    again = streamed_sums(tiny_llama)[0]
    assert all(torch.equal(first[site], again[site]) for site in first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state), "the global random state was used"
    other = streamed_sums(tiny_llama, seed=6)[0]
    assert not any(torch.equal(first[site], other[site]) for site in first)


def test_the_input_of_a_layer_can_be_observed_before_its_gradients(tiny_llama: Path) -> None:
    model = StreamedModel(open_checkpoint(tiny_llama))
    seen: list[tuple[int, torch.Tensor]] = []
    order: list[int] = []

    def before(run: StreamedPass, index: int) -> None:
        seen.append((index, run.hidden.clone()))
        assert not any(parameter.is_meta for parameter in model.layers[index].parameters())

    modules = [site.module for site in model.layout.sites]
    generator = torch.Generator()
    list(
        backward(
            model,
            TOKENS,
            lambda site: order.append(site.layer),
            generator=generator,
            modules=modules,
            before_layer=before,
        )
    )
    run = model.begin(TOKENS)
    assert [index for index, _ in seen] == [1, 0] and order == sorted(order, reverse=True)
    assert torch.equal(seen[1][1], run.hidden)


def test_gradients_that_are_not_finite_name_their_layer(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = StreamedModel(open_checkpoint(tiny_llama))
    load = StreamedModel.load_layer

    def broken(self: StreamedModel, index: int) -> nn.Module:
        layer = load(self, index)
        layer.mlp.down_proj.weight.data[0, 0] = torch.inf if index == 1 else 0
        return layer

    monkeypatch.setattr(StreamedModel, "load_layer", broken)
    with pytest.raises(NumericsError, match="layer 1: the output is not finite"):
        list(backward(model, TOKENS, lambda site: None, generator=torch.Generator(), modules=[]))
