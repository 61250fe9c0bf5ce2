"""Calibration tokens that a model samples from itself: no data needed, but the whole model in memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quantforge.errors import SourceError

SEQUENCES_AT_ONCE = 32


def sample_sequences(
    path: Path,
    nsamples: int,
    seqlen: int,
    *,
    device: str = "cpu",
    seed: int = 0,
    trust_remote_code: bool = False,
    progress: Callable[[int, int], None] = lambda done, steps: None,
) -> torch.Tensor:
    """Tokens int64 [nsamples, seqlen] by plain ancestral sampling at temperature 1, never ending early.

    Each sequence begins with a token drawn uniformly from the vocabulary, as in LLM-QAT (arXiv 2305.17888). The same
    seed gives the same tokens, and the global random state is left as it was. `progress` is called after each token of
    some sequences, with how many such steps are done, of how many.
    """
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=torch.float32 if device == "cpu" else "auto",
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise SourceError(f"{path}: the model cannot be loaded whole, which --dataset self needs: {error}") from error
    model.to(device).eval()
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    parts: list[torch.Tensor] = []
    steps = -(-nsamples // SEQUENCES_AT_ONCE) * (seqlen - 1)

    def told(tokens: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """In the place of a criterion to stop, which never holds."""
        progress(len(parts) * (seqlen - 1) + tokens.shape[1] - 1, steps)
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for start in range(0, nsamples, SEQUENCES_AT_ONCE):
            count = min(SEQUENCES_AT_ONCE, nsamples - start)
            first = torch.randint(0, vocabulary, (count, 1), device=device)
            tokens = model.generate(
                first,
                attention_mask=torch.ones_like(first),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=seqlen - 1,
                min_new_tokens=seqlen - 1,
                stopping_criteria=[told],
            )
            parts.append(tokens.cpu())
    return torch.cat(parts)
