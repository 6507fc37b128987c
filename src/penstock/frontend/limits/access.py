"""API keys for the API, one token for `/admin`. A local connection is no proof of identity: proxies and browsers are local too."""

import hmac
from collections.abc import Mapping

from penstock.frontend.errors import AdminTokenError, ApiKeyError
from penstock.frontend.tenants.tenants import ANONYMOUS, Tenant, Tenants

_SCHEME = "bearer "


class Access:
    """Checks keys and tokens in constant time."""

    def __init__(self, *, tenants: Tenants | None = None, admin_token: str = "") -> None:
        """Set the tenants with their keys: without any the API is open, without a token `/admin` is closed."""
        self.tenants = tenants or Tenants({})
        self._admin_token = admin_token.encode()

    def tenant_of(self, headers: Mapping[str, str]) -> Tenant:
        """Give the tenant of a request by its API key, as a bearer token or in `X-API-Key`; the anonymous one where no keys are set.

        Raises:
            ApiKeyError: API keys are set and the request has none of them.
        """
        if not self.tenants.ask_for_keys:
            return ANONYMOUS
        tenant = self.tenants.of_key(_bearer(headers) or _bytes_of(headers.get("X-API-Key", "")))
        if tenant is None:
            raise ApiKeyError(
                "Authorization: must be 'Bearer KEY' with an API key of this server; ask who runs it for one",
            )
        return tenant

    def is_admin(self, headers: Mapping[str, str]) -> bool:
        return bool(self._admin_token) and hmac.compare_digest(_bearer(headers), self._admin_token)

    def check_admin(self, headers: Mapping[str, str]) -> None:
        """Raises: AdminTokenError: the request lacks the token."""
        if not self.is_admin(headers):
            raise AdminTokenError(
                "Authorization: must be 'Bearer TOKEN' with the admin token: PENSTOCK_ADMIN_TOKEN of the server, else what is"
                " in the file admin_token of its state directory",
            )


def _bearer(headers: Mapping[str, str]) -> bytes:
    value = headers.get("Authorization", "")
    if value[: len(_SCHEME)].lower() != _SCHEME:
        return b""
    return _bytes_of(value[len(_SCHEME) :])


def _bytes_of(value: str) -> bytes:
    return value.strip().encode("utf-8", "surrogateescape")
