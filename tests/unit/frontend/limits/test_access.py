"""API keys and the admin token."""

import pytest

from penstock.frontend.errors import AdminTokenError, ApiKeyError
from penstock.frontend.limits.access import Access
from penstock.frontend.tenants.api_key import hash_of
from penstock.frontend.tenants.key_file import TenantConfig
from penstock.frontend.tenants.tenants import ANONYMOUS, Tenants


def test_without_a_token_admin_is_closed_and_without_keys_the_api_is_open() -> None:
    access = Access()
    assert access.tenant_of({}) is ANONYMOUS
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer x"}):
        with pytest.raises(AdminTokenError):
            access.check_admin(headers)


def test_bearer_is_read_as_clients_write_it() -> None:
    access = Access(tenants=Tenants({"one": TenantConfig(keys=(hash_of("key"),))}), admin_token="token")
    for headers in (
        {"Authorization": "Bearer key"},
        {"Authorization": "bearer key"},
        {"Authorization": "BEARER  key "},
        {"X-API-Key": " key"},
    ):
        assert access.tenant_of(headers).name == "one"
    wrong = ("key", "Basic key", "Bearer key2", "Bearer ke", "Bearer", "Bearer k\udcffy", "Bearer token", "")
    for value in (*wrong, f"Bearer {hash_of('key')}"):
        with pytest.raises(ApiKeyError) as refused:
            access.tenant_of({"Authorization": value})
        assert refused.value.http_status == 401
    access.check_admin({"Authorization": "Bearer token"})
    for value in (*wrong[:-2], "Bearer key", ""):
        with pytest.raises(AdminTokenError):
            access.check_admin({"Authorization": value})
