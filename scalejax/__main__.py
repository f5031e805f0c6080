"""`python -m scalejax` is `scalejax`."""

import sys

from scalejax.cli.main import main

sys.exit(main())
