"""Raises ImportError in any interpreter of a process but the main one: threads and PyTorch exist once in a process."""

import importlib
import sys

_interpreters = importlib.import_module("_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters")
if _interpreters.get_current() != _interpreters.get_main():
    raise ImportError("moesaic runs in the main interpreter only, not in others of the same process")
