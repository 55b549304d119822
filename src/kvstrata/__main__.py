"""`python -m kvstrata`: the same command line as the `kvstrata` script."""

import sys

from kvstrata.cli.app import main

sys.exit(main())
