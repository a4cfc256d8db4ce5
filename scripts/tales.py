#!/usr/bin/env python3
"""Makes the bundled model `tales`; the work is in scripts/workbook/tales/.  Try: python3 scripts/tales.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from workbook.tales.cli import main

if __name__ == "__main__":
    sys.exit(main())
