"""`python -m toymha`."""

import sys

from toymha.cli import main

sys.exit(main())
