"""Commands without `--url` on deployments that listen anywhere, with a certificate and an API key."""

import pytest

from tests.support.certificates import make_authority
from tests.support.registries import free_port
from tests.support.up import Up

pytestmark = [pytest.mark.slow, pytest.mark.needs("openssl")]


@pytest.fixture
def up(tmp_path, runtime_dir):
    made = Up(tmp_path, runtime_dir)
    made.environment.pop("SSL_CERT_FILE", None)
    yield made
    made.end()


def test_the_only_deployment_is_asked_and_of_two_the_named_one(up, tmp_path):
    assert "no deployment of this user has a frontend on this host, and nobody answers at" in said_of(
        up, "top", url="http://127.0.0.1:8000"
    )
    certificate = make_authority(tmp_path, "chat.example.com")  # not the name of the URL
    tls = {"certificate": str(certificate), "key": str(certificate.with_suffix(".key"))}
    up.environment["PENSTOCK_API_KEY"] = "sk-of-the-environment"
    up.up(up.graph("blue.yaml", name="blue", frontend={"port": 0, "tls": tls}))
    assert up.url.startswith("https://")
    answer = up.run("chat", "Hello?", "--max-tokens", "4").stdout
    assert answer.strip()
    assert "worker-1" in up.run("top").stdout
    assert "to worker-1" in up.run("explain").stdout
    assert "worker-1" in up.run("kv", "ls").stdout
    assert "asleep now" in up.run("sleep", "worker-1").stdout
    assert "ready now" in up.run("wake", "worker-1").stdout
    report = tmp_path / "bench.json"
    words = ("--model", "penstock-demo", "--quick", "--api-key", "sk-of-the-environment", "--json", report)
    up.run("bench", "serve", *words)
    assert up.url in report.read_text()
    other = Up(up.folder, up.environment["XDG_RUNTIME_DIR"])
    other.environment = up.environment
    try:
        other.up(other.graph("green.yaml", name="green", frontend={"port": free_port()}))
        refused = up.run("top", check=False)
        assert refused.returncode == 2
        assert refused.stderr.startswith(f"penstock: 2 deployments fit: blue at {up.url} of ")
        assert f", green at {other.url} of " in refused.stderr
        assert refused.stderr.endswith("; choose one by --name, --url or --part\n")
        assert up.run("chat", "Hello?", "--max-tokens", "4", "--name", "blue").stdout.strip()
        assert "to worker-1" in up.run("explain", "--name", "blue").stdout
        assert "no decisions yet" in up.run("explain", "--name", "green").stdout
        assert "no decisions yet" in up.run("explain", "--url", f"{other.url}/v1").stdout
        assert "to worker-1" in up.run("explain", "--url", up.url).stdout, "trusted by its own certificate"
    finally:
        other.end()


def said_of(up, command, url):
    done = up.run(command, check=False)
    assert (done.returncode, done.stderr.count("\n"), url in done.stderr) == (1, 1, True), done
    return done.stderr
