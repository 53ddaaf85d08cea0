"""Makes methods of calls, so that their arguments and docstrings are written once for both clients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_args, get_type_hints

from longtail.client.calls import Call

Method = TypeVar("Method", bound=Callable[..., Any])


def described_as(build: Callable[..., Call[Any]], method: Method, owner: str) -> Method:
    """`method` with the name, docstring and signature of `build`, as `help` shows them.

    Args:
        build: a function of `calls`.
        method: takes `self` and the arguments of `build`.
        owner: the class it is a method of.
    """
    signature = inspect.signature(build)
    (answer,) = get_args(get_type_hints(build)["return"])
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [itself, *signature.parameters.values()]
    described: Any = method
    described.__signature__ = signature.replace(parameters=parameters, return_annotation=answer)
    described.__name__ = build.__name__
    described.__qualname__ = f"{owner}.{build.__name__}"
    described.__doc__ = build.__doc__
    return method
