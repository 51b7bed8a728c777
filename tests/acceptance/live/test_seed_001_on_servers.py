from tests.acceptance.test_seed_001 import *  # noqa: F403  (its tests and fixtures)
