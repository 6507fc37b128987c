"""Real registries that ask for accounts: an etcd with users, and a NATS with users, a token, an nkey or JWTs of accounts."""

import base64
import hashlib
import importlib
import json
import os
from pathlib import Path
from typing import Any

from tests.support.registries import Etcd, Nats

USER, PASSWORD = "penstock", "word:with @ and #"
TOKEN_TTL_S = 2


class EtcdWithUsers(Etcd):
    """etcd that knows root and one user, who may read and write below a prefix; its tokens last 2 s."""

    prefix = b"/penstock/"

    def command(self, folder: Path) -> list[str]:
        return [*super().command(folder), "--auth-token-ttl", str(TOKEN_TTL_S)]

    def enable(self) -> None:
        """Make the users, and ask for one from now on."""
        for name, prefix in (("root", b""), (USER, self.prefix)):
            self.call("auth/role/add", name=name)
            if prefix:
                after = prefix[:-1] + bytes([prefix[-1] + 1])
                perm = {"permType": "READWRITE", "key": _b64(prefix), "range_end": _b64(after)}
                self.call("auth/role/grant", name=name, perm=perm)
            self.call("auth/user/add", name=name, password=PASSWORD)
            self.call("auth/user/grant", user=name, role=name)
        self.call("auth/enable")

    def change_password(self, password: str) -> None:
        root = self.call("auth/authenticate", name="root", password=PASSWORD)["token"]
        self.call("auth/user/changepw", token=root, name=USER, password=password)


class NatsWithAccounts(Nats):
    """nats-server with JetStream and this text in its configuration."""

    def __init__(self, configuration: str) -> None:
        super().__init__()
        self.configuration = configuration

    def command(self, folder: Path) -> list[str]:
        file = folder.with_name("nats.conf")
        file.write_text(self.configuration)
        return [*super().command(folder), "-c", str(file)]


class NatsUser:
    """A user of NATS by key: the configuration of a server that knows it, and what the user has.

    Attributes:
        seed: its private key.
        by_key: configuration of a server that knows the key.
        by_jwt: configuration of a server that trusts who signed its JWT.
        creds: text of its .creds file for that.
    """

    def __init__(self) -> None:
        nkeys: Any = importlib.import_module("nkeys")  # without types; tests skip where it is missing

        prefixes = {
            "operator": nkeys.PREFIX_BYTE_OPERATOR,
            "system": nkeys.PREFIX_BYTE_ACCOUNT,
            "account": nkeys.PREFIX_BYTE_ACCOUNT,
            "user": nkeys.PREFIX_BYTE_USER,
        }
        seeds = {name: nkeys.encode_seed(os.urandom(32), prefix) for name, prefix in prefixes.items()}
        self._pairs = {name: nkeys.from_seed(bytearray(seed)) for name, seed in seeds.items()}
        public = {name: pair.public_key.decode() for name, pair in self._pairs.items()}
        self.seed = seeds["user"].decode()
        self.by_key = f"authorization {{ users: [ {{ nkey: {public['user']} }} ] }}"
        unlimited = dict.fromkeys(("subs", "data", "payload"), -1)
        storage = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
        connections = {"imports": -1, "exports": -1, "wildcards": True, "conn": -1, "leaf": -1}
        operator = self._sign(
            "operator", public["operator"], {"type": "operator", "system_account": public["system"]}
        )
        accounts = {
            name: self._sign(
                "operator", public[name], {"type": "account", "limits": unlimited | connections | extra}
            )
            for name, extra in (("system", {}), ("account", storage))
        }
        user = self._sign("account", public["user"], {"type": "user"} | unlimited)
        preload = "\n".join(f"  {public[name]}: {jwt}" for name, jwt in accounts.items())
        self.by_jwt = f"operator: {operator}\nsystem_account: {public['system']}\nresolver: MEMORY\nresolver_preload: {{\n{preload}\n}}\n"
        self.creds = (
            f"-----BEGIN NATS USER JWT-----\n{user}\n------END NATS USER JWT------\n\n"
            "************************* IMPORTANT *************************\nNKEY Seed printed below.\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{self.seed}\n------END USER NKEY SEED------\n"
        )

    def _sign(self, issuer: str, subject: str, nats: dict[str, Any]) -> str:
        pair = self._pairs[issuer]
        claims = {
            "iat": 1_700_000_000, "iss": pair.public_key.decode(), "name": nats["type"], "sub": subject,
            "nats": nats | {"version": 2},
        }  # fmt: skip
        digest = hashlib.new("sha512_256", json.dumps(claims).encode()).digest()
        claims["jti"] = base64.b32encode(digest).decode().rstrip("=")
        parts = [{"typ": "JWT", "alg": "ed25519-nkey"}, claims]
        text = ".".join(_url_b64(json.dumps(part).encode()) for part in parts)
        return f"{text}.{_url_b64(pair.sign(text.encode()))}"


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _url_b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
