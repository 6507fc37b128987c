"""Another region, as a link reaches it."""

import re
import ssl
from pathlib import Path
from typing import Self

import pydantic

from penstock.core.config import Config, wrong
from penstock.core.errors import ConfigError
from penstock.engine.openai.config import HealthConfig, LimitsConfig, ServerConfig, base_url

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")


class RegionTlsConfig(Config):
    """Certificates for the frontends of another region."""

    authority: str | None = pydantic.Field(default=None, min_length=1)
    """File with the certificates of the authorities that signed those of the frontends; null: those of the system."""
    certificate: str | None = pydantic.Field(default=None, min_length=1)
    """File with this deployment's own certificate, where a proxy in front of the other region asks for one."""
    key: str | None = pydantic.Field(default=None, min_length=1)
    """File with the private key of `certificate`."""

    @pydantic.model_validator(mode="after")
    def _check_pair(self) -> Self:
        if (self.certificate is None) is not (self.key is None):
            given, lacks = ("certificate", "key") if self.key is None else ("key", "certificate")
            raise wrong(f"{given} is set without {lacks}; set both, or leave both out")
        return self

    def context(self, place: str) -> ssl.SSLContext:
        """Read the files.

        Raises:
            ConfigError: one cannot be read, or certificate and key do not belong together.
        """
        try:
            authority = None if self.authority is None else str(Path(self.authority).expanduser())
            context = ssl.create_default_context(cafile=authority)
        except OSError as error:
            raise ConfigError(f"{place}.authority: {self.authority}: {_reason(error)}") from error
        if self.certificate is not None and self.key is not None:
            try:
                context.load_cert_chain(Path(self.certificate).expanduser(), Path(self.key).expanduser())
            except OSError as error:
                raise ConfigError(
                    f"{place}: {self.certificate} and {self.key}: {_reason(error)}; expected a certificate and its key"
                ) from error
        return context


class RegionLimits(LimitsConfig):
    """Bounds on one request to another region."""

    silence_s: float = pydantic.Field(default=60.0, gt=0)
    """Longest seconds without a token of an answer, the wait for its first one included; then the request goes to another worker."""


class RegionHealth(HealthConfig):
    """When another region gets no requests, and when it gets them again."""

    interval_s: float = pydantic.Field(default=1.0, gt=0)
    """Seconds between two checks of the region, and of each of its frontends where there are several."""
    timeout_s: float = pydantic.Field(default=3.0, gt=0)
    """Longest seconds of a check, and of the trial request that lets the region back in."""
    failures_max: int = pydantic.Field(default=2, ge=1)
    """Failed checks in a row, or failed requests in a row, after which the region, or one of its frontends, gets no more."""


class RegionConfig(Config):
    """How the frontends of another region are reached."""

    name: str
    """The other region, by the name that it has in its own `router.location.region`."""
    urls: tuple[str, ...] = pydantic.Field(min_length=1, max_length=64)
    """Its frontends, such as https://10.0.1.1:8000: requests go to the one with the fewest of them; one that fails gets none until it answers again."""
    model: str | None = pydantic.Field(default=None, min_length=1)
    """The model's name there; null: the one that has the name or path of this graph's model."""
    api_key_file: str | None = pydantic.Field(default=None, min_length=1)
    """File whose first line is the API key that the other region knows this one by; null: it asks for none."""
    tls: RegionTlsConfig | None = None
    """Certificates, where the URLs are https; null: the system's authorities."""
    limits: RegionLimits = RegionLimits()
    """Bounds on one request to it."""
    health: RegionHealth = RegionHealth()
    """When it gets no requests."""
    load_interval_s: float = pydantic.Field(default=0.5, gt=0)
    """Seconds between two readings of its load."""

    @pydantic.field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise wrong(f"must be up to 40 small letters, digits or '-', the ends no '-', got {name!r}")
        return name

    @pydantic.field_validator("urls", mode="before")
    @classmethod
    def _read_urls(cls, urls: object) -> object:
        return (urls,) if isinstance(urls, str) else urls

    @pydantic.field_validator("urls")
    @classmethod
    def _check_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        checked = tuple(base_url(url) for url in urls)
        for url in checked:
            if checked.count(url) > 1:
                raise wrong(f"{url} is named twice; name each frontend once")
        return checked

    @pydantic.model_validator(mode="after")
    def _check_tls(self) -> Self:
        plain = [url for url in self.urls if not url.startswith("https:")]
        if self.tls is not None and plain:
            raise wrong(f"tls has no effect on {plain[0]}; name the frontends by https://, or leave tls out")
        return self

    def server(self) -> ServerConfig:
        """Give the same as settings of a server."""
        return ServerConfig(
            url=self.urls[:1],
            model=self.model,
            api="penstock",
            api_key_file=self.api_key_file,
            limits=self.limits,
            health=self.health,
            load_interval_s=self.load_interval_s,
        )


class LinkConfig(RegionConfig):
    """The `engine_args` of a link: the other region, and the name of this one."""

    here: str
    """This deployment's region."""


def _reason(error: OSError) -> str:
    """Say why a file cannot be used; OpenSSL's own errors have no text of the system."""
    if isinstance(error, ssl.SSLError):
        return (
            "no certificates that can be read"
            if error.reason is None
            else error.reason.lower().replace("_", " ")
        )
    return (error.strerror or str(error)).lower()
