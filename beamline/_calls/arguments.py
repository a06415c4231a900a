"""What is said to whoever calls with an argument that is not known."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def names_what_it_knows(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Python would name the function that has the arguments, which may be one of a base class, and none of them."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @wraps(function)
    def checked(*args: Arguments.args, **given: Arguments.kwargs) -> Result:
        for name in given:
            if name not in known:
                called = type(args[0]).__name__ if function.__name__ == "__init__" else function.__name__
                raise TypeError(f"{called}() got an unexpected keyword argument {name!r}; it knows {', '.join(known)}")
        return function(*args, **given)

    return checked
