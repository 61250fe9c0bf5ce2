"""Names that other tools use for settings of a recipe, and what is said of those that have no counterpart.

The same table serves recipes and the command line, where `q_group_size` is ``--q-group-size``.
"""

from dataclasses import dataclass
from typing import Any

from quantforge.errors import UsageError

OptionValue = bool | int | float | str


@dataclass(frozen=True)
class Synonym:
    """Another name for `target` (dotted).

    `values` rewrites the values that mean something else there; `refused` has the values that nothing stands for, each
    with what is said of it.
    """

    target: str
    values: tuple[tuple[OptionValue | None, OptionValue], ...] = ()
    refused: tuple[tuple[OptionValue, str], ...] = ()

    def convert(self, value: Any) -> Any:
        """`value` in the target's terms; raises UsageError when nothing stands for it."""
        for refused, answer in self.refused:
            if type(value) is type(refused) and value == refused:
                raise UsageError(answer)
        for source, result in self.values:
            if type(value) is type(source) and value == source:
                return result
        return value


_INVERSE = ((True, False), (False, True))
_CONTIGUOUS = "groups are always runs of neighbouring columns here, whatever the order of solving"
_ORDERS = Synonym(
    "options.act_order",
    values=(("static", True), ("weight", True), (None, False)),
    refused=tuple((name, f"{_CONTIGUOUS}; `static` is the order that does so") for name in ("group", "dynamic")),
)

SYNONYMS = {
    **dict.fromkeys(("wbits", "w_bit", "w_bits", "num_bits"), Synonym("bits")),
    **dict.fromkeys(("groupsize", "q_group_size"), Synonym("group_size")),
    "sym": Synonym("symmetric"),
    **dict.fromkeys(("asym", "zero_point"), Synonym("symmetric", _INVERSE)),
    **dict.fromkeys(("format", "export_format"), Synonym("formats")),
    **dict.fromkeys(("output_dir", "export_path"), Synonym("output")),
    **dict.fromkeys(("modules_to_not_convert", "ignore_layers", "fp_layers", "exclude_modules"), Synonym("ignore")),
    **dict.fromkeys(("a_bits", "act_bits", "abits"), Synonym("activation_bits")),
    **dict.fromkeys(
        ("kv_cache_dtype", "kv_cache_scheme", "kv_cache_qformat", "kv_cache_quant_algo"), Synonym("kv_cache")
    ),
    **dict.fromkeys(("target_bits", "effective_bits", "target_bpw"), Synonym("avg_bits")),
    "qformat": Synonym("scheme"),
    "true_sequential": Synonym("sequential", ((True, "group"), (False, "layer"))),
    **dict.fromkeys(("damping", "damp", "percdamp", "damp_percent", "dampening_frac"), Synonym("options.damping")),
    **dict.fromkeys(("act_order", "desc_act", "actorder"), _ORDERS),
    **dict.fromkeys(("block_size", "blocksize"), Synonym("options.block_size")),
    **dict.fromkeys(("num_calibration_samples", "calib_size"), Synonym("calibration.nsamples")),
    **dict.fromkeys(("max_seq_length", "calib_seq"), Synonym("calibration.seqlen")),
    **{
        name: Synonym(f"calibration.{name}")
        for name in ("dataset", "subset", "split", "column", "nsamples", "seqlen", "bos")
    },
}

SWITCHES = {
    "--zero-point": ("--asym",),
    "--no-zero-point": ("--sym",),
    "--true-sequential": ("--sequential", "group"),
    "--desc-act": ("--act-order",),
}
"""Flags without a value, and the flags they stand for."""

_MEMORY = (
    "only one decoder layer is in memory at a time, so there is nothing to offload; `device` says where it is solved"
)
_RULES = "say it with `rules`, such as {match: '*.down_proj', bits: 8}"
_HEAD = "the output head stays in floating point"
_DAMPING = "damping is raised without being asked where it does not do; `damping` is where it begins"
_RESUME = "a run that was stopped is carried on by the same command"

WITHOUT_COUNTERPART = {
    **dict.fromkeys(("damp_auto_increment", "auto_increment"), _DAMPING),
    **dict.fromkeys(("static_groups", "act_group_aware"), f"{_CONTIGUOUS}; `act_order` is the order"),
    **dict.fromkeys(("lm_head", "quant_lm_head"), _HEAD),
    **dict.fromkeys(("dynamic", "config_groups", "layer_config", "tensor_type"), _RULES),
    "sequential_targets": "layers are found by looking at the model; `sequential` is layer or group",
    "iters": "`tune_epochs` is how long scales are tuned",
    "seed": "every draw has a fixed seed: the same command gives the same bytes",
    **dict.fromkeys(
        (
            "low_gpu_mem_usage",
            "low_memory_mode",
            "device_map",
            "offload_to_disk",
            "offload_folder",
            "offload_hessians",
        ),
        _MEMORY,
    ),
    **dict.fromkeys(("resume", "checkpoint_dir", "auto_quantize_checkpoint"), _RESUME),
}
"""Settings of other tools that have no counterpart here, and what a user should hear instead."""
