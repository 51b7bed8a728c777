"""What holds for all tests of pipes."""

from __future__ import annotations

import os

# On some machines what oneDNN finds of bfloat16 is not there to use: set before torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
