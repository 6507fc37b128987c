"""Envoy's external processing messages, with the fields that a picker reads or sets.

Numbers and types are those of `envoy/service/ext_proc/v3/external_processor.proto` and what it imports; Envoy's other fields are skipped as
unknown ones. The published modules of all of Envoy's messages bring their own `opentelemetry` package, which replaces that of OpenTelemetry.
"""

from enum import IntEnum
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_PACKAGE = "penstock.ext_proc"
_SCALARS = {
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "int": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,  # of enums, which are the same bytes
    "str": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
}
_ASKED, _ANSWERED = "request", "response"
_MESSAGES: dict[str, dict[str, tuple[Any, ...]]] = {
    "HeaderValue": {"key": (1, "str"), "value": (2, "str"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "[HeaderValue]")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int")},
    "HeaderMutation": {"set_headers": (1, "[HeaderValueOption]")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "BodyMutation": {"body": (1, "bytes", "mutation"), "streamed_response": (3, "StreamedBodyResponse", "mutation")},
    "CommonResponse": {"header_mutation": (2, "HeaderMutation"), "body_mutation": (3, "BodyMutation"), "clear_route_cache": (5, "bool")},
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
    "HttpStatus": {"code": (1, "int")},
    "ImmediateResponse": {"status": (1, "HttpStatus"), "headers": (2, "HeaderMutation"), "body": (3, "bytes"), "details": (5, "str")},
    "ProtocolConfiguration": {"request_body_mode": (1, "int"), "response_body_mode": (2, "int")},
    "FilterMetadataEntry": {"key": (1, "str"), "value": (2, "Struct")},
    "Metadata": {"filter_metadata": (1, "[FilterMetadataEntry]")},
    "ProcessingRequest": {
        "request_headers": (2, "HttpHeaders", _ASKED), "response_headers": (3, "HttpHeaders", _ASKED),
        "request_body": (4, "HttpBody", _ASKED), "response_body": (5, "HttpBody", _ASKED),
        "request_trailers": (6, "HttpTrailers", _ASKED), "response_trailers": (7, "HttpTrailers", _ASKED),
        "metadata_context": (8, "Metadata"), "protocol_config": (11, "ProtocolConfiguration"),
    },
    "ProcessingResponse": {
        "request_headers": (1, "HeadersResponse", _ANSWERED), "response_headers": (2, "HeadersResponse", _ANSWERED),
        "request_body": (3, "BodyResponse", _ANSWERED), "response_body": (4, "BodyResponse", _ANSWERED),
        "request_trailers": (5, "TrailersResponse", _ANSWERED), "response_trailers": (6, "TrailersResponse", _ANSWERED),
        "immediate_response": (7, "ImmediateResponse", _ANSWERED), "dynamic_metadata": (8, "Struct"),
    },
}  # fmt: skip
"""Message -> field -> (number, type, its oneof); [TYPE] is repeated."""


class BodyMode(IntEnum):
    """`ProcessingMode.BodySendMode`: how Envoy sends a body."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


OVERWRITE_IF_EXISTS_OR_ADD = 2
"""`HeaderValueOption.HeaderAppendAction`: set a header whether it is there or not."""


def _classes() -> dict[str, Any]:
    """Make a class of each message."""
    file = descriptor_pb2.FileDescriptorProto(
        name="penstock/ext_proc.proto",
        package=_PACKAGE,
        syntax="proto3",
        dependency=[struct_pb2.DESCRIPTOR.name],
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind, *oneof) in fields.items():
            _add(message, field, number, kind, oneof)
        if name == "FilterMetadataEntry":
            message.options.map_entry = True
    _nest_entry(file)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
        if name != "FilterMetadataEntry"
    }


def _add(message: Any, name: str, number: int, kind: str, oneof: list[str]) -> None:
    field = message.field.add(name=name, number=number)
    inner = kind.strip("[]")
    field.label = field.LABEL_REPEATED if inner != kind else field.LABEL_OPTIONAL
    if inner in _SCALARS:
        field.type = _SCALARS[inner]
    else:
        field.type = field.TYPE_MESSAGE
        field.type_name = ".google.protobuf.Struct" if inner == "Struct" else f".{_PACKAGE}.{inner}"
    for group in oneof:
        known = [one.name for one in message.oneof_decl]
        if group not in known:
            message.oneof_decl.add(name=group)
            known.append(group)
        field.oneof_index = known.index(group)


def _nest_entry(file: Any) -> None:
    """Put the entry of the one map where protobuf has it, inside of its message."""
    (entry,) = [message for message in file.message_type if message.options.map_entry]
    (holder,) = [message for message in file.message_type if message.name == "Metadata"]
    holder.nested_type.add().CopyFrom(entry)
    holder.field[0].type_name = f".{_PACKAGE}.Metadata.{entry.name}"
    file.message_type.remove(entry)


_made = _classes()
HttpBody: Any = _made["HttpBody"]
HttpHeaders: Any = _made["HttpHeaders"]
HttpTrailers: Any = _made["HttpTrailers"]
ProcessingRequest: Any = _made["ProcessingRequest"]
ProcessingResponse: Any = _made["ProcessingResponse"]
HeadersResponse: Any = _made["HeadersResponse"]
BodyResponse: Any = _made["BodyResponse"]
TrailersResponse: Any = _made["TrailersResponse"]
