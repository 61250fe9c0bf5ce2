"""`verify` on checkpoints that GPTQModel, llm-compressor and AutoRound wrote, also against their float source.

The checkpoints are not part of the project: the environment variable QUANTFORGE_SHARED names the folder that has them.
"""

import pytest
from random_grids import shared_folder

from quantforge.pipeline.examine import examine

FOREIGN = shared_folder() / "foreign"
pytestmark = pytest.mark.skipif(
    not (FOREIGN / "source").is_dir(), reason=f"no foreign checkpoints in {FOREIGN}; set QUANTFORGE_SHARED"
)

FOUR_BITS = [
    "gptqmodel-gptq-sym", "gptqmodel-gptq-asym", "gptqmodel-gptq-sym-descact", "autoround-auto_gptq",
    "autoround-auto_round", "llmcompressor-gptq-sym", "llmcompressor-gptq-asym", "llmcompressor-rtn-asym",
]  # fmt: skip


@pytest.mark.parametrize("name", FOUR_BITS)
def test_checkpoints_of_other_tools_are_sound_and_close_to_their_source(name: str) -> None:
    examination = examine(FOREIGN / name, FOREIGN / "source")
    assert examination.ok and examination.sites == 14
    # written without a tokenizer, and what was kept is stored in float32
    assert {finding.code for finding in examination.findings} == {"tokenizer-missing", "dtype-changed"}
    assert max(examination.errors_by_site.values()) < 0.15


def test_smoothed_weights_of_another_tool_are_told_apart_from_changed_ones() -> None:
    examination = examine(FOREIGN / "llmcompressor-w8a8", FOREIGN / "source")
    assert examination.ok
    folded = {finding.where for finding in examination.findings if finding.code == "folded"}
    layers = ("model.layers.0", "model.layers.1")
    norms = {f"{layer}.{norm}_layernorm.weight" for layer in layers for norm in ("input", "post_attention")}
    leaves = ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    assert folded == norms | {f"{layer}.{leaf}_proj" for layer in layers for leaf in leaves}
    assert max(examination.errors_by_site.values()) < 0.02


def test_the_version_of_asymmetric_zeros_of_another_tool_is_inferred() -> None:
    notes = examine(FOREIGN / "gptqmodel-gptq-asym").notes
    assert any("checkpoint_format gptq agrees with the zeros" in note for note in notes)


def test_a_float_checkpoint_has_only_a_remark_on_its_tokenizer() -> None:
    examination = examine(FOREIGN / "source")
    assert examination.ok and {finding.code for finding in examination.findings} <= {"tokenizer-class"}
