"""The ``…_async`` names that the seeds' clients have, generated from the methods themselves."""

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

C = TypeVar("C")


def with_async(*names: str) -> Callable[[type[C]], type[C]]:
    """Class decorator: for each method ``x`` add a coroutine method ``x_async``.

    ``await client.x_async(...)`` gives what ``client.x(...)`` gives, a future where that is one.  A
    method that makes a client may have to wait for the model: it runs on a thread of its own, so
    that the event loop goes on.

    Args:
        names: the methods, each with ``!`` behind it if it waits.
    """

    def decorate(cls: type[C]) -> type[C]:
        for name in names:
            method = getattr(cls, name.removesuffix("!"))
            setattr(cls, f"{method.__name__}_async", _twin(method, waits=name.endswith("!")))
        return cls

    return decorate


def _twin(method: Callable[..., Any], *, waits: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    async def twin(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (those of the method)
        if waits:
            return await asyncio.to_thread(method, *args, **kwargs)
        return method(*args, **kwargs)

    twin.__name__ = f"{method.__name__}_async"
    twin.__qualname__ = f"{method.__qualname__}_async"
    twin.__doc__ = f"As :meth:`{method.__name__}`, to be awaited."
    setattr(twin, "__signature__", inspect.signature(method))  # noqa: B010 (not in the type)
    return twin
