"""Settings of the endpoint picker."""

import pydantic

from penstock.core.config import Config
from penstock.frontend.config import ServerTlsConfig


class EndpointPickerConfig(Config):
    """Where Envoy asks for endpoints, over gRPC."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface."""
    port: int = pydantic.Field(default=9002, ge=0, le=65535)
    """TCP port; 0 lets the system choose."""
    tls: ServerTlsConfig | None = None
    """Certificate of the port, read again when it changes; None: no TLS."""
    body_timeout_s: float = pydantic.Field(default=60.0, gt=0)
    """A request whose body is not complete after so long is refused with 408."""
