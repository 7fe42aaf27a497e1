"""The package deltalake, which is an extra: without it an error names the extra.

Invariant: no other module imports it, so that this error is the only one that a user without it
can meet.
"""

from __future__ import annotations

from cdc.config.extras import missing_extra

try:
    import deltalake
    import deltalake.exceptions
    import deltalake.fs
    import deltalake.transaction
except ModuleNotFoundError as error:
    raise missing_extra("delta") from error

DeltaTable = deltalake.DeltaTable
CommitProperties = deltalake.CommitProperties
PostCommitHookProperties = deltalake.PostCommitHookProperties
Transaction = deltalake.Transaction
Field = deltalake.Field
Schema = deltalake.Schema
AddAction = deltalake.transaction.AddAction
RemoveAction = deltalake.transaction.RemoveAction
DeltaStorageHandler = deltalake.fs.DeltaStorageHandler
CommitFailedError = deltalake.exceptions.CommitFailedError
DeltaError = deltalake.exceptions.DeltaError
DeltaProtocolError = deltalake.exceptions.DeltaProtocolError
TableNotFoundError = deltalake.exceptions.TableNotFoundError

__all__ = [
    "AddAction",
    "CommitFailedError",
    "CommitProperties",
    "DeltaError",
    "DeltaProtocolError",
    "DeltaStorageHandler",
    "DeltaTable",
    "Field",
    "PostCommitHookProperties",
    "RemoveAction",
    "Schema",
    "TableNotFoundError",
    "Transaction",
]
