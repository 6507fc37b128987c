"""An S3 server in a process of its own: moto's, which keeps objects in memory."""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

from penstock.core.errors import Unavailable

BUCKET = "bucket"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_REGION": "us-east-1"}
"""What its clients need."""
_TRIES = 600
_TRY_S = 0.05


class S3Server:
    """One bucket, named `bucket`."""

    def __init__(self, python: str = sys.executable) -> None:
        """Start it, and wait until it answers.

        Args:
            python: has moto installed.

        Raises:
            Unavailable: it does not answer.
        """
        self._python = python
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Start it again, empty."""
        command = [self._python, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(_TRIES):
            try:
                self.put(f"/{BUCKET}", b"")
            except (urllib.error.URLError, ConnectionError) as error:
                if self.process.poll() is not None:
                    raise Unavailable(
                        "the S3 server has ended; is moto installed? pip install 'moto[server]'"
                    ) from error
                time.sleep(_TRY_S)
            else:
                return
        raise Unavailable("the S3 server does not answer")

    def put(self, path: str, data: bytes) -> None:
        """Put an object, or make a bucket."""
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, method="PUT"), timeout=5):
            pass

    def kill(self) -> None:
        """Kill it; its objects are gone."""
        self.process.kill()
        self.process.wait()
