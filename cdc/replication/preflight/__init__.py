"""Is the source usable as configured? Asked once, before the reader starts.

``prepare_source`` looks at everything that could stop or silently thin out the stream, creates the
publication and the slot where the configuration allows it, and says in one error all that a person
must change, each with the statement that changes it. Invariant:

- Nothing is created while another problem stands: a slot without a reader would hold back WAL
  without bound.
- The publication exists before the slot does. A slot older than its publication cannot see the
  changes between the two, and some servers skip them without a word.
- Only an ordinary autocommit connection is used; names reach SQL through ``psycopg.sql`` alone.
"""

from cdc.replication.preflight.prepare import (
    SourceIdentity,
    SourceSettings,
    check_source,
    end_of_wal,
    prepare_source,
)

__all__ = ["SourceIdentity", "SourceSettings", "check_source", "end_of_wal", "prepare_source"]
