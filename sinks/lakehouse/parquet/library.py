"""The package obstore, which is an extra: the error names it where it is missing.

pyarrow's file systems cannot put an object under a condition. Invariant: no other module imports
the package, so that this error is the only one that a user without it can meet.
"""

from __future__ import annotations

from cdc.config.extras import missing_extra

try:
    import obstore
    import obstore.exceptions
    import obstore.store
except ModuleNotFoundError as error:
    raise missing_extra("parquet") from error

from_url = obstore.store.from_url
delete = obstore.delete
get = obstore.get
listed = obstore.list
put = obstore.put
BaseError = obstore.exceptions.BaseError
AlreadyExistsError = obstore.exceptions.AlreadyExistsError
PreconditionError = obstore.exceptions.PreconditionError
UnknownConfigurationKeyError = obstore.exceptions.UnknownConfigurationKeyError
