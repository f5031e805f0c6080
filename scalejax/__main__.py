"""`python -m scalejax` is `scalejax`."""

import sys

from scalejax.cli import main

sys.exit(main())
