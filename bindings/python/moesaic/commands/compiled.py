"""torch.compile as a peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moesaic.commands.output import first_line
from moesaic.commands.variants import UnavailableError


def compile_for(function: Callable[..., Any], *example: torch.Tensor, **how: Any) -> Callable[..., Any]:
    """`function` through torch.compile, compiled for the shapes of `example`. What was compiled before is forgotten: a
    piece of code has eight compilations at most, and of a ninth shape PyTorch would run it as it is, with a warning.

    Args:
        function: of tensors; of the same code for other shapes, too.
        example: its arguments.
        how: what torch.compile takes.

    Raises:
        UnavailableError: the compiler is missing or fails.
    """
    torch.compiler.reset()
    compiled: Callable[..., Any] = torch.compile(function, **how)
    try:
        compiled(*example)
    except Exception as error:  # whatever its compiler finds
        raise UnavailableError(f"torch.compile failed: {first_line(error)[:120]}") from error
    return compiled
