"""What every side is asked: the same short questions, greedily answered."""

from __future__ import annotations

import os
from typing import Any

THINGS = [
    *("river", "stone", "cloud", "bread", "clock", "train", "garden", "bridge"),
    *("winter", "music", "letter", "market", "island", "candle", "window", "forest"),
    *("mirror", "ladder", "hammer", "pillow", "basket", "anchor", "feather", "lantern"),
    *("compass", "saddle", "violin", "kettle", "ribbon", "button", "carpet", "tunnel"),
]
PROMPTS = [f"Tell me one short fact about a {thing}, please." for thing in THINGS]
if "PENSTOCK_X_PROMPTS" in os.environ:  # a test needs only to see that it works
    PROMPTS = PROMPTS[: int(os.environ["PENSTOCK_X_PROMPTS"])]
TOKENS = 16
THREADS = os.cpu_count() or 1
SLOTS = 8


def body(prompt: str, tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        **more,
    }
