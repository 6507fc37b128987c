"""The curl line that `penstock serve` prints answers as it is: with an API key of the environment, and over TLS."""

import json
import subprocess
import sys
import threading

import pytest

from tests.support.certificates import make_authority

pytestmark = [pytest.mark.slow, pytest.mark.needs("curl", "openssl")]

COMMAND = [sys.executable, "-m", "penstock", "serve", "--engine", "mock", "--port", "0"]


@pytest.mark.parametrize("secure", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_it_can_be_pasted(secure, runtime_dir, tmp_path, monkeypatch):
    flags = ["--set=supervision.spare_processes=0"]
    if secure:
        monkeypatch.setenv("PENSTOCK_API_KEY", "sk-of-the-environment")
        certificate = make_authority(tmp_path, "127.0.0.1")
        key = certificate.with_suffix(".key")
        flags += [f"--set=frontend.tls.certificate={certificate}", f"--set=frontend.tls.key={key}"]
    with subprocess.Popen([*COMMAND, *flags], stdout=subprocess.PIPE, text=True) as serve:
        watchdog = threading.Timer(120, serve.kill)
        watchdog.start()
        try:
            said = iter(serve.stdout)
            line = next(each for each in said if each.startswith("penstock    try       curl"))
            done = subprocess.run(
                ["bash", "-c", line.partition(" try ")[2]],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["choices"][0]["message"]["content"]
        finally:
            serve.terminate()
            serve.wait(60)
            watchdog.cancel()
