"""Compare another loader's logits with ours, in whatever environment this runs.

    python scripts/check_loaders.py expect CHECKPOINT expected.pt     (environment with quantforge)
    python scripts/check_loaders.py load CHECKPOINT expected.pt       (environment with transformers and a loader)

`expect` computes float32 logits of our own dequantized model for a fixed text; `load` opens the checkpoint with
AutoModelForCausalLM.from_pretrained in float32 and prints the largest difference; it exits 1 above 1e-3.
"""

import sys

import torch

TEXT = (
    "The art of measuring begins with knowing what was measured. A model that has been rounded to four bits is a "
    "different model; how different is a question that only numbers answer, and only if the files say the same thing "
    "to everyone who reads them."
)
LIMIT = 1e-3


def expect(checkpoint: str, file: str) -> None:
    from pathlib import Path

    from quantforge.model.activations import stored_activations
    from quantforge.model.packed import open_any
    from quantforge.model.streamed import StreamedModel
    from quantforge.model.tokenizer import load_tokenizer

    tokens = load_tokenizer(Path(checkpoint))(TEXT, return_tensors="pt").input_ids
    streamed = StreamedModel(open_any(checkpoint))
    with stored_activations(streamed):
        run = streamed.begin(tokens)
        run.run_all()
        torch.save({"tokens": tokens, "logits": run.logits(0)}, file)


def load(checkpoint: str, file: str) -> None:
    from transformers import AutoModelForCausalLM

    expected = torch.load(file)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, device_map="cpu").eval()
    kinds = sorted({type(module).__name__ for module in model.modules() if "Linear" in type(module).__name__})
    with torch.no_grad():
        logits = model(expected["tokens"], use_cache=False).logits[0].float()
    difference = float((logits - expected["logits"]).abs().max())
    agree = bool((logits.argmax(-1) == expected["logits"].argmax(-1)).all())
    print(f"{checkpoint}: modules {kinds}; largest logit difference {difference:.2e}; same argmax everywhere: {agree}")
    sys.exit(difference > LIMIT)


if __name__ == "__main__":
    {"expect": expect, "load": load}[sys.argv[1]](sys.argv[2], sys.argv[3])
