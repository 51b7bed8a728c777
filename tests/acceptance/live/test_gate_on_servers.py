from tests.acceptance.test_gate import *  # noqa: F403  (its tests and fixtures)
