"""The command line. Rooms are imported inside the commands that need them: `ckptd status` must be quick."""

from __future__ import annotations

import sys


def main() -> None:
    """Console script. A CkptdError is printed with its place and hint, and what the system refuses in its own words, exit status 1;
    wrong usage exits with 2."""
    from ckptd.cli.app import app
    from ckptd.core.errors import CkptdError

    try:
        app()
    except (CkptdError, OSError) as error:
        from ckptd.cli.show import plain

        print(plain(f"error: {error}"), file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
