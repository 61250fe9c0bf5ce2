"""Text from a model, token after token, with the time that it took."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from quantforge.errors import SourceError, UsageError


@dataclass(frozen=True)
class Generated:
    """What came of a prompt.

    Attributes:
        prefill_seconds: until the first new token was there.
        decode_seconds: for all others.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def decode_tokens_per_second(self) -> float | None:
        """None for less than two new tokens."""
        return (self.new_tokens - 1) / self.decode_seconds if self.new_tokens > 1 else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "prefill_tokens_per_second": self.prompt_tokens / self.prefill_seconds,
            "decode_tokens_per_second": self.decode_tokens_per_second,
        }


class _Stream:
    """transformers' streamer: told of the prompt, then of each token; passes on text as soon as it is whole."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.times = [time.perf_counter()]
        self.tokens: list[int] = []
        self.shown = ""
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:
            self._prompt = False
            return
        self.times.append(time.perf_counter())
        self.tokens += value.reshape(-1).tolist()
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # half a character
            self._show(text)

    def end(self) -> None:
        self._show(self.tokenizer.decode(self.tokens, skip_special_tokens=True))

    def _show(self, text: str) -> None:
        if len(text) > len(self.shown):
            self.write(text[len(self.shown) :])
            self.shown = text


def prompt_tokens(tokenizer: Any, prompt: str, *, chat: bool) -> torch.Tensor:
    """int64 [1, tokens]: the prompt as a user's turn where the tokenizer has a chat template and `chat` is set."""
    if chat and getattr(tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    else:
        ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise UsageError("the prompt is empty, and the tokenizer starts no text with a token of its own")
    return torch.tensor([ids], dtype=torch.int64)


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool = True,
    write: Callable[[str], None] = lambda text: None,
) -> Generated:
    """Continue a prompt until the model ends it or `max_new_tokens` are there; `write` is called with text as it comes.

    Args:
        temperature: 0 takes the likeliest token each time; above, tokens are drawn, by a generator that `seed` starts.
        chat: put the prompt into the tokenizer's chat template, if it has one.

    Raises:
        UsageError: nothing to continue.
        SourceError: a tokenizer of another model.
    """
    tokens = prompt_tokens(tokenizer, prompt, chat=chat).to(model.device)
    known, largest = model.get_input_embeddings().num_embeddings, int(tokens.max())
    if largest >= known:
        raise SourceError(f"the tokenizer makes token {largest} of the prompt, and the model has {known}: another's?")
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature}
    if temperature <= 0:
        sampling = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    torch.manual_seed(seed)
    stream = _Stream(tokenizer, write)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with torch.inference_mode():
        model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_new_tokens,
            streamer=stream,
            pad_token_id=pad,
            **sampling,
        )
    first = stream.times[min(1, len(stream.times) - 1)]
    return Generated(
        text=stream.shown,
        prompt_tokens=tokens.shape[1],
        new_tokens=len(stream.tokens),
        prefill_seconds=first - stream.times[0],
        decode_seconds=stream.times[-1] - first,
    )
