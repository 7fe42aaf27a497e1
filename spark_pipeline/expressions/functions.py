"""The operator's own Python functions: whole columns in, one column out.

``function(rows: pa.RecordBatch) -> pa.Array``, where ``rows`` has the columns ``record``,
``changes``, ``action`` and ``metadata`` of one table version. A filter gives booleans, a transform
JSON texts, a routing texts. Invariant: a function that fails, or gives something else,
fails for the rows that it was handed, and the error names it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.expression import FUNCTION
from cdc.errors import ConfigError
from spark_pipeline.expressions.failures import EvaluationError

_KEPT_MAX = 256


@dataclass(frozen=True)
class Function:
    """A function by the name that the configuration gives it."""

    key: str  # filter, transform or routing
    name: str  # package.module:function
    call: Callable[[pa.RecordBatch], object]

    def run(self, rows: pa.RecordBatch) -> pa.Array:
        """Its answer for all rows, of the type that its key needs."""
        try:
            given = self.call(rows)
        except Exception as error:
            what = self._says(type(error).__name__)
            raise EvaluationError(what, detail=str(error)) from error
        if isinstance(given, pa.ChunkedArray):
            given = given.combine_chunks()
        if not isinstance(given, pa.Array):
            raise EvaluationError(
                self._says(f"it gave a {type(given).__name__}, not a pyarrow.Array")
            )
        if len(given) != rows.num_rows:
            raise EvaluationError(
                self._says(f"it gave {len(given)} values for {rows.num_rows} rows")
            )
        return self._typed(given)

    def _typed(self, given: pa.Array) -> pa.Array:
        wanted = pa.bool_() if self.key == "filter" else pa.string()
        texts = (pa.string(), pa.large_string(), pa.string_view(), pa.null())
        if given.type not in ((pa.bool_(), pa.null()) if self.key == "filter" else texts):
            raise EvaluationError(self._says(f"it gave values of {given.type}, not of {wanted}"))
        cast = given.cast(wanted)
        return self._json(cast) if self.key == "transform" else cast

    def _json(self, texts: pa.StringArray) -> pa.StringArray:
        """Arrow has no check of JSON, and a message that is none would break its reader."""
        texts = pc.fill_null(texts, "null")
        for text in texts:
            try:
                orjson.loads(memoryview(text.as_buffer()))
            except orjson.JSONDecodeError as error:
                what = self._says("it gave a text that is no JSON")
                raise EvaluationError(what, detail=str(error)) from error
        return texts

    def _says(self, what: str) -> str:
        return f"the function {self.name} ({self.key}) failed: {what}"


@lru_cache(maxsize=_KEPT_MAX)
def load_function(key: str, text: str) -> Function:
    """The function that ``python:package.module:function`` names."""
    name = text.removeprefix(FUNCTION)
    module, _, attribute = name.partition(":")
    fix = "install the module where the service runs, or correct the name"
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:
        raise ConfigError(
            f"{module} cannot be imported: {type(error).__name__}: {error}", fix=fix
        ) from error
    if not callable(found):
        raise ConfigError(f"{module} has no function {attribute}", fix=fix)
    return Function(key, name, found)
