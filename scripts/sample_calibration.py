"""Write text that a model samples from itself, for calibrating it without any data.

    python scripts/sample_calibration.py MODEL OUT.txt [--sequences 80] [--tokens 512] [--seed 0]

Plain ancestral sampling at temperature 1, each sequence started by one token drawn uniformly from the vocabulary.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--sequences", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    start = torch.randint(0, model.config.vocab_size, (args.sequences, 1))
    with torch.no_grad():
        tokens = model.generate(
            start, attention_mask=torch.ones_like(start), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=args.tokens, min_new_tokens=args.tokens,
        )  # fmt: skip
    args.out.write_text("\n\n".join(tokenizer.decode(row, skip_special_tokens=True) for row in tokens))


if __name__ == "__main__":
    main()
