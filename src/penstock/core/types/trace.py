"""The trace that a request belongs to."""

from penstock.core.wire import Wire

_TRACE_ID = slice(3, 35)


class TraceContext(Wire, frozen=True):
    """What a client said of its request for logs and traces, passed on unchanged to workers and the servers behind them.

    Attributes:
        request_id: the client's `X-Request-Id`; empty: none.
        traceparent: W3C's header, valid; empty: none.
        tracestate: W3C's header; empty: none.
    """

    request_id: str = ""
    traceparent: str = ""
    tracestate: str = ""

    @property
    def trace_id(self) -> str:
        """The 32 hexadecimal digits that all spans of the trace share; empty without a traceparent."""
        return self.traceparent[_TRACE_ID]

    def headers(self) -> dict[str, str]:
        """Give the HTTP headers that pass it on."""
        named = {
            "X-Request-Id": self.request_id,
            "traceparent": self.traceparent,
            "tracestate": self.tracestate,
        }
        return {name: value for name, value in named.items() if value}
