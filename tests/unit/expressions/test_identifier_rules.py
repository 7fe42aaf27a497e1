"""Names that are written as text, ``IDENTIFIER('name')``, pass no rule unseen."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from spark_pipeline.expressions.engine import Engine
from spark_pipeline.expressions.rules import RuleError, check_parsed


@pytest.mark.parametrize("aggregates", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "IDENTIFIER('java_method')('java.lang.System', 'getProperty', 'user.home') = ''",
        "IDENTIFIER('reflect')('java.lang.System', 'currentTimeMillis') = ''",
        "IDENTIFIER('rand')() > 0.5",
        "IDENTIFIER('current_timestamp')() > record.at",
        "IDENTIFIER('ra' || 'nd')() > 0.5",
        "IDENTIFIER(concat('java_', 'method'))('a', 'b') = ''",
        "identifier('system.builtin.rand')() > 0.5",
        "coalesce(IDENTIFIER('uuid')(), '') = ''",
        "exists(array(1), x -> IDENTIFIER('rand')() > x)",
        "IDENTIFIER('record').id = 1",
        "IDENTIFIER('first')(record.id) = 1",
    ],
)
def test_a_name_that_is_written_as_text_is_refused(
    spark: SparkSession, text: str, aggregates: bool
) -> None:
    with pytest.raises(RuleError, match="IDENTIFIER is refused: write the name itself"):
        check_parsed(Engine.of(spark), text, aggregates=aggregates)
