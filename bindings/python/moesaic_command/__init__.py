"""The program `moesaic`. Beside the package and not in it: a wrong environment variable keeps the package from being
imported, and the command line should still say so in one line."""

import sys


def main() -> int:
    """Runs `moesaic.cli` and returns its exit code, or 2 where a variable of the environment is wrong."""
    try:
        from moesaic.cli import main as run
    except ValueError as error:
        if not str(error).startswith("MOESAIC_"):
            raise
        print(f"moesaic: {error}", file=sys.stderr)
        return 2
    return run()
