from tests.acceptance.test_http_world import *  # noqa: F403  (its tests and fixtures)
