"""One frozen `Settings`, from file, environment and flags."""

from penstock.config.loading import load
from penstock.config.settings import Pool, Settings, UnknownTopics

__all__ = ["Pool", "Settings", "UnknownTopics", "load"]
