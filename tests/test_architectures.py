"""The streamed forward and the layout, over many architectures, on tiny random models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quantforge.model import streamed as streamed_module
from quantforge.model.source import open_checkpoint
from quantforge.model.streamed import StreamedModel
from quantforge.pipeline.obstacles import misfits

LAYERS = 4
COMMON = dict(
    hidden_size=64,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    vocab_size=128,
    max_position_embeddings=128,
    head_dim=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
NO_HEAD_DIM = {key: value for key, value in COMMON.items() if key != "head_dim"}
GPT = dict(n_embd=64, n_layer=LAYERS, n_head=4, vocab_size=128, n_positions=128)
SLIDING_WINDOW = 8  # shorter than the sequences below, so that a wrong mask shows
CONFIGS: dict[str, dict[str, Any]] = {
    name: COMMON
    for name in (
        "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi3 olmo olmo2 cohere cohere2 granite starcoder2 stablelm "
        "smollm3 glm glm4 exaone4 nemotron"
    ).split()
}
CONFIGS |= {
    "phi": COMMON | {"num_key_value_heads": 4},
    "gpt2": GPT,
    "gptj": GPT | {"rotary_dim": 8},
    "opt": dict(
        hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, ffn_dim=96, vocab_size=128,
        word_embed_proj_dim=32, max_position_embeddings=128,
    ),
    "gpt_neox": NO_HEAD_DIM,
    "gpt_neo": dict(
        hidden_size=64, num_layers=LAYERS, num_heads=4, vocab_size=128, max_position_embeddings=128,
        intermediate_size=96,
        attention_types=[[["global", "local"], LAYERS // 2]], window_size=SLIDING_WINDOW,
    ),
    "bloom": dict(hidden_size=64, n_layer=LAYERS, n_head=4, vocab_size=128),
    "falcon": dict(hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, vocab_size=128),
    "mpt": dict(d_model=64, n_layers=LAYERS, n_heads=4, vocab_size=128, max_seq_len=128),
    "mixtral": COMMON | dict(num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": COMMON | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "qwen2_moe": COMMON
    | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32),
    "gpt_oss": COMMON | dict(num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": NO_HEAD_DIM
    | dict(
        q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, n_group=1, topk_group=1, first_k_dense_replace=1,
        n_shared_experts=1, num_key_value_heads=4,
    ),
}  # fmt: skip
EXPERTS = {"mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss", "deepseek_v3"}


def build(name: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, **CONFIGS[name])
    if getattr(config, "sliding_window", None):
        config.sliding_window = SLIDING_WINDOW
    generator = torch.Generator().manual_seed(7)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # make norms and biases matter
            parameter.data.add_(0.3 * torch.rand(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_streamed_logits_are_bit_identical_and_every_matrix_is_accounted_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed_module, "TOKENS_PER_BATCH", 48)  # two batches, the last one smaller
    model = build(name)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    tokens = torch.randint(3, 128, (3, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = torch.cat([model(batch, use_cache=False).logits for batch in tokens.split(2)])

    streamed = StreamedModel(open_checkpoint(tmp_path))
    run = streamed.begin(tokens)
    run.run_all()
    # the head runs on one sequence at a time, so compare it with the plain model's on that sequence's hidden states
    final = run.hidden
    for sample in range(len(tokens)):
        assert torch.allclose(run.logits(sample), expected[sample], rtol=0, atol=2e-6), name
    with torch.no_grad():
        decoder_out: list[torch.Tensor] = []
        last = model.get_submodule(streamed.layout.stack)[-1]  # type: ignore[index]
        hook = last.register_forward_hook(
            lambda _m, _a, out: decoder_out.append(out[0] if isinstance(out, tuple) else out)
        )
        for batch in tokens.split(2):
            model(batch, use_cache=False)
        hook.remove()
    assert torch.equal(final, torch.cat(decoder_out)), "streamed hidden states differ from the plain forward"

    layout = streamed.layout
    listed = {f"{site.module}.weight" for site in layout.sites} | set(layout.kept)
    matrices = {key for key, parameter in streamed.model.named_parameters() if parameter.ndim >= 2}
    assert listed == matrices
    assert list(misfits(streamed, open_checkpoint(tmp_path))) == []
    assert layout.sites and {site.layer for site in layout.sites} == set(range(LAYERS))
    assert any("expert" in reason for reason in layout.kept.values()) == (name in EXPERTS)
    outer = sum(p.numel() for n, p in streamed.model.named_parameters() if not n.startswith(f"{layout.stack}."))
    largest = max(sum(p.numel() for p in layer.parameters()) for layer in streamed.layers)
    assert streamed.peak_elements <= outer + largest
