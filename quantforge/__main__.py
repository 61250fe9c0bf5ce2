"""``python -m quantforge`` is the ``quantforge`` command."""

import sys

from quantforge.cli import main

sys.exit(main())
