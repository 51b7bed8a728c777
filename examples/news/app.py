"""The same pipeline for an engine that stays:

NEWS_HOME=~/news penstock up --app examples.news.app:app
"""

from __future__ import annotations

import penstock

from .pipeline import build
from .settings import from_environment

app = penstock.App()
news = build(from_environment(), app.client)
app.add(news)
