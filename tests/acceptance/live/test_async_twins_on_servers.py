from tests.acceptance.test_async_twins import *  # noqa: F403  (its tests and fixtures)
