"""Run azurite, Microsoft's emulator of Azure's blobs (npm install azurite), on a free port."""

import base64
import os
import secrets
import shutil

from servers.process import ServerProcess

AZURITE = shutil.which("azurite-blob")
ACCOUNT = "recckpttests"


def start(directory):
    """Return the running server and the options by which fsspec reaches it; None where there is no azurite."""
    if AZURITE is None:
        return None
    command = [AZURITE, "--blobHost", "127.0.0.1", "--blobPort", "0", "--location", directory]
    command += ["--skipApiVersionCheck", "--disableTelemetry"]
    key = base64.b64encode(secrets.token_bytes(32)).decode()
    accounts = {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{key}"}
    server = ServerProcess(command, r"listens on (http://127\.0\.0\.1:\d+)", env=accounts)
    endpoint = f"BlobEndpoint={server.said[1]}/{ACCOUNT};"
    connection = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={key};{endpoint}"
    return server, {"account_name": ACCOUNT, "connection_string": connection}
