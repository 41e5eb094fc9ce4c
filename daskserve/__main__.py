"""``python -m daskserve``."""

from __future__ import annotations

from daskserve.cli.main import main

if __name__ == "__main__":
    main(prog_name="daskserve")
