"""Servers that the contract of storages is held against, where this machine has them."""

import shutil
from itertools import count
from pathlib import Path

import fsspec
import pytest
from fsspec.config import conf
from fsspec.implementations.local import LocalFileSystem
from servers import azurite, openssh
from servers.process import ServerProcess
from support import disks

_numbers = count()


@pytest.fixture(autouse=True, scope="module")
def _disks_are_waited_for():
    disks.wait_for_them()
    yield
    disks.leave_to_the_kernel()


class Served(LocalFileSystem):
    """A backend with directories and renames, and without a put of its own."""

    protocol = "served"


@pytest.fixture
def served_url(tmp_path):
    """A URL of an empty directory on a server of files, such as any backend of fsspec may be."""
    fsspec.register_implementation("served", Served, clobber=True)
    return f"served://{tmp_path}/runs"


@pytest.fixture(scope="session")
def sftp_options(tmp_path_factory):
    """How fsspec reaches an SSH server."""
    pytest.importorskip("paramiko", reason="SFTP WAS NOT TESTED: paramiko is not installed (recckpt[sftp])")
    started = openssh.start(tmp_path_factory.mktemp("sshd"))
    if started is None:
        pytest.skip("SFTP WAS NOT TESTED: there is no sshd (openssh-server)")
    server, options = started
    yield options
    server.stop()


@pytest.fixture
def sftp_url(sftp_options, tmp_path, monkeypatch):
    """A URL of an empty directory on an SSH server."""
    monkeypatch.setitem(conf, "sftp", sftp_options)
    return f"sftp://127.0.0.1{tmp_path}/runs"


@pytest.fixture(scope="session")
def azure_options(tmp_path_factory):
    """How fsspec reaches an emulator of Azure's blobs."""
    pytest.importorskip("adlfs", reason="AZURE WAS NOT TESTED: adlfs is not installed (recckpt[azure])")
    started = azurite.start(tmp_path_factory.mktemp("azurite"))
    if started is None:
        pytest.skip("AZURE WAS NOT TESTED: there is no azurite-blob (npm install -g azurite)")
    server, options = started
    yield options
    server.stop()


@pytest.fixture
def azure_url(azure_options, monkeypatch):
    """A URL of an empty prefix in a container of its own."""
    monkeypatch.setitem(conf, "abfs", azure_options)
    container = f"container-{next(_numbers)}"
    fsspec.filesystem("abfs", skip_instance_cache=True).mkdir(container)
    return f"abfs://{container}/runs"


@pytest.fixture(scope="session")
def radosgw_options(tmp_path_factory):
    """How fsspec reaches Ceph's S3 gateway."""
    if shutil.which("radosgw") is None:
        pytest.skip("CEPH WAS NOT TESTED: there is no radosgw (see tests/servers/radosgw.sh)")
    directory = tmp_path_factory.mktemp("radosgw")
    script = Path(__file__).parents[1] / "servers" / "radosgw.sh"
    server = ServerProcess([script, directory], r"radosgw listens on port (\d+)")
    yield {"endpoint_url": f"http://127.0.0.1:{server.said[1]}", "key": "tests", "secret": "tests"}
    server.stop()


@pytest.fixture
def radosgw_url(radosgw_options, monkeypatch):
    """A URL of an empty prefix in a bucket of its own."""
    monkeypatch.setitem(conf, "s3", radosgw_options)
    bucket = f"bucket-{next(_numbers)}"
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    return f"s3://{bucket}/runs"
