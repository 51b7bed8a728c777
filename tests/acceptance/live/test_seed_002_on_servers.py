from tests.acceptance.test_seed_002 import *  # noqa: F403  (its tests and fixtures)
