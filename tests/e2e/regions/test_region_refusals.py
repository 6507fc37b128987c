"""Regions whose certificates, API keys or secrets do not fit: a line at both ends, and metrics of both that say why."""

import json
import ssl
import urllib.request

import pytest

from penstock.frontend.tenants.api_key import digest_of
from tests.support.certificates import make_authority, make_certificate
from tests.support.host import until
from tests.support.up import Up

pytestmark = [pytest.mark.slow, pytest.mark.needs("openssl")]
KEY = "sk-" + "k" * 40


class Region(Up):
    """A deployment of one worker, and what its port says."""

    def __init__(self, folder, secret):
        folder.mkdir()
        run = folder / "run"
        run.mkdir(mode=0o700)
        super().__init__(folder, run)
        self.environment["PENSTOCK_SECRET"] = secret
        self.trusts = None

    def metric(self, name, **labels):
        """Add up the series of a metric that have these labels; 0 without any."""
        request = urllib.request.Request(f"{self.url}/metrics")
        with urllib.request.urlopen(request, context=self.trusts, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        said = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith(f"{name}{{") and all(each in line for each in said)
        )

    def logs(self):
        return self.run("logs", check=False).stdout


def test_a_wrong_certificate_key_or_secret_is_told_of_at_both_ends(tmp_path):
    theirs, others = (make_authority(tmp_path, name) for name in ("eu-authority", "other"))
    pair = make_certificate(tmp_path, "eu", theirs, address="127.0.0.1")
    of_us = {"keys": [f"sha256:{digest_of(KEY.encode()).hex()}"], "link": True, "cache_salt": ""}
    (tmp_path / "keys.yaml").write_text(json.dumps({"tenants": {"us": of_us}}))
    (tmp_path / "wrong.key").write_text("sk-" + "w" * 40)
    (tmp_path / "right.key").write_text(KEY)
    eu, us = (
        Region(tmp_path / "eu", "one secret of eu alone"),
        Region(tmp_path / "us", "another secret of us"),
    )
    eu.trusts = ssl.create_default_context(cafile=str(theirs))

    def graph(authority, key):
        link = {
            "name": "eu", "urls": [eu.url], "tls": {"authority": str(authority)}, "api_key_file": str(tmp_path / key),
            "health": {"interval_s": 0.2, "retry_s_max": 0.5},
        }  # fmt: skip
        return us.graph(router={"location": {"region": "us"}}, regions=[link])

    def problem(kind):
        return us.metric("penstock_router_link_problem", region="eu", problem=kind)

    def told(kind):
        return eu.metric("penstock_frontend_link_problems_total", region="us", problem=kind)

    try:
        eu.up(
            eu.graph(
                router={"location": {"region": "eu"}},
                frontend={
                    "port": 0,
                    "tls": {"certificate": str(pair.certificate), "key": str(pair.key)},
                    "api_key_file": str(tmp_path / "keys.yaml"),
                },
            )
        )
        us.up(graph(others, "wrong.key"))

        until(lambda: "no TLS connection" in json.dumps(us.ps()))
        assert us.metric("penstock_router_link_healthy_frontends", region="eu") == 0
        assert problem("unreachable") == 1
        until(lambda: eu.metric("penstock_frontend_tls_refused_total", reason="certificate") >= 1)
        assert "certificate_refused" in eu.logs()

        us.run("apply", graph(theirs, "wrong.key"))
        until(lambda: "401" in json.dumps(us.ps()))
        until(lambda: told("key") >= 1)
        assert "region_link_problem" in eu.logs()

        us.run("apply", graph(theirs, "right.key"))
        until(lambda: us.metric("penstock_router_link_healthy_frontends", region="eu") == 1)
        until(lambda: problem("secret") == 1)
        assert problem("unreachable") == 0
        until(lambda: told("secret") >= 1)
        assert "prefixes_unused" in us.logs()

        # Its key is taken away while the link is up.
        (tmp_path / "keys.yaml").write_text(json.dumps({"tenants": {"x": {"keys": [f"sha256:{'0' * 64}"]}}}))
        until(lambda: problem("key") == 1)
        assert problem("secret") == 0
        assert us.metric("penstock_router_link_healthy_frontends", region="eu") == 0
    finally:
        us.end()
        eu.end()
