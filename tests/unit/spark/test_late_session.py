"""A session that is opened while others work: it comes once, or says why it does not."""

from __future__ import annotations

from typing import cast

from pyspark.sql import SparkSession

from spark_pipeline.jvm.late import LateSession

SESSION = cast(SparkSession, object())


def test_a_session_that_is_open_is_given_at_once() -> None:
    late = LateSession.of(SESSION)
    came: list[bool] = []
    assert late.wait(lambda: True, lambda: came.append(True)) is SESSION
    assert (late.current, late.failure, came) == (SESSION, None, [])


def test_waiting_threads_learn_that_the_session_came() -> None:
    late, came = LateSession(), []

    def opened_meanwhile() -> bool:
        late.open(lambda: SESSION)
        return False

    assert late.wait(opened_meanwhile, lambda: came.append(True)) is SESSION
    assert came == [True]


def test_a_wait_can_be_given_up() -> None:
    late = LateSession()
    assert late.wait(lambda: True) is None
    assert (late.current, late.failure) == (None, None)


def test_a_session_that_does_not_open_says_why() -> None:
    late, why = LateSession(), OSError("no Java")

    def refuse() -> SparkSession:
        raise why

    late.open(refuse)
    assert late.wait(lambda: False) is None
    assert late.failure is why
