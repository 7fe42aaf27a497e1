"""Object stores of several kinds for the tests, each with a bucket that no other test uses."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Literal

import httpx
import pyarrow.fs as pafs
import pytest

from tests.cloud_servers import ACCOUNT, ACCOUNT_KEY, NoServerError, azurite, fake_gcs
from tests.fix_s3 import S3
from tests.stores import Store

Kind = Literal["s3", "azure", "gcs"]
StoreOf = Callable[[str], Store]


@pytest.fixture(scope="session")
def azure_server() -> Iterator[str]:
    try:
        with azurite() as address:
            yield address
    except NoServerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[str]:
    try:
        with fake_gcs() as address:
            yield address
    except NoServerError as error:
        pytest.skip(str(error))


@pytest.fixture
def store_of(request: pytest.FixtureRequest) -> StoreOf:
    """An empty folder in a store of a kind; its server starts when the first test asks for it."""

    def opened(kind: str) -> Store:
        if kind == "s3":
            return s3_store(request.getfixturevalue("s3"))
        if kind == "azure":
            return _azure_store(request.getfixturevalue("azure_server"))
        return _gcs_store(request.getfixturevalue("gcs_server"))

    return opened


def s3_store(s3: S3) -> Store:
    """The folder ``lake`` of a bucket; the environment has the account."""
    options = {
        "AWS_ENDPOINT_URL": f"http://{s3.endpoint}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "eu-central-1",
    }
    return Store(f"s3://{s3.bucket}/lake", options)


def _azure_store(address: str) -> Store:
    container = f"t{uuid.uuid4().hex}"
    files = pafs.AzureFileSystem(
        ACCOUNT, account_key=ACCOUNT_KEY, blob_storage_authority=address, blob_storage_scheme="http"
    )
    files.create_dir(container)
    options = {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
        "AZURE_ENDPOINT": f"http://{address}/{ACCOUNT}",
        "AZURE_ALLOW_HTTP": "true",
    }
    places = {f"adls.{kind}-storage-authority": address for kind in ("blob", "dfs")}
    schemes = {f"adls.{kind}-storage-scheme": "http" for kind in ("blob", "dfs")}
    # The form in which other engines write it, and in which the account is part of the URL.
    url = f"abfss://{container}@{ACCOUNT}.dfs.core.windows.net/lake"
    return Store(url, options, {"AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY, **places, **schemes})


def _gcs_store(address: str) -> Store:
    bucket = f"t{uuid.uuid4().hex}"
    made = httpx.post(f"http://{address}/storage/v1/b?project=tests", json={"name": bucket})
    made.raise_for_status()
    service = f'{{"gcs_base_url": "http://{address}", "disable_oauth": true}}'
    account = service[:-1] + ', "client_email": "", "private_key": "", "private_key_id": ""}'
    token = {"gcs.oauth2.token": "any", "gcs.oauth2.token-expires-at": "4000000000000"}
    return Store(
        f"gs://{bucket}/lake",
        {"GOOGLE_SERVICE_ACCOUNT_KEY": account},
        {"gcs.service.host": f"http://{address}", **token},
    )
