"""A checkpoint run as its config says that it is served: whatever is rounded while a model runs, rounded."""

from collections.abc import Iterator
from contextlib import contextmanager

from quantforge.model.activations import stored_activations
from quantforge.model.kv_cache import stored_cache
from quantforge.model.streamed import StreamedModel


@contextmanager
def as_stored(streamed: StreamedModel) -> Iterator[tuple[str | None, str | None]]:
    """While this is open, inputs of sites, keys and values are rounded where the checkpoint asks for it.

    Everything that scores a checkpoint runs it inside. Yields what is done to activations and to the cache, in words,
    None where nothing is. Raises SourceError as `stored_activations` and `stored_cache` do.
    """
    with stored_activations(streamed) as activations, stored_cache(streamed) as cache:
        yield activations, cache
