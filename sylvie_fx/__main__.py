"""``python -m sylvie_fx``: the command line."""

import sys

from sylvie_fx.cli import main

if __name__ == "__main__":
    sys.exit(main())
