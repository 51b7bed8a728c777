from tests.acceptance.test_hostile_caller import *  # noqa: F403  (its tests and fixtures)
