"""Run OpenSSH's server on a free port, for SFTP alone and for the user who runs the tests."""

import getpass
import os
import shutil
import socket
import subprocess
from pathlib import Path

from servers.process import ServerProcess

SSHD = shutil.which("sshd") or shutil.which("/usr/sbin/sshd")
_PRIVSEP = Path("/run/sshd")  # sshd wants it where root runs it; gone at the next start of the machine


def start(directory):
    """Return the running server and the options by which fsspec reaches it; None where this machine has no sshd."""
    if SSHD is None:
        return None
    if os.geteuid() == 0:
        _PRIVSEP.mkdir(exist_ok=True)
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / name], check=True)
    keys = directory / "authorized_keys"
    keys.write_bytes((directory / "user_key.pub").read_bytes())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {"ListenAddress": f"127.0.0.1:{port}", "HostKey": directory / "host_key", "AuthorizedKeysFile": keys}
    options |= {"PidFile": "none", "UsePAM": "no", "StrictModes": "no", "PermitRootLogin": "prohibit-password"}
    options |= {"PasswordAuthentication": "no", "Subsystem": "sftp internal-sftp", "ForceCommand": "internal-sftp"}
    config = directory / "sshd_config"
    config.write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    server = ServerProcess([SSHD, "-D", "-e", "-f", config], r"Server listening on 127\.0\.0\.1")
    reach = {"port": port, "username": getpass.getuser(), "key_filename": str(directory / "user_key")}
    return server, {**reach, "look_for_keys": False, "allow_agent": False}
