"""A real Redis for the tests.

The server is, in this order: the one at ``WALBROOK_TEST_REDIS_URL`` (its database is emptied), a
container if a Docker engine answers, or the embedded one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import redis

from demo.embedded_redis import EmbeddedRedis, find_redis_server
from tests.fix_postgres import _docker_answers


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    given = os.environ.get("WALBROOK_TEST_REDIS_URL")
    if given:
        yield given
    elif _docker_answers():
        from testcontainers.redis import RedisContainer

        with RedisContainer("redis:7-alpine") as running:
            host, port = running.get_container_host_ip(), running.get_exposed_port(6379)
            yield f"redis://{host}:{port}/0"
    else:
        with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
            yield server.url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    """A client of an empty database."""
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
        yield client


@pytest.fixture
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A server of one test, which may stop it and start it again."""
    if find_redis_server() is None:
        pytest.skip("no redis-server program is installed")
    with EmbeddedRedis(tmp_path_factory.mktemp("own-redis")) as server:
        yield server
