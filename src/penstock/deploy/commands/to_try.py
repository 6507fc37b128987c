"""What to try with a started deployment, as lines that can be pasted into a shell."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from penstock.deploy.control.frontend_address import DEFAULT_URL
from penstock.deploy.state import admin_token_path
from penstock.frontend.limits.keys import API_KEY_VARIABLE

_QUESTION = "What does the router do?"


@dataclass(frozen=True, slots=True)
class ToTry:
    """How a client of this machine reaches a deployment.

    Attributes:
        url: without a slash at the end.
        model: its name.
        asks_key: whether requests need an API key.
        has_key: whether it is the one in PENSTOCK_API_KEY; a key file has hashes only.
        certificate: of an HTTPS port, which clients trust by it; it must be for the URL's address.
        has_page: whether the URL shows the live page.
    """

    url: str
    model: str
    asks_key: bool = False
    has_key: bool = False
    certificate: Path | None = None
    has_page: bool = True

    def commands(self) -> str:
        """Name the page and the commands of a terminal."""
        flag = "" if self.url == DEFAULT_URL else f" --url {self.url}"
        page = f"{self.url}/ in a browser, " if self.has_page else ""
        return f"{page}penstock chat{flag}, penstock top{flag}"

    def curl(self) -> str:
        """Ask one question by curl; a key of a file is to be put in place of KEY."""
        body = {"model": self.model, "messages": [{"role": "user", "content": _QUESTION}]}
        json_type = "-H 'Content-Type: application/json'"
        return f"{self._curl()} {self.url}/v1/chat/completions {json_type}{self._key()} -d {shlex.quote(json.dumps(body))}"

    def more(self) -> str:
        """Name what to try after a first chat, over several lines."""
        key = '"KEY"' if self.asks_key and not self.has_key else f'os.environ["{API_KEY_VARIABLE}"]'
        load_os = "import os\n  " if self.has_key else ""
        trust = f"SSL_CERT_FILE={shlex.quote(str(self.certificate))} python" if self.certificate else "python"
        token = admin_token_path()
        return f"""
Try next, in another terminal:

  {self.curl()}

  {load_os}from openai import OpenAI          # pip install openai; {trust}
  client = OpenAI(base_url={json.dumps(self.url + "/v1")}, api_key={key if self.asks_key else '"none"'})
  question = [{{"role": "user", "content": "What is a KV cache?"}}]
  for chunk in client.chat.completions.create(model={json.dumps(self.model)}, messages=question, stream=True):
      print(chunk.choices[0].delta.content or "", end="")

  {self._curl()} -H "Authorization: Bearer $(cat {token})" {self.url}/admin/workers   # who serves, and with what load
  {self._curl()} {self.url}/metrics                 # Prometheus
"""

    def _curl(self) -> str:
        return "curl" if self.certificate is None else f"curl --cacert {shlex.quote(str(self.certificate))}"

    def _key(self) -> str:
        if not self.asks_key:
            return ""
        return (
            f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"'
            if self.has_key
            else " -H 'Authorization: Bearer KEY'"
        )
