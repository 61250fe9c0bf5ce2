"""Pairs are found by probing on many architectures, folds preserve what a model computes, wrong pairs are refused."""

from pathlib import Path

import pytest
import torch
from test_architectures import build
from torch import Tensor, nn

from quantforge.model.folds import Factor, Pair, fold, prove, replaced
from quantforge.model.pairs import find_pairs
from quantforge.model.source import open_checkpoint
from quantforge.model.streamed import LayerCall, StreamedModel

TOKENS = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(1))

# producer > readers of one decoder layer, the last parts of their names; + marks a gain of 1 + weight
QKV = "input_layernorm > q_proj k_proj v_proj"
LLAMA = {QKV, "v_proj > o_proj", "post_attention_layernorm > gate_proj up_proj", "up_proj > down_proj"}
GEMMA = {
    "input_layernorm+ > q_proj k_proj v_proj",
    "v_proj > o_proj",
    "pre_feedforward_layernorm+ > gate_proj up_proj",
    "up_proj > down_proj",
}
FUSED = {
    "input_layernorm > query_key_value",
    "query_key_value > dense",
    "post_attention_layernorm > dense_h_to_4h",
}
MOE = {QKV, "v_proj > o_proj", "post_attention_layernorm > gate experts"}
EXPECTED = {
    "llama": LLAMA,
    "qwen2": LLAMA,  # biases
    "qwen3": LLAMA,  # norms of queries and keys, which nothing can be folded into
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gpt2": {"ln_1 > c_attn", "c_attn > c_proj", "ln_2 > c_fc"},  # Conv1D; the third third of c_attn
    "phi3": {
        "input_layernorm > qkv_proj",
        "qkv_proj > o_proj",
        "post_attention_layernorm > gate_up_proj",
        "gate_up_proj > down_proj",
    },
    "gpt_neox": FUSED,  # queries, keys and values interleaved by head
    "bloom": FUSED,
    "falcon": {"input_layernorm > query_key_value dense_h_to_4h", "query_key_value > dense"},  # one value head for all
    "phi": {"input_layernorm > q_proj k_proj v_proj fc1", "v_proj > dense"},
    "cohere": {
        "input_layernorm > q_proj k_proj v_proj gate_proj up_proj",
        "v_proj > o_proj",
        "up_proj > down_proj",
    },
    "opt": {
        "self_attn_layer_norm > q_proj k_proj v_proj",
        "v_proj > out_proj",
        "final_layer_norm > fc1",
        "fc1 > fc2",  # through relu, which lets positive scales pass
    },
    "olmo": {"v_proj > o_proj", "up_proj > down_proj"},  # norms without parameters
    "olmo2": {"v_proj > o_proj", "up_proj > down_proj"},  # norms behind the matrices
    "nemotron": {  # squared relu between up and down
        "input_layernorm+ > q_proj k_proj v_proj",
        "v_proj > o_proj",
        "post_attention_layernorm+ > up_proj",
    },
    "mixtral": MOE,
    "qwen3_moe": MOE,
    "qwen2_moe": {
        QKV,
        "v_proj > o_proj",
        "post_attention_layernorm > gate_proj up_proj gate experts shared_expert_gate",
        "up_proj > down_proj",
    },
    "gpt_oss": {QKV, "v_proj > o_proj", "post_attention_layernorm > router experts"},  # experts [experts, in, out]
    "deepseek_v3": {
        "input_layernorm > q_a_proj kv_a_proj_with_mqa",
        "q_a_layernorm > q_b_proj",
        "kv_a_layernorm > kv_b_proj",
        "post_attention_layernorm > gate experts gate_proj up_proj",
        "up_proj > down_proj",
    },
}


def label(pair: Pair) -> str:
    plus = "" if pair.exact_gain else "+"
    consumers = " ".join(name.rpartition(".")[2] for name in pair.consumers)
    return f"{pair.producer.module.rpartition('.')[2]}{plus} > {consumers}"


def random_scale(pair: Pair, seed: int) -> Tensor:
    """Between 1/3 and 3, one value for each channel of the producer."""
    values = torch.rand(1 + int(pair.channels.max()), generator=torch.Generator().manual_seed(seed))
    scale: Tensor = 3 ** (2 * values - 1)
    return scale[pair.channels]


def logits(model: Path, *, folded: bool) -> tuple[Tensor, list[list[Pair]]]:
    """Logits of TOKENS and, when every pair of every layer is folded at random, the pairs of each layer."""
    streamed = StreamedModel(open_checkpoint(model))
    run = streamed.begin(TOKENS)
    found: list[list[Pair]] = []
    for index in range(len(streamed.layers)):
        layer = streamed.load_layer(index)
        if folded:
            call, hidden = next(run.batches(index))
            found.append(find_pairs(layer, call, hidden))
            for number, pair in enumerate(found[-1]):
                result = fold(layer, pair, random_scale(pair, number), {})
                for name, tensor in result.tensors.items():
                    before = layer.get_parameter(name).data
                    assert not torch.equal(before, tensor), name
                    before.copy_(tensor)
        run.advance(index)
        streamed.drop_layer(index)
    return torch.stack([run.logits(sample) for sample in range(len(TOKENS))]), found


@pytest.mark.parametrize("name", EXPECTED)
def test_every_pair_is_found_and_folding_all_of_them_leaves_the_logits_alone(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    expected, _ = logits(tmp_path, folded=False)
    got, pairs = logits(tmp_path, folded=True)
    assert float((got - expected).norm() / expected.norm()) < 1e-5
    assert {label(pair) for pair in pairs[-1]} == EXPECTED[name]
    assert all(len(layer) == len({label(pair) for pair in layer}) for layer in pairs)


# ------------------------------------------------------------------------------------------------ one small layer


class Attention(nn.Module):
    """Causal attention of 4 query and 2 value heads of 4 channels; `between` lies before the output matrix."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.q, self.k, self.v, self.o = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 16)
        self.gate = nn.Linear(16, 16)
        self.between = between

    def forward(self, hidden: Tensor) -> Tensor:
        x = self.norm(hidden)
        heads = [t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x))]
        keys, values = (t.repeat_interleave(2, dim=1) for t in heads[1:])
        mixed = nn.functional.scaled_dot_product_attention(heads[0], keys, values, is_causal=True)
        mixed = mixed.transpose(1, 2).flatten(2)
        if self.between == "tanh":
            mixed = torch.tanh(mixed)
        elif self.between == "norm":
            mixed = nn.functional.rms_norm(mixed, (16,))
        elif self.between == "own gate":
            mixed = mixed * torch.sigmoid(mixed)
        elif self.between == "another gate":
            mixed = mixed * torch.sigmoid(self.gate(x))
        residual = x if self.between == "residual of the normed" else hidden
        result: Tensor = residual + self.o(mixed)
        return result


CALL = LayerCall((None,), {}, 0)


def attention(between: str) -> tuple[Attention, Tensor]:
    layer = Attention(between).eval().requires_grad_(False)
    layer.norm.weight.data.uniform_(0.5, 2)
    return layer, torch.randn(2, 6, 16)


VALUES = torch.arange(8).reshape(2, 4).repeat_interleave(2, dim=0).flatten()
V_TO_O = Pair(Factor("v", "weight", 0), ("v.bias",), (Factor("o", "weight", 1),), VALUES)


@pytest.mark.parametrize("between", ["nothing", "another gate"])
def test_values_are_folded_into_the_output_matrix_head_by_head(between: str) -> None:
    layer, hidden = attention(between)
    assert prove(layer, CALL, hidden, V_TO_O) is None
    (found,) = [pair for pair in find_pairs(layer, CALL, hidden) if pair.producer.module == "v"]
    assert torch.equal(found.channels, VALUES)
    assert (found.biases, found.reads) == (V_TO_O.biases, V_TO_O.reads)


@pytest.mark.parametrize("between", ["tanh", "norm", "own gate"])
def test_values_are_not_folded_through_what_is_not_linear(between: str) -> None:
    layer, hidden = attention(between)
    assert "the input of o is not what v was scaled to" in str(prove(layer, CALL, hidden, V_TO_O))
    assert [pair.producer.module for pair in find_pairs(layer, CALL, hidden)] == ["norm"]


def test_a_pair_with_a_reader_missing_is_refused() -> None:
    layer, hidden = attention("another gate")
    reads = tuple(Factor(name, "weight", 1) for name in ("q", "k", "v", "gate"))
    norm = Factor("norm", "weight", 0)
    assert prove(layer, CALL, hidden, Pair(norm, (), reads, torch.arange(16))) is None
    for left_out in range(4):
        some = tuple(read for place, read in enumerate(reads) if place != left_out)
        assert "output changes by" in str(prove(layer, CALL, hidden, Pair(norm, (), some, torch.arange(16))))


def test_a_norm_whose_output_also_goes_past_its_readers_is_refused() -> None:
    layer, hidden = attention("residual of the normed")
    assert [pair.producer.module for pair in find_pairs(layer, CALL, hidden)] == ["v"]


def test_a_wrong_order_of_heads_is_refused() -> None:
    layer, hidden = attention("nothing")
    wrong = Pair(V_TO_O.producer, V_TO_O.biases, V_TO_O.reads, torch.arange(8).repeat(2))
    assert "the input of o is not what v was scaled to" in str(prove(layer, CALL, hidden, wrong))


def test_a_forgotten_bias_is_refused() -> None:
    layer, hidden = attention("nothing")
    assert prove(layer, CALL, hidden, Pair(V_TO_O.producer, (), V_TO_O.reads, VALUES)) is not None


def test_a_gain_taken_for_one_plus_weight_is_refused() -> None:
    layer, hidden = attention("nothing")
    reads = tuple(Factor(name, "weight", 1) for name in "qkv")
    right, wrong = (Pair(Factor("norm", "weight", 0, offset), (), reads, torch.arange(16)) for offset in (0.0, 1.0))
    assert prove(layer, CALL, hidden, right) is None
    assert prove(layer, CALL, hidden, wrong) is not None


def test_finding_and_proving_leave_the_layer_as_it_was() -> None:
    layer, hidden = attention("nothing")
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    assert find_pairs(layer, CALL, hidden)
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())


# ------------------------------------------------------------------------------------------------ folding


def test_a_scale_of_one_changes_no_bit() -> None:
    layer, _ = attention("nothing")
    result = fold(layer, V_TO_O, torch.ones(16), {"v.bias": torch.bfloat16})
    assert torch.equal(result.tensors["v.weight"], layer.v.weight)
    assert torch.equal(result.tensors["o.weight"], layer.o.weight)
    assert torch.equal(result.scale, torch.ones(16))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_is_rounded_to_its_stored_dtype_and_the_scale_follows(offset: float) -> None:
    layer, _ = attention("nothing")
    layer.norm.weight.data.copy_(layer.norm.weight.bfloat16().float())
    pair = Pair(Factor("norm", "weight", 0, offset), (), (Factor("q", "weight", 1),), torch.arange(16))
    asked = 3 ** (2 * torch.rand(16) - 1)
    result = fold(layer, pair, asked, {"norm.weight": torch.bfloat16})
    new = result.tensors["norm.weight"]
    assert torch.equal(new, new.bfloat16().float())
    assert torch.allclose(result.scale, asked, rtol=2**-7) and not torch.equal(result.scale, asked)
    gain_before, gain_after = layer.norm.weight.double() + offset, new.double() + offset
    assert torch.allclose(result.scale.double() * gain_after, gain_before, rtol=1e-6)
    assert torch.equal(result.tensors["q.weight"], layer.q.weight * (gain_before / gain_after).float())


def test_channels_without_gain_or_whose_gain_would_vanish_keep_a_scale_of_one() -> None:
    layer, _ = attention("nothing")
    layer.norm.weight.data[3] = 0.0
    layer.norm.weight.data[5] = 2.0**-24
    pair = Pair(Factor("norm", "weight", 0), (), (Factor("q", "weight", 1),), torch.arange(16))
    result = fold(layer, pair, torch.full((16,), 4.0), {"norm.weight": torch.float16})
    assert result.scale[3] == 1 and result.scale[5] == 1
    assert (result.scale == 1).sum() == 2
    assert torch.equal(result.tensors["norm.weight"][[3, 5]], layer.norm.weight[[3, 5]])
    assert torch.isfinite(result.tensors["q.weight"]).all()


def test_replaced_parameters_come_back_also_after_an_error() -> None:
    layer, _ = attention("nothing")
    before = layer.v.weight.clone()
    with pytest.raises(ZeroDivisionError), replaced(layer, {"v.weight": torch.zeros(8, 16)}):
        assert not layer.v.weight.any()
        raise ZeroDivisionError
    assert torch.equal(layer.v.weight, before)
