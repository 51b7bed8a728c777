"""Pipelines whose items say which process they ran in: another process must import them."""

from __future__ import annotations

import os

import penstock

NUMBERS = (1, 2, 3)

near = penstock.Pipeline("near", single_flight=False)
far = penstock.Pipeline("far", single_flight=False)


def numbers(config: object) -> tuple[int, ...]:
    return NUMBERS


@near.map(over=numbers, concurrency=1, mode="process")
def pid_near(number: int) -> int:
    return os.getpid()


@far.map(over=numbers, concurrency=1, mode="process", distributed=True)
def pid_far(number: int) -> int:
    return os.getpid()
