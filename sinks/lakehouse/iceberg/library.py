"""The package pyiceberg, which is an extra: without it an error names the extra.

Invariant: no other module imports it, so that this error is the only one that a user without it
can meet.
"""

from __future__ import annotations

from cdc.config.extras import missing_extra

try:
    from pyiceberg.catalog import Catalog, load_catalog
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.conversions import from_bytes, to_bytes
    from pyiceberg.exceptions import (
        CommitFailedException,
        ForbiddenError,
        NoSuchNamespaceError,
        NoSuchTableError,
        NotInstalledError,
        OAuthError,
        TableAlreadyExistsError,
        UnauthorizedError,
    )
    from pyiceberg.io import FileIO, InputFile, OutputFile, load_file_io
    from pyiceberg.io.pyarrow import PyArrowFileIO
    from pyiceberg.manifest import (
        DataFile,
        DataFileContent,
        FileFormat,
        ManifestContent,
        ManifestEntry,
        ManifestEntryStatus,
        ManifestFile,
        ManifestWriterV2,
        write_manifest_list,
    )
    from pyiceberg.partitioning import PartitionField, PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
    from pyiceberg.table.snapshots import (
        Operation,
        Snapshot,
        SnapshotSummaryCollector,
        Summary,
    )
    from pyiceberg.table.update import (
        AddSchemaUpdate,
        AddSnapshotUpdate,
        AssertCurrentSchemaId,
        AssertLastAssignedFieldId,
        AssertRefSnapshotId,
        AssertTableUUID,
        RemoveSnapshotsUpdate,
        SetCurrentSchemaUpdate,
        SetPropertiesUpdate,
        SetSnapshotRefUpdate,
        TableRequirement,
        TableUpdate,
    )
    from pyiceberg.transforms import IdentityTransform
    from pyiceberg.typedef import Record
    from pyiceberg.types import (
        BinaryType,
        BooleanType,
        DateType,
        DecimalType,
        DoubleType,
        FloatType,
        IcebergType,
        IntegerType,
        ListType,
        LongType,
        MapType,
        NestedField,
        PrimitiveType,
        StringType,
        StructType,
        TimestampType,
        TimestamptzType,
    )
    from pyiceberg.utils.truncate import (
        truncate_upper_bound_text_string,
    )
    from sqlalchemy import URL, create_engine
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.pool import NullPool
except ModuleNotFoundError as error:
    raise missing_extra("iceberg") from error

__all__ = [
    "MAIN_BRANCH",
    "URL",
    "AddSchemaUpdate",
    "AddSnapshotUpdate",
    "AssertCurrentSchemaId",
    "AssertLastAssignedFieldId",
    "AssertRefSnapshotId",
    "AssertTableUUID",
    "BinaryType",
    "BooleanType",
    "Catalog",
    "CommitFailedException",
    "DBAPIError",
    "DataFile",
    "DataFileContent",
    "DateType",
    "DecimalType",
    "DoubleType",
    "FileFormat",
    "FileIO",
    "FloatType",
    "ForbiddenError",
    "IcebergType",
    "IdentityTransform",
    "InputFile",
    "IntegerType",
    "ListType",
    "LongType",
    "ManifestContent",
    "ManifestEntry",
    "ManifestEntryStatus",
    "ManifestFile",
    "ManifestWriterV2",
    "MapType",
    "NestedField",
    "NoSuchNamespaceError",
    "NoSuchTableError",
    "NotInstalledError",
    "NullPool",
    "OAuthError",
    "Operation",
    "OutputFile",
    "PartitionField",
    "PartitionSpec",
    "PrimitiveType",
    "PyArrowFileIO",
    "Record",
    "RemoveSnapshotsUpdate",
    "Schema",
    "SetCurrentSchemaUpdate",
    "SetPropertiesUpdate",
    "SetSnapshotRefUpdate",
    "Snapshot",
    "SnapshotRefType",
    "SnapshotSummaryCollector",
    "SqlCatalog",
    "StringType",
    "StructType",
    "Summary",
    "Table",
    "TableAlreadyExistsError",
    "TableMetadata",
    "TableRequirement",
    "TableUpdate",
    "TimestampType",
    "TimestamptzType",
    "UnauthorizedError",
    "create_engine",
    "from_bytes",
    "load_catalog",
    "load_file_io",
    "to_bytes",
    "truncate_upper_bound_text_string",
    "write_manifest_list",
]
